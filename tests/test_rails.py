import contextlib
import dataclasses
import os
import queue
import socket
import subprocess
import sys
import threading
from ipaddress import IPv4Network
from pathlib import Path
from typing import NamedTuple

import pytest

from tpu_sync_rl import authentication, handshake, listener, nics, rails
from tpu_sync_rl.errors import AuthError, PeerLostError, SyncError
from tpu_sync_rl.handshake import Hello
from tpu_sync_rl.listener import MAX_HALF_OPEN, Listener
from tpu_sync_rl.nics import LOOPBACK, Nic
from tpu_sync_rl.options import Options
from tpu_sync_rl.rails import Connection, Rail
from tpu_sync_rl.report import UNKNOWN_LINE, Line
from tpu_sync_rl.session_log import SessionLog

OPTIONS = Options.checked(
    job="policy",
    token="secret",
    timeout=5.0,
    nics=None,
    streams_per_rail=2,
    chunk_nbytes=1 << 20,
    congestion=None,
    peer_timeout=5.0,
    same_host="tcp",
    verify="wire",
    insecure=False,
    trace=None,
    tls=None,
    metrics=None,
)
LOG = SessionLog("policy", None, 0)
STRANGER = dataclasses.replace(OPTIONS, token=b"wrong")
WAIT_S = 10.0


class Address(NamedTuple):
    nic: str
    host: str
    port: int
    line: Line = UNKNOWN_LINE


class Accepting:
    """A listener on loopback, and the streams that it gave away."""

    def __init__(self, options: Options = OPTIONS, coordinator: str = "127.0.0.1:1") -> None:
        self.streams: queue.Queue[tuple[int, int, str]] = queue.Queue()
        self.listener = Listener(
            options,
            coordinator=coordinator,
            incarnation="life",
            on_stream=lambda stream, sink, rail: self.streams.put((stream.fd, sink, rail)),
            log=LOG,
        )
        (self.rail,) = rails.pair(options, [Address(*a) for a in self.listener.addresses])

    def ticket(self, sink: int = 7) -> bytes:
        return authentication.ticket(self.listener.ticket_secret, sink)

    def dial(self, options: Options = OPTIONS, sink: int = 7) -> Connection:
        return rails.dial(
            self.rail, options, incarnation="life", sink=sink, ticket=self.ticket(sink)
        )

    def proof(self, hello: Hello, challenge: bytes) -> bytes:
        """What the sink that `hello` names proves itself with, with the ticket of sink 7."""
        ours, _ = handshake.proofs(
            OPTIONS.token, self.ticket(), hello, challenge, job="policy", incarnation="life"
        )
        return ours

    def connect(self) -> socket.socket:
        return socket.create_connection((self.rail.host, self.rail.port), WAIT_S)

    def hello(self, sink: int = 7) -> Hello:
        target = handshake.target("policy", "life")
        return Hello(authentication.new_nonce(), target, sink, self.rail.name)


@pytest.fixture
def accepting():
    accepting = Accepting()
    yield accepting
    accepting.listener.close()
    with contextlib.suppress(queue.Empty):
        while True:
            os.close(accepting.streams.get_nowait()[0])


def receive(connection: socket.socket, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes and (part := connection.recv(nbytes - len(received))):
        received += part
    return received


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_both_ends_get_one_connection(accepting):
    dialled = accepting.dial(sink=2**64 - 1).fd
    accepted, sink, rail = accepting.streams.get(timeout=WAIT_S)
    assert (sink, rail) == (2**64 - 1, "lo-lo")
    with socket.socket(fileno=dialled) as ours, socket.socket(fileno=accepted) as theirs:
        assert ours.getsockname() == theirs.getpeername()
        ours.sendall(b"hello")
        theirs.setblocking(True)
        assert receive(theirs, 5) == b"hello"


def test_congestion_control_is_set_at_both_ends():
    options = dataclasses.replace(OPTIONS, congestion="reno")
    accepting = Accepting(options)
    dialled = accepting.dial(options).fd
    accepted, _, _ = accepting.streams.get(timeout=WAIT_S)
    for fd in (dialled, accepted):
        with socket.socket(fileno=fd) as connection:
            used = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert used.rstrip(b"\0") == b"reno"
    accepting.listener.close()


def test_stranger_is_refused(accepting):
    with pytest.raises(
        AuthError, match=r"the trainer at 127.0.0.1:\d+ \(lo-lo\) refused our token"
    ):
        accepting.dial(STRANGER)
    assert accepting.streams.empty()


def test_false_trainer_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        rail = Rail(LOOPBACK, "lo", *server.getsockname())
        false = threading.Thread(target=_false_trainer, args=(server,))
        false.start()
        with pytest.raises(AuthError, match="does not have our token"):
            rails.dial(rail, OPTIONS, incarnation="life", sink=1, ticket=b"")
        false.join()


def _false_trainer(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        receive(connection, handshake.HELLO_NBYTES)
        nonce = authentication.new_nonce()
        connection.sendall(handshake.encode_answer(handshake.Code.OK, nonce))
        proof = receive(connection, handshake.PROOF_NBYTES)
        # What the dialler proved itself with is no proof of the listener.
        connection.sendall(handshake.encode_answer(handshake.Code.OK, proof))
        connection.recv(1)


def test_replayed_proof_is_refused(accepting):
    hello = accepting.hello()
    with accepting.connect() as first:
        first.sendall(hello.encode())
        _, challenge = handshake.decode_answer(receive(first, handshake.ANSWER_NBYTES))
        proof = accepting.proof(hello, challenge)
        first.sendall(proof)
        code, _ = handshake.decode_answer(receive(first, handshake.ANSWER_NBYTES))
        assert code == handshake.Code.OK
    with accepting.connect() as second:
        second.sendall(hello.encode())
        receive(second, handshake.ANSWER_NBYTES)
        second.sendall(proof)
        code, _ = handshake.decode_answer(receive(second, handshake.ANSWER_NBYTES))
        assert code == handshake.Code.REFUSED
        assert is_closed(second)


def test_proof_for_one_sink_does_not_serve_another(accepting):
    with accepting.connect() as connection:
        connection.sendall(accepting.hello(sink=8).encode())
        _, challenge = handshake.decode_answer(receive(connection, handshake.ANSWER_NBYTES))
        hello = accepting.hello(sink=7)
        proof = accepting.proof(hello, challenge)
        connection.sendall(proof)
        code, _ = handshake.decode_answer(receive(connection, handshake.ANSWER_NBYTES))
        assert code == handshake.Code.REFUSED


def test_reflected_proof_is_refused(accepting):
    hello = accepting.hello()
    with accepting.connect() as connection:
        connection.sendall(hello.encode())
        _, challenge = handshake.decode_answer(receive(connection, handshake.ANSWER_NBYTES))
        _, listeners = handshake.proofs(
            OPTIONS.token, accepting.ticket(), hello, challenge, job="policy", incarnation="life"
        )
        connection.sendall(listeners)
        code, _ = handshake.decode_answer(receive(connection, handshake.ANSWER_NBYTES))
        assert code == handshake.Code.REFUSED


@pytest.mark.parametrize("whose", ["another sink", "another life", "nobody"])
def test_token_without_the_ticket_of_this_sink_and_listener_is_refused(accepting, whose):
    tickets = {
        "another sink": accepting.ticket(8),
        "another life": authentication.ticket(authentication.new_ticket_secret(), 7),
        "nobody": b"",
    }
    with pytest.raises(AuthError, match="refused our token, or our ticket"):
        rails.dial(accepting.rail, OPTIONS, incarnation="life", sink=7, ticket=tickets[whose])
    assert accepting.streams.empty()


def test_another_incarnation_is_not_mistaken_for_a_wrong_token(accepting):
    with pytest.raises(PeerLostError, match="belongs to another job or incarnation"):
        rails.dial(accepting.rail, OPTIONS, incarnation="former", sink=1, ticket=b"")


def test_refused_connection_is_a_lost_peer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        rail = Rail(LOOPBACK, "lo", *server.getsockname())
    with pytest.raises(PeerLostError, match=r"the trainer at 127.0.0.1:.*refused"):
        rails.dial(rail, OPTIONS, incarnation="life", sink=1, ticket=b"")


def test_silent_listener_is_a_lost_peer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        rail = Rail(LOOPBACK, "lo", *server.getsockname())
        with pytest.raises(PeerLostError, match="timed out"):
            rails.dial(rail, OPTIONS, incarnation="life", sink=1, ticket=b"", timeout_s=0.05)


def test_garbage_is_closed_without_an_answer(accepting):
    with accepting.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n".ljust(handshake.HELLO_NBYTES, b"\r"))
        assert is_closed(connection)


def test_slow_handshake_holds_up_no_other(accepting):
    with accepting.connect() as slow:
        slow.sendall(accepting.hello().encode()[:10])
        os.close(accepting.dial(sink=1).fd)
        assert accepting.streams.get(timeout=WAIT_S)[1] == 1


def test_half_open_handshakes_are_bounded_and_the_oldest_goes_first(accepting):
    with contextlib.ExitStack() as stack:
        oldest = stack.enter_context(accepting.connect())
        others = [stack.enter_context(accepting.connect()) for _ in range(MAX_HALF_OPEN + 10)]
        assert is_closed(oldest)
        hello = accepting.hello()
        others[-1].sendall(hello.encode())
        code, _ = handshake.decode_answer(receive(others[-1], handshake.ANSWER_NBYTES))
        assert code == handshake.Code.OK


def test_strangers_push_out_no_handshake_of_a_peer(accepting):
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(accepting.connect())
        hello = accepting.hello()
        peer.sendall(hello.encode())
        _, challenge = handshake.decode_answer(receive(peer, handshake.ANSWER_NBYTES))
        strangers = [stack.enter_context(accepting.connect()) for _ in range(2 * MAX_HALF_OPEN)]
        assert is_closed(strangers[0])
        peer.sendall(accepting.proof(hello, challenge))
        code, _ = handshake.decode_answer(receive(peer, handshake.ANSWER_NBYTES))
        assert code == handshake.Code.OK


FLOOD = """
import collections, contextlib, socket, sys
held = collections.deque(maxlen=500)
for index in range(10_000):
    with contextlib.suppress(OSError):
        held.append(socket.create_connection((sys.argv[1], int(sys.argv[2]))))
        held[-1].sendall((b"", b"TSRD", b"GET / HTTP/1.1" * 20)[index % 3])
"""


@pytest.mark.slow
def test_flood_of_connections_costs_no_memory_and_lets_peers_through(accepting):
    address = [accepting.rail.host, str(accepting.rail.port)]
    num_fds, most_fds, num_dialled, num_lost = count_fds(), 0, 0, 0
    resident = resident_nbytes()
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", FLOOD, *address]) as flood:
        while flood.poll() is None:
            most_fds = max(most_fds, count_fds())
            try:
                os.close(accepting.dial().fd)
            except PeerLostError:
                num_lost += 1
            else:
                num_dialled += 1
                os.close(accepting.streams.get(timeout=WAIT_S)[0])
    assert flood.returncode == 0
    assert num_dialled > 10 * num_lost
    assert most_fds <= num_fds + MAX_HALF_OPEN + 4
    assert resident_nbytes() < resident + (16 << 20)


def test_handshake_has_a_deadline(monkeypatch):
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.05)
    accepting = Accepting()
    with accepting.connect() as slow:
        assert is_closed(slow)
    accepting.listener.close()


def test_closed_listener_refuses(accepting):
    with accepting.connect() as half_open:
        accepting.listener.close()
        accepting.listener.close()
        assert is_closed(half_open)
    with pytest.raises(PeerLostError, match="refused"):
        accepting.dial()


@pytest.mark.parametrize(
    ("token", "insecure", "coordinator", "hosts"),
    [
        (b"", False, "10.0.0.2:8476", ["127.0.0.1"]),
        (b"secret", False, "127.0.0.1:8476", ["127.0.0.1"]),
        (b"secret", False, "localhost:8476", ["127.0.0.1"]),
        (b"secret", False, "10.0.0.2:8476", ["127.0.0.2", "127.0.0.3"]),
        (b"", True, "10.0.0.2:8476", ["127.0.0.2", "127.0.0.3"]),
    ],
)
def test_without_a_token_nothing_listens_beyond_loopback(token, insecure, coordinator, hosts):
    options = dataclasses.replace(
        OPTIONS, token=token, insecure=insecure, nics=("127.0.0.2", "127.0.0.3")
    )
    listener = Listener(
        options, coordinator=coordinator, incarnation="life", on_stream=lambda *_: None, log=LOG
    )
    assert [at.host for at in listener.addresses] == hosts
    listener.close()


def test_address_that_is_not_ours_can_not_be_listened_on():
    options = dataclasses.replace(OPTIONS, nics=("192.0.2.77",))
    with pytest.raises(SyncError, match=r"can't listen on 192.0.2.77"):
        Listener(
            options,
            coordinator="10.0.0.2:1",
            incarnation="life",
            on_stream=lambda *_: None,
            log=LOG,
        )


def test_unknown_nic_is_named_with_those_that_exist():
    with pytest.raises(ValueError, match=r"nics: 'eth77' is no NIC .* lo \(127.0.0.1\)"):
        nics.find_nics(["eth77"])


def test_nics_are_found_by_name_and_by_address():
    assert nics.find_nics(["lo", "127.0.0.1"]) == [LOOPBACK, LOOPBACK]
    assert nics.find_nics(["fd00::1"]) == [Nic("fd00::1", "fd00::1")]


def test_loopback_is_not_among_the_nics_that_are_found():
    try:
        found = nics.find_nics()
    except ValueError as error:
        assert "no NIC is up" in str(error)
    else:
        assert all(not nic.host.startswith("127.") for nic in found)


NIC_A = Nic("a", "10.0.0.1", IPv4Network("10.0.0.0/24"))
NIC_B = Nic("b", "10.0.1.1", IPv4Network("10.0.1.0/24"))
ROUTED = Nic("r", "10.0.2.1", IPv4Network("10.0.2.0/24"), (IPv4Network("0.0.0.0/0"),))
AT_A = Address("x", "10.0.0.2", 1)
AT_B = Address("y", "10.0.1.2", 1)
ELSEWHERE = Address("z", "10.9.0.2", 1)


@pytest.mark.parametrize(
    ("local", "remote", "names"),
    [
        ([NIC_A, NIC_B], [AT_A, AT_B], ["a-x", "b-y"]),
        ([NIC_A, NIC_B], [AT_B, AT_A], ["b-y", "a-x"]),
        ([NIC_A, NIC_B], [ELSEWHERE], ["a-z", "b-z"]),
        ([NIC_A], [AT_A, AT_B], ["a-x", "a-y"]),
        ([NIC_A, NIC_B], [AT_A], ["a-x"]),
        ([NIC_A, ROUTED], [AT_A], ["a-x", "r-x"]),
        ([NIC_A, ROUTED], [ELSEWHERE], ["r-z"]),
        ([NIC_A, NIC_B], [ELSEWHERE, ELSEWHERE], ["a-z", "b-z"]),
    ],
)
def test_rails_use_every_nic_and_stay_within_a_subnet(monkeypatch, local, remote, names):
    monkeypatch.setattr(rails, "find_nics", lambda _: local)
    assert [rail.name for rail in rails.pair(OPTIONS, remote)] == names


def test_nics_that_are_named_are_used_without_a_route(monkeypatch):
    monkeypatch.setattr(rails, "find_nics", lambda _: [NIC_A, NIC_B])
    named = dataclasses.replace(OPTIONS, nics=("a", "b"))
    assert [rail.name for rail in rails.pair(named, [AT_A])] == ["a-x", "b-x"]


def test_loopback_addresses_are_reached_over_loopback_alone():
    (rail,) = rails.pair(OPTIONS, [Address("lo", "127.0.0.1", 1)])
    assert rail.local == LOOPBACK
