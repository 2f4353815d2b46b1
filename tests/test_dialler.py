"""Which streams a dialler opens, on which rails, and what it says of those that it can't."""

import dataclasses
import queue
import socket
import threading
import time

import pytest
from test_rails import LOG, OPTIONS, WAIT_S, Address

from tpu_sync_rl import dialler, rails
from tpu_sync_rl.dialler import Dialler
from tpu_sync_rl.errors import PeerLostError
from tpu_sync_rl.nics import Nic
from tpu_sync_rl.options import LEAST_STREAMS, MOST_STREAMS
from tpu_sync_rl.rails import Connection, Rail
from tpu_sync_rl.report import Line, RailReport

ADDRESSES = [Address("x", "10.0.0.2", 1), Address("y", "10.0.1.2", 1)]
NICS = [Nic("a", "10.0.0.1"), Nic("b", "10.0.1.1")]
BOTH = ["a-x"] * 2 + ["b-y"] * 2


class Streams:
    """A fetcher's streams: process and rail of each that is alive."""

    def __init__(self) -> None:
        self.alive: list[tuple[int, str]] = []
        self.added: queue.Queue[tuple[int, str]] = queue.Queue()
        self.full: set[str] = set()  # rails that carry all they can

    def add_stream(self, process: int, fd: int, rail: str, ring_fd: int = -1) -> None:
        self.alive.append((process, rail))
        self.added.put((process, rail))

    def num_streams(self, process: int, rail: str | None = None) -> int:
        return sum(of == process and rail in (None, on) for of, on in self.alive)

    def is_full(self, process: int, rail: str) -> bool:
        return rail in self.full

    def lost_reasons(self) -> dict[int, str]:
        return {0: "closed by the peer"}

    def take(self, num: int) -> list[str]:
        return sorted(self.added.get(timeout=WAIT_S)[1] for _ in range(num))


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setattr(rails, "find_nics", lambda _: NICS)
    monkeypatch.setattr(rails, "dial", lambda *_, **__: Connection(-1))
    monkeypatch.setattr(dialler, "_REDIAL_S", 0.0)
    return Streams()


def make(
    streams: Streams,
    processes: range = range(1),
    addresses: list[Address] = ADDRESSES,
    name: str = "trainer",
    streams_per_rail: int | None = 2,
) -> Dialler:
    options = dataclasses.replace(OPTIONS, nics=("a", "b"), streams_per_rail=streams_per_rail)
    sources = dict.fromkeys(processes, addresses)
    tickets = [b"ticket"] * len(processes)
    return Dialler(
        options, streams, sources, name=name, incarnation="life", sink=1, tickets=tickets, log=LOG
    )


def test_every_rail_of_every_process_gets_its_streams(streams):
    make(streams, range(3)).open_missing()
    assert streams.take(12) == ["a-x"] * 6 + ["b-y"] * 6
    assert all(streams.num_streams(process) == 4 for process in range(3))


def test_rail_that_no_thread_could_dial_is_dialled_later(streams, monkeypatch):
    dialler = make(streams)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                dialler.open_missing()
    dialler.open_missing()
    assert streams.take(4) == BOTH


def test_stream_that_is_lost_is_opened_again_on_its_own_rail(streams):
    dialler = make(streams)
    dialler.open_missing()
    streams.take(4)
    streams.alive.remove((0, "b-y"))
    while streams.added.empty():  # the threads of the first round may still be ending
        dialler.open_missing()
    assert streams.take(1) == ["b-y"]


def test_full_rail_gets_more_streams_within_a_bound(streams):
    dialler = make(streams, streams_per_rail=None)
    dialler.open_missing()
    assert streams.take(4) == BOTH
    streams.full = {"b-y"}
    deadline = time.monotonic() + WAIT_S
    while streams.num_streams(0) < 2 + MOST_STREAMS and time.monotonic() < deadline:
        dialler.open_missing()
    for _ in range(3):
        dialler.open_missing()
    assert streams.take(MOST_STREAMS - 2) == ["b-y"] * (MOST_STREAMS - 2)
    streams.full = set()
    streams.alive.remove((0, "b-y"))
    while streams.added.empty():
        dialler.open_missing()
    assert streams.take(1) == ["b-y"]
    assert streams.num_streams(0, "a-x") == LEAST_STREAMS


def test_number_of_streams_that_the_user_gave_stays(streams):
    dialler = make(streams, streams_per_rail=1)
    streams.full = {"a-x", "b-y"}
    dialler.open_missing()
    assert streams.take(2) == ["a-x", "b-y"]
    dialler.open_missing()
    assert streams.added.empty()


def test_rail_that_is_down_holds_up_no_other_and_nobody_who_calls(streams, monkeypatch):
    up = threading.Event()

    def dial(rail: Rail, *_: object, **__: object) -> Connection:
        if rail.name == "a-x":
            assert up.wait(WAIT_S)
        return Connection(-1)

    monkeypatch.setattr(rails, "dial", dial)
    dialler = make(streams)
    dialler.open_missing()
    assert streams.take(2) == ["b-y"] * 2
    dialler.open_missing()  # it is being dialled already
    assert dialler.lost() == {}
    up.set()
    assert streams.take(2) == ["a-x"] * 2
    assert sorted(rail for _, rail in streams.alive) == BOTH


def test_traffic_is_described_by_the_nics_of_its_rail(streams, monkeypatch):
    lines = [Line(9000, 12.5), Line(1500)]
    nics = [dataclasses.replace(nic, line=line) for nic, line in zip(NICS, lines, strict=True)]
    monkeypatch.setattr(rails, "find_nics", lambda _: nics)
    addresses = [address._replace(line=Line(4000, 25)) for address in ADDRESSES]
    dialler = make(streams, addresses=addresses)
    dialler.open_missing()
    streams.take(4)
    assert dialler.described({"a-x": RailReport(nbytes=1), "b-y": RailReport()}) == {
        "a-x": RailReport(nbytes=1, line=Line(4000, 12.5)),
        "b-y": RailReport(line=Line(1500, 25)),
    }


def test_many_processes_are_dialled_by_a_thread_per_rail(streams, monkeypatch):
    dialled: queue.Queue[str] = queue.Queue()
    up = threading.Event()

    def dial(rail: Rail, *_: object, **__: object) -> Connection:
        dialled.put(rail.name)
        assert up.wait(WAIT_S)
        return Connection(-1)

    monkeypatch.setattr(rails, "dial", dial)
    dialler = make(streams, range(64))
    dialler.open_missing()
    assert sorted(dialled.get(timeout=WAIT_S) for _ in range(2)) == ["a-x", "b-y"]
    dialler.open_missing()
    names = [thread.name for thread in threading.enumerate()]
    assert sorted(x for x in names if x.startswith("tsr-dial")) == ["tsr-dial-a-x", "tsr-dial-b-y"]
    up.set()
    assert streams.take(64 * 4) == ["a-x"] * 128 + ["b-y"] * 128


def test_process_that_no_rail_reaches_is_lost_for_all_their_reasons(streams, monkeypatch):
    tried: queue.Queue[str] = queue.Queue()

    def dial(rail: Rail, *_: object, peer: str, **__: object) -> Connection:
        tried.put(rail.name)
        raise PeerLostError(f"{peer}: {rail.name} is down")

    dialler = make(streams)
    assert dialler.lost() == {0: "trainer process 0: closed by the peer"}
    monkeypatch.setattr(rails, "dial", dial)
    dialler.open_missing()
    tried.get(timeout=WAIT_S), tried.get(timeout=WAIT_S)
    while dialler.lost()[0].count("is down") < 2:
        pass
    assert sorted(dialler.lost()[0].split("; ")) == [
        "trainer process 0: a-x is down",
        "trainer process 0: b-y is down",
    ]


def test_replica_that_is_read_from_is_named_as_what_it_is(monkeypatch):
    monkeypatch.setattr(dialler, "_REDIAL_S", 0.0)
    streams = Streams()
    monkeypatch.setattr(streams, "lost_reasons", dict)
    with socket.socket() as silent:  # bound, and does not listen
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        replica = make(streams, addresses=[Address("lo", "127.0.0.1", port)], name="replica 'b',")
        assert replica.lost() == {0: "replica 'b', process 0: its streams were closed"}
        while "refused" not in replica.lost()[0]:
            replica.open_missing()
    assert replica.lost()[0].startswith(f"replica 'b', process 0 at 127.0.0.1:{port} (lo-lo): ")


def test_no_nic_is_a_reason_too(streams, monkeypatch):
    def find_nics(_: object) -> list[Nic]:
        raise ValueError("no NIC is up")

    monkeypatch.setattr(rails, "find_nics", find_nics)
    dialler = make(streams)
    dialler.open_missing()
    assert dialler.lost() == {0: "trainer process 0: no NIC is up"}


def test_closed_dialler_opens_nothing_more(streams, monkeypatch):
    dialled: queue.Queue[str] = queue.Queue()
    up = threading.Event()

    def dial(rail: Rail, *_: object, **__: object) -> Connection:
        dialled.put(rail.name)
        assert up.wait(WAIT_S)
        raise PeerLostError("down")

    monkeypatch.setattr(rails, "dial", dial)
    dialler = make(streams, range(2))
    dialler.open_missing()
    assert sorted(dialled.get(timeout=WAIT_S) for _ in range(2)) == ["a-x", "b-y"]
    dialler.close()
    up.set()
    for thread in threading.enumerate():
        if thread.name.startswith("tsr-dial"):
            thread.join(WAIT_S)
    assert dialled.empty()
