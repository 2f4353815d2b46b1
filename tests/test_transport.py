import contextlib
import gc
import multiprocessing
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace

import numpy as np
import pytest

from tpu_sync_rl import _native
from tpu_sync_rl.errors import CorruptionError, PlanError, SyncError, VersionError
from tpu_sync_rl.report import RailReport
from tpu_sync_rl.transport import Exporter, Fetcher

SHAPE = (600, 2000)
CHUNK_NBYTES = 400 << 10  # small chunks would be in flight beside one another
WAIT_S = 20.0
# Two rows of boxes at the source, two columns at the sink.
SOURCE_BOXES = np.array([[[0, 300], [0, 2000]], [[300, 600], [0, 2000]]])
SINK_BOXES = np.array([[[0, 600], [0, 1000]], [[0, 600], [1000, 2000]]])


def layout(boxes: np.ndarray) -> _native.BoxLayout:
    num_boxes = len(boxes)
    return _native.BoxLayout(
        np.array(SHAPE),
        boxes.reshape(-1),
        np.arange(num_boxes + 1, dtype=np.uint32),
        np.zeros(num_boxes, np.uint32),
    )


def make_plan() -> _native.Plan:
    pairs = np.array([[0, 0, 0, 1, 4, 4, 0]], np.uint32)
    return _native.make_plan([layout(SOURCE_BOXES), layout(SINK_BOXES)], pairs, 0, CHUNK_NBYTES)


def make_exporter(
    *, peer_timeout_s: float = WAIT_S, num_workers: int = 2, traced: bool = False
) -> Exporter:
    shards = SimpleNamespace(
        leaf=np.zeros(2, np.uint32),
        box=np.arange(2, dtype=np.uint32),
        itemsize=np.full(2, 4, np.uint32),
        kind=np.full(2, 3, np.uint8),
        rank=np.full(2, 2, np.uint32),
        ranges=SOURCE_BOXES.reshape(-1),
        num_leaves=1,
    )
    return Exporter(shards, peer_timeout_s=peer_timeout_s, num_workers=num_workers, traced=traced)


def leaf(version: int) -> np.ndarray:
    return np.random.default_rng(version).random(SHAPE, np.float32)


def publish(exporter: Exporter, version: int, array: np.ndarray) -> None:
    addresses = np.array([array.ctypes.data, array[300:].ctypes.data], np.uint64)
    exporter.publish(version, addresses, np.array(array.strides * 2, np.int64))


class Sink:
    def __init__(self, **options: float) -> None:
        self.fetcher = Fetcher(make_plan(), peer_timeout_s=WAIT_S, **options)
        self.boxes = [np.zeros((600, 1000), np.float32) for _ in range(2)]
        self.addresses = np.array([box.ctypes.data for box in self.boxes], np.uint64)

    def fetch(self, version: int) -> None:
        self.fetcher.begin(version, self.addresses)
        try:
            assert self.fetcher.wait(WAIT_S)
        finally:
            self.fetcher.end()

    def holds(self, array: np.ndarray) -> bool:
        return bool((np.concatenate(self.boxes, axis=1) == array).all())


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def connect(exporter: Exporter, sink: Sink, *, sink_id: int = 7, rail: str = "rail") -> None:
    ours, theirs = (end.detach() for end in socket.socketpair())
    try:
        exporter.add_connection(ours, sink_id, rail)
    finally:
        sink.fetcher.add_stream(0, theirs, rail)


@pytest.fixture
def exporter():
    with contextlib.closing(make_exporter()) as exporter:
        yield exporter


@pytest.fixture
def sink():
    sink = Sink()
    with contextlib.closing(sink.fetcher):
        yield sink


def test_versions_arrive_one_after_another(exporter, sink):
    connect(exporter, sink)
    connect(exporter, sink)
    for version in (0, 5, 2**40):
        array = leaf(version)
        publish(exporter, version, array)
        sink.fetch(version)
        assert sink.holds(array)
        assert sink.fetcher.progress_nbytes() == array.nbytes
        exporter.withdraw(version)


def test_what_a_source_says_is_shown_though_it_is_no_text(sink):
    frame = struct.Struct("<3sBIQQI")
    ours, theirs = socket.socketpair()
    sink.fetcher.begin(1, sink.addresses)
    sink.fetcher.add_stream(0, ours.detach(), "rail")
    with theirs, theirs.makefile("rb") as stream:
        magic, _, table, *_, nbytes = frame.unpack(stream.read(frame.size))
        stream.read(4 + nbytes)
        invalid = frame.pack(magic, 21, table, 0, 0, 4)
        theirs.sendall(invalid + struct.pack("<I", _native.crc32c(invalid)) + b"\xff no")
        with pytest.raises(PlanError, match=r"source process 0: \\xff no"):
            sink.fetcher.wait(WAIT_S)
        assert stream.read() == b""
    assert sink.fetcher.lost_reasons() == {0: r"source process 0: \xff no"}


def _ask_for_stats_within_collections() -> None:
    exporter = make_exporter()
    for rail in ("a", "b", "c"):
        exporter.add_connection(socket.socketpair()[0].detach(), 7, rail)
    asking = False

    def ask(phase: str, info: dict[str, int]) -> None:
        nonlocal asking
        if not asking:
            asking = True
            exporter.stats()
            asking = False

    gc.callbacks.append(ask)
    gc.set_threshold(1)
    kept = [exporter.stats() for _ in range(1000)]
    gc.callbacks.remove(ask)
    assert kept


def test_stats_may_be_asked_for_by_what_runs_while_they_are_made():
    # Making objects may collect garbage, which runs Python code; under a lock that would hang.
    child = multiprocessing.get_context("spawn").Process(target=_ask_for_stats_within_collections)
    child.start()
    child.join(2 * WAIT_S)
    child.kill()
    child.join()
    assert child.exitcode == 0


def test_traffic_is_of_the_version_that_began_last(exporter, sink):
    array = leaf(1)
    publish(exporter, 1, array)
    connect(exporter, sink, rail="a")
    for _ in range(2):
        sink.fetch(1)
        traffic = sink.fetcher.received()
        (rail,) = traffic.rails.items()
        moved = RailReport(
            nbytes=array.nbytes,
            seconds=rail[1].seconds,
            num_streams=1,
            window_nbytes=rail[1].window_nbytes,
        )
        assert rail == ("a", moved)
        assert moved.window_nbytes >= 3 * CHUNK_NBYTES
        assert traffic.seconds.keys() == {"wire", "receive", "checksum", "scatter"}
        assert all(0 < spent_s < WAIT_S for spent_s in traffic.seconds.values())
        assert 0 < rail[1].seconds < WAIT_S
    assert exporter.stats()["a"]["nbytes"] == 2 * array.nbytes


def test_exporter_tells_what_it_sent_since_it_was_asked(exporter, sink):
    array = leaf(1)
    publish(exporter, 1, array)
    connect(exporter, sink, rail="a")
    sink.fetch(1)
    sent = exporter.sent()
    assert sent.rails["a"].nbytes == array.nbytes
    assert sent.seconds.keys() == {"gather", "checksum", "send", "wire"}
    assert all(spent_s > 0 for spent_s in sent.seconds.values())
    assert sent.seconds["wire"] == sent.rails["a"].seconds
    idle = exporter.sent()
    assert idle.rails == {"a": RailReport()} and not any(idle.seconds.values())


def test_both_ends_trace_every_chunk_on_its_stream():
    exporter, sink = make_exporter(traced=True), Sink(traced=True)
    array = leaf(1)
    publish(exporter, 1, array)
    for _ in range(2):
        connect(exporter, sink, rail="a")
    before = time.monotonic()
    sink.fetch(1)
    exporter.close()
    received, num_dropped = sink.fetcher.take_events()
    sent, _ = exporter.take_events()
    assert num_dropped == 0 and sink.fetcher.take_events() == ([], 0)
    for events, peer in ((received, 0), (sent, 7)):
        assert sum(event.nbytes for event in events) == array.nbytes
        assert {(event.rail, event.peer, event.version) for event in events} == {("a", peer, 1)}
        assert {event.number for event in events} <= {1, 2}
        assert all(before <= x.asked <= x.ended <= time.monotonic() for x in events)
    chunks = make_plan().num_chunks
    assert sorted(x.chunk for x in received) == sorted(x.chunk for x in sent) == [*range(chunks)]
    sink.fetcher.close()


def test_nothing_is_kept_for_a_trace_that_nobody_writes(exporter, sink):
    array = leaf(1)  # kept: its memory is read
    publish(exporter, 1, array)
    connect(exporter, sink)
    sink.fetch(1)
    assert sink.fetcher.take_events() == exporter.take_events() == ([], 0)


def test_finished_leaves_may_be_dropped_and_published_again(exporter, sink):
    array = leaf(1)
    publish(exporter, 1, array)
    connect(exporter, sink)
    assert exporter.finished_leaves(1, [7]) == []
    sink.fetch(1)
    until(lambda: exporter.finished_leaves(1, [7]) == [0])  # the last word is not answered
    exporter.drop_leaves(1, [0])
    with pytest.raises(VersionError, match="process 0: leaf 0 of version 1 is not held any more"):
        sink.fetch(1)
    moved = array.copy()
    publish(exporter, 1, moved)
    connect(exporter, sink)
    sink.fetch(1)
    assert sink.holds(moved)
    exporter.withdraw(1)


def test_chunks_wait_for_a_stream(exporter, sink):
    array = leaf(1)
    publish(exporter, 1, array)
    sink.fetcher.begin(1, sink.addresses)
    assert not sink.fetcher.wait(0)
    assert sink.fetcher.num_streams(0) == 0
    connect(exporter, sink)
    assert sink.fetcher.wait(WAIT_S)
    sink.fetcher.end()
    assert sink.holds(array)


def test_version_that_is_not_published_is_a_version_error(exporter, sink):
    connect(exporter, sink)
    with pytest.raises(VersionError, match="source process 0: version 3 is not published here"):
        sink.fetch(3)


def _flip_first_of_each_chunk(source: socket.socket, sink: socket.socket, num_flips: int) -> None:
    """Forwards what a source says, and changes a byte in each of its first chunks."""
    with source.makefile("rb") as stream, contextlib.suppress(OSError):
        while frame := stream.read(32):
            sink.sendall(frame)
            nbytes = int.from_bytes(frame[24:28], "little")
            payload = bytearray(stream.read(nbytes))
            if frame[3] == 18:
                payload[0] ^= num_flips > 0
                num_flips -= 1
                payload += stream.read(4)
            sink.sendall(payload)


@contextlib.contextmanager
def flipping(exporter: Exporter, sink: Sink, num_flips: int):
    """One stream that goes through hands which change bytes of its first chunks."""
    ours, source_side = socket.socketpair()
    theirs, sink_side = socket.socketpair()

    def forward_requests() -> None:
        with contextlib.suppress(OSError):
            while part := sink_side.recv(1 << 16):
                source_side.sendall(part)

    threads = [
        threading.Thread(target=forward_requests),
        threading.Thread(
            target=_flip_first_of_each_chunk, args=(source_side, sink_side, num_flips)
        ),
    ]
    exporter.add_connection(ours.detach(), 7, "rail")
    sink.fetcher.add_stream(0, theirs.detach(), "rail")
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for end in (source_side, sink_side):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        source_side.close()
        sink_side.close()


def test_changed_byte_is_found_and_its_chunk_fetched_again(exporter):
    sink = Sink(window=1, traced=True)
    array = leaf(1)
    publish(exporter, 1, array)
    with flipping(exporter, sink, num_flips=1):
        sink.fetcher.begin(1, sink.addresses)
        until(lambda: not sink.fetcher.num_streams(0))
        connect(exporter, sink)
        assert sink.fetcher.wait(WAIT_S)
        sink.fetcher.end()
    assert sink.holds(array)
    (rail,) = sink.fetcher.received().rails.values()
    assert (rail.num_retries, rail.num_lost) == (1, 1)
    events, _ = sink.fetcher.take_events()
    (lost,) = [event for event in events if not event.nbytes]
    again = [x.num_retries for x in events if x.nbytes and x.chunk == lost.chunk]
    assert lost.num_retries == 0 and again == [1]
    assert {event.number for event in events} == {1}
    sink.fetcher.close()


def test_chunk_that_is_changed_every_time_is_a_corruption_error(exporter):
    sink, array = Sink(window=1), leaf(1)
    publish(exporter, 1, array)
    sink.fetcher.begin(1, sink.addresses)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(flipping(exporter, sink, num_flips=1))
            until(lambda: not sink.fetcher.num_streams(0))
        with pytest.raises(CorruptionError, match="chunk 0 of source process 0 does not match"):
            sink.fetcher.wait(WAIT_S)
    sink.fetcher.end()
    sink.fetcher.close()


def test_closed_ones_say_so(exporter, sink):
    exporter.close()
    with pytest.raises(SyncError, match="the exporter is closed"):
        connect(exporter, sink)
    sink.fetcher.close()
    with pytest.raises(SyncError, match="the fetcher is closed"):
        sink.fetcher.add_stream(0, socket.socket().detach(), "rail")
    with pytest.raises(SyncError, match="the fetcher is closed"):
        sink.fetcher.begin(1, sink.addresses)


def test_closing_ends_a_call_that_waits(sink):
    sink.fetcher.begin(1, sink.addresses)
    failures: list[str] = []

    def wait() -> None:
        try:
            sink.fetcher.wait(WAIT_S)
        except SyncError as error:
            failures.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    sink.fetcher.close()
    waiting.join(WAIT_S)
    assert failures == ["the fetcher is closed"]


@pytest.mark.parametrize("option", ["num_workers", "window", "peer_timeout_s"])
def test_options_are_positive(option):
    options = {"num_workers": 1, "window": 1, "peer_timeout_s": 1.0, option: 0}
    with pytest.raises(ValueError, match="fetcher: every option has to be positive"):
        Fetcher(make_plan(), **options)
    options.pop("window")
    if option != "window":
        with pytest.raises(ValueError, match="exporter: every option has to be positive"):
            make_exporter(**options)


def test_wrong_numbers_of_addresses_are_named(exporter, sink):
    nothing = np.zeros(0, np.uint64)
    with pytest.raises(ValueError, match="expected 2 addresses and 4 strides, got 0 and 0"):
        exporter.publish(1, nothing, np.zeros(0, np.int64))
    with pytest.raises(ValueError, match="expected 2 sink addresses, got 0"):
        sink.fetcher.begin(1, nothing)


def _serve(port_of: Connection) -> None:
    exporter = make_exporter()
    arrays = [leaf(version) for version in range(3)]
    for version, array in enumerate(arrays):
        publish(exporter, version, array)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port_of.send(server.getsockname()[1])
        while True:
            exporter.add_connection(server.accept()[0].detach(), 7, "lo-lo")


def test_source_that_is_killed_and_started_again_costs_no_byte():
    context = multiprocessing.get_context("spawn")
    sink = Sink()
    ours, theirs = context.Pipe()
    for version in range(3):
        source = context.Process(target=_serve, args=(theirs,), daemon=True)
        source.start()
        port = ours.recv()
        for _ in range(2):
            dialled = socket.create_connection(("127.0.0.1", port))
            sink.fetcher.add_stream(0, dialled.detach(), "lo-lo")
        sink.fetch(version)
        assert sink.holds(leaf(version))
        source.kill()
        source.join()
        until(lambda: not sink.fetcher.num_streams(0))
    sink.fetcher.close()
