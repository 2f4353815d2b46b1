"""Many peers at once: threads and descriptors grow with streams alone."""

import contextlib
import dataclasses
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

from test_rails import LOG, OPTIONS, WAIT_S
from test_transport import Sink, leaf, make_exporter, publish, until

from tpu_sync_rl import authentication
from tpu_sync_rl.dialler import Dialler
from tpu_sync_rl.listener import Listener, ListeningAt

NUM_PEERS = 64
NICS = ("127.0.0.1", "127.0.0.2")
OVER_BOTH = dataclasses.replace(OPTIONS, nics=NICS)
COORDINATOR = "10.0.0.2:1"  # not on loopback, so that the NICs that are named count
NUM_STREAMS = NUM_PEERS * len(NICS) * OPTIONS.streams_per_rail


def serve(pipe: Connection) -> None:
    """A trainer process without params of JAX: publishes one leaf, then waits for the end."""
    exporter = make_exporter()
    array = leaf(1)
    publish(exporter, 1, array)
    listener = Listener(
        OVER_BOTH,
        coordinator=COORDINATOR,
        incarnation="life",
        on_stream=lambda stream, sink, rail: exporter.add_connection(stream.fd, sink, rail),
        log=LOG,
    )
    pipe.send((listener.addresses, listener.ticket_secret))
    pipe.recv()
    listener.close()
    exporter.close()


def count(pid: int | None, kind: str) -> int:
    return len([*Path(f"/proc/{pid}/{kind}").iterdir()])


def connect(sink: Sink, peer: int, addresses: list[ListeningAt], secret: bytes) -> Dialler:
    ticket = authentication.ticket(secret, peer)
    return Dialler(
        OVER_BOTH,
        sink.fetcher,
        {0: addresses},
        name="trainer",
        incarnation="life",
        sink=peer,
        tickets=[ticket],
        log=LOG,
    )


def test_a_source_needs_a_descriptor_per_stream_and_no_thread_per_peer():
    ours, theirs = multiprocessing.Pipe()
    source = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    source.start()
    with contextlib.ExitStack() as stack:
        stack.callback(source.join)
        stack.callback(source.kill)
        theirs.close()  # so that the end of the source is seen
        addresses, secret = ours.recv()
        num_threads, num_fds = count(source.pid, "task"), count(source.pid, "fd")
        sinks = [Sink(num_workers=1) for _ in range(NUM_PEERS)]
        for sink in sinks:
            stack.callback(sink.fetcher.close)
        diallers = [connect(sink, 1 + i, addresses, secret) for i, sink in enumerate(sinks)]

        def is_connected() -> bool:
            for dialler in diallers:
                dialler.open_missing()
            return sum(sink.fetcher.num_streams(0) for sink in sinks) == NUM_STREAMS

        until(is_connected)
        for sink in sinks:
            sink.fetcher.begin(1, sink.addresses)
        for sink in sinks:
            assert sink.fetcher.wait(WAIT_S)
        assert all(sink.holds(leaf(1)) for sink in sinks)
        # Handshakes that were broken off while others were under way may still be closing.
        until(lambda: count(source.pid, "fd") <= num_fds + NUM_STREAMS)
        assert count(source.pid, "task") == num_threads
        for sink in sinks:
            assert set(sink.fetcher.received().rails) == {"lo-lo", "lo-127.0.0.2"}
        ours.send("end")
        source.join(WAIT_S)
        assert source.exitcode == 0
