"""Watches rails while a version comes over them, and tells of those that carry nothing."""

import time
from collections.abc import Callable

from tpu_sync_rl.dialler import Dialler
from tpu_sync_rl.messages import Held, Message
from tpu_sync_rl.sampler_messages import Hindered
from tpu_sync_rl.session_log import SessionLog
from tpu_sync_rl.transport import Trouble

_TOLD_EVERY_S = 1.0  # to the coordinator, where something has changed


class RailWatch:
    """Tells the log and the coordinator of streams that get nothing, or that were lost.

    One per transfer of a version; used on the thread that waits for it.
    """

    def __init__(self, held: Held, log: SessionLog, send: Callable[[Message], None]) -> None:
        self._held = held
        self._log = log
        self._send = send
        self._seen: dict[tuple[int, str], Trouble] = {}
        self._told = ""
        self._next_round = 0.0

    def look(self, dialler: Dialler) -> None:
        """Tells what is new; returns at once. May be called as often as one likes."""
        if time.monotonic() < self._next_round:
            return
        self._next_round = time.monotonic() + _TOLD_EVERY_S
        troubles = {(x.source_process, x.rail): x for x in dialler.troubles()}
        texts = {key: f"{dialler.way(*key)}: {x}" for key, x in troubles.items()}
        for key, trouble in troubles.items():
            if trouble.is_news_after(self._seen.get(key)):
                self._log.info(texts[key], self._held.version)
        self._seen = troubles
        text = f"reads from {'; '.join(texts.values())}" if texts else ""
        if text != self._told:
            self._told = text
            self._send(Hindered(self._held, text))
