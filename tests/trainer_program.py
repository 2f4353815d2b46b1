"""A trainer program of several processes within the test's own: each is a session on a thread."""

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

import tpu_sync_rl as tsr
from tpu_sync_rl.coordinator_process import start_coordinator
from tpu_sync_rl.options import Options, Staging
from tpu_sync_rl.program import Program
from tpu_sync_rl.trainer import TrainerSession

_OPTIONS = {
    "job": "policy",
    "token": None,
    "timeout": 20.0,
    "nics": None,
    "streams_per_rail": 1,
    "chunk_nbytes": 1 << 20,
    "congestion": None,
    "peer_timeout": 2.0,
    "same_host": "auto",
    "verify": "wire",
    "insecure": False,
    "trace": None,
    "tls": None,
    "metrics": None,
}


class TrainerProgram:
    """The sessions of a trainer whose process p has the devices `devices[p]`.

    Attributes:
        sessions: one for each process.
        coordinator: its address.
    """

    def __init__(
        self,
        devices: Sequence[Sequence[jax.Device]],
        *,
        staging: str = "direct",
        min_replicas: int = 0,
        **options: Any,
    ) -> None:
        self._hosted = start_coordinator(
            "127.0.0.1", 0, token=b"", peer_timeout=2.0, insecure=False
        )
        self.coordinator = self._hosted.address
        self._threads = ThreadPoolExecutor(len(devices))
        incarnation = secrets.token_hex(8)
        processes = {device: p for p, held in enumerate(devices) for device in held}

        def join(index: int) -> TrainerSession:
            return TrainerSession(
                Options.checked(**{**_OPTIONS, **options}),
                Program(index, len(devices), processes),
                Staging(mode=staging),
                incarnation=incarnation,
                min_replicas=min_replicas,
                straggler_timeout_s=20.0,
                on_straggler="wait",
                commit="replica",
                coordinator=self.coordinator,
                coordinator_process=None,
                deadline=time.monotonic() + 20.0,
            )

        self.sessions = self._all([lambda i=i: join(i) for i in range(len(devices))])

    def __enter__(self) -> "TrainerProgram":
        return self

    def __exit__(self, *_: object) -> None:
        self._all([session.close for session in self.sessions])
        self._threads.shutdown()
        self._hosted.stop()

    def sync(self, params: Any, **arguments: Any) -> list[tsr.Report | tsr.SyncHandle]:
        """`sync_weights` in each process; raises what the first one did, if any."""
        return self._all([lambda s=s: s.sync_weights(params, **arguments) for s in self.sessions])

    def failures(self, params: Any, **arguments: Any) -> list[Exception]:
        """What `sync_weights` raised in each process; all have to."""

        def failure(session: TrainerSession) -> Exception:
            try:
                session.sync_weights(params, **arguments)
            except Exception as error:
                return error
            raise AssertionError("it went well")

        return self._all([lambda s=s: failure(s) for s in self.sessions])

    def _all(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        started = [self._threads.submit(call) for call in calls]
        return [call.result(60) for call in started]
