"""How much of unfinished messages a server holds, all of its streams together."""

import asyncio


class MessageRoom:
    """Memory for messages that come in pieces. All methods belong to one asyncio loop.

    Where it is full, streams wait until others have their messages. The one whose message began
    first never waits, so some message always gets whole, and no more than one goes beyond the room.
    """

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._nbytes: dict[object, int] = {}  # per stream, in the order in which messages began
        self._changed = asyncio.Event()  # replaced whenever a message ends

    async def take(self, stream: object, nbytes: int) -> None:
        """Waits until there is room for another piece of the message on `stream`."""
        self._nbytes.setdefault(stream, 0)
        while next(iter(self._nbytes)) is not stream and self._is_full_with(nbytes):
            await self._changed.wait()
        self._nbytes[stream] += nbytes

    def give_back(self, stream: object) -> None:
        """The message on `stream` has been read, or will not be. Idempotent."""
        if self._nbytes.pop(stream, None) is not None:
            self._changed.set()
            self._changed = asyncio.Event()

    def _is_full_with(self, nbytes: int) -> bool:
        return sum(self._nbytes.values()) + nbytes > self._most_nbytes
