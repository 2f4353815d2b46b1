"""Syncs as a Chrome trace, for chrome://tracing and Perfetto: stages, and chunks on their streams.

Format: the JSON array form of the Trace Event Format, whose closing bracket is optional, so that
the file of a program that was killed can be opened as well. Times are microseconds of the wall
clock, taken from the monotonic one when they are written: traces of all processes of a host fit
together, those of several hosts as well as their clocks do. Processes are told apart by their pid,
so that the events of several files can be put into one.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

_STAGES = 0  # the track of the process itself


class ChunkEvent(NamedTuple):
    """A chunk's way over a stream, as one end of it saw it. Times are of time.monotonic().

    Attributes:
        rail: of the stream.
        number: of the stream on this rail, from 1; one that is opened again has it again.
        peer: at a sink the index of the source's process, at a source the sink's id.
        version: of the params.
        chunk: its place in the source's table.
        nbytes: of the chunk; 0 where the stream was lost before it had come.
        num_retries: how often it had been asked for in vain before; known to the sink alone.
        asked: when it was asked for; at a source, when the request came in.
        ended: when it was verified; at a source, when the kernel had its last byte.
    """

    rail: str
    number: int
    peer: int
    version: int
    chunk: int
    nbytes: int
    num_retries: int
    asked: float
    ended: float


class Trace:
    """Writes what one process does to a file. May be used from any thread.

    A file that can't be written any further is left as it is, and the process told.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        name: str,
        process: int,
        warn: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Creates the file; `path` None writes nothing.

        Args:
            path: of process 0; other processes of the program append their index, as ".1".
            name: of the program.
            process: index of this process in it.
            warn: is told, once, that the file can't be written.

        Raises:
            OSError: the file can't be created.
        """
        self._warn = warn
        self._lock = threading.RLock()  # guards all below
        self._file: FileIO | None = None
        self._separator = "\n"
        self._tracks: dict[tuple[str, int], int] = {}  # rail and number of a stream -> its track
        self._ended: dict[int, float] = {}  # the last chunk of a track
        if path is not None:
            own = Path(path) if process == 0 else Path(f"{os.fspath(path)}.{process}")
            try:
                # Without a buffer, of which a fork of this process would write a copy.
                self._file = own.open("wb", buffering=0)
            except OSError as error:
                raise OSError(error.errno, f"trace=: {error.strerror}", os.fspath(own)) from error
            self._put("[")
            self._write(
                [
                    _event("process_name", "M", args={"name": f"{name}, process {process}"}),
                    _event("thread_name", "M", args={"name": "stages"}),
                ]
            )

    @property
    def is_on(self) -> bool:
        """Whether there is a file."""
        return self._file is not None

    def stages(self, version: int, began: float, seconds: Iterable[tuple[str, float]]) -> None:
        """Adds stages that followed one another.

        Args:
            version: what they were of.
            began: when the first one began, on the clock of time.monotonic().
            seconds: name and duration of each.
        """
        offset_s = time.time() - time.monotonic()
        events = []
        for stage, spent_s in seconds:
            events.append(_slice(stage, _STAGES, began + offset_s, spent_s, version=version))
            began += spent_s
        self._write(events)

    def beside(self, version: int, stage: str, began: float, spent_s: float) -> None:
        """Adds a stage that went on while others did, on a track of its own."""
        offset_s = time.time() - time.monotonic()
        with self._lock:
            track, named = self._track((stage, 0), stage)
        self._write([*named, _slice(stage, track, began + offset_s, spent_s, version=version)])

    def chunks(self, peer: str, chunks: Sequence[ChunkEvent], num_dropped: int) -> None:
        """Adds chunks to the tracks of their streams.

        A stream's requests wait in line. The slice of a chunk begins with its request, or when the
        chunk before it ended: how long it waited for that is beside it.

        Args:
            peer: what the other end is called.
            chunks: in their order on each stream.
            num_dropped: how many more there were.
        """
        offset_s = time.time() - time.monotonic()
        with self._lock:
            events = [event for chunk in chunks for event in self._chunk(peer, chunk, offset_s)]
            if num_dropped:
                text = f"{num_dropped} chunks are missing here"
                events.append(_event(text, "i", ts=time.time() * 1e6, s="p"))
            self._write(events)

    def close(self) -> None:
        """Ends the file. Idempotent."""
        with self._lock:
            self._put("\n]\n")
            self._let_go()

    def _chunk(self, peer: str, chunk: ChunkEvent, offset_s: float) -> Iterator[dict[str, Any]]:
        name = f"{chunk.rail} stream {chunk.number}"
        track, named = self._track((chunk.rail, chunk.number), name)
        yield from named
        began = max(chunk.asked, self._ended.get(track, chunk.asked))
        self._ended[track] = chunk.ended
        arguments = {
            peer: chunk.peer,
            "chunk": chunk.chunk,
            "version": chunk.version,
            "nbytes": chunk.nbytes,
            "retries": chunk.num_retries,
            "waited_us": round((began - chunk.asked) * 1e6, 3),
        }
        name = f"chunk {chunk.chunk}" + ("" if chunk.nbytes else ", lost")
        yield _slice(name, track, began + offset_s, chunk.ended - began, **arguments)

    def _track(self, key: tuple[str, int], name: str) -> tuple[int, list[dict[str, Any]]]:
        """The track of `key`, and the event that names it, if it is a new one."""
        if key in self._tracks:
            return self._tracks[key], []
        track = self._tracks[key] = len(self._tracks) + 1
        return track, [_event("thread_name", "M", track, args={"name": name})]

    def _write(self, events: Sequence[dict[str, Any]]) -> None:
        texts = [json.dumps(event) for event in events]
        with self._lock:
            if texts:
                self._put(self._separator + ",\n".join(texts))
                self._separator = ",\n"

    def _put(self, text: str) -> None:
        file, left = self._file, memoryview(text.encode())
        try:
            while file is not None and left:
                left = left[file.write(left) :]
        except OSError as error:
            self._give_up(error)

    def _let_go(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError as error:  # some file systems tell of a full disk only now
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
        self._warn(f"its trace= can't be written, and ends here: {error}")


def _event(name: str, phase: str, track: int = _STAGES, **fields: Any) -> dict[str, Any]:
    return {"name": name, "ph": phase, "pid": os.getpid(), "tid": track, **fields}


def _slice(name: str, track: int, began_s: float, spent_s: float, **args: Any) -> dict[str, Any]:
    return _event(name, "X", track, ts=began_s * 1e6, dur=spent_s * 1e6, args=args)
