import contextlib
import dataclasses
import fcntl
import os
import queue
import socket
from collections.abc import Iterator

import pytest
from test_rails import LOG, OPTIONS, WAIT_S, Address, is_closed, receive

from tpu_sync_rl import authentication, handshake, rails, same_host
from tpu_sync_rl.errors import AuthError, PeerLostError
from tpu_sync_rl.handshake import Hello
from tpu_sync_rl.listener import Listener
from tpu_sync_rl.rails import Connection, Rail

AUTO = dataclasses.replace(OPTIONS, same_host="auto")


class Accepting:
    """A listener of this host, and the streams that it gave away."""

    def __init__(self) -> None:
        self.streams: queue.Queue[Connection] = queue.Queue()
        self.listener = Listener(
            AUTO,
            coordinator="127.0.0.1:1",
            incarnation="life",
            on_stream=lambda connection, sink, rail: self.streams.put(connection),
            log=LOG,
        )
        self.ticket = authentication.ticket(self.listener.ticket_secret, 7)
        self.addresses = [Address(*address) for address in self.listener.addresses]
        (self.rail,) = rails.pair(AUTO, self.addresses)

    def dial(self, options=AUTO) -> Connection:
        return rails.dial(self.rail, options, incarnation="life", sink=7, ticket=self.ticket)


@pytest.fixture
def accepting() -> Iterator[Accepting]:
    accepting = Accepting()
    yield accepting
    accepting.listener.close()
    with contextlib.suppress(queue.Empty):
        while True:
            close(accepting.streams.get_nowait())


def close(connection: Connection) -> None:
    os.close(connection.fd)
    os.close(connection.ring_fd)


def num_fds(accepting: Accepting) -> int:
    """How many are open once the listener has dealt with all that came before."""
    close(accepting.dial())
    close(accepting.streams.get(timeout=WAIT_S))
    return len(os.listdir("/proc/self/fd"))


def test_peer_on_this_host_is_reached_by_memory(accepting):
    assert accepting.rail.is_shared and accepting.rail.name == "shm"
    assert [address.nic for address in accepting.addresses] == ["lo", "shm"]


def test_both_ends_get_one_connection_and_one_ring(accepting):
    ours, theirs = accepting.dial(), accepting.streams.get(timeout=WAIT_S)
    assert os.path.sameopenfile(ours.ring_fd, theirs.ring_fd)
    os.pwrite(ours.ring_fd, b"ring", 0)
    assert os.pread(theirs.ring_fd, 4, 0) == b"ring"
    assert not os.get_inheritable(theirs.ring_fd) and not os.get_inheritable(ours.ring_fd)
    with socket.socket(fileno=os.dup(ours.fd)) as near, socket.socket(fileno=theirs.fd) as far:
        near.sendall(b"hello")
        far.setblocking(True)
        assert receive(far, 5) == b"hello"
        far.detach()
    close(ours)
    close(theirs)


def test_ring_can_neither_shrink_nor_grow(accepting):
    ring_fd = same_host.make_ring()
    nbytes = os.fstat(ring_fd).st_size
    for other_nbytes in (0, nbytes - 4096, nbytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(ring_fd, other_nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(ring_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(ring_fd)


@pytest.mark.parametrize("side", ["trainer", "sampler"])
def test_either_side_can_ask_for_tcp(accepting, side):
    if side == "trainer":
        listener = Listener(
            OPTIONS, coordinator="127.0.0.1:1", incarnation="life", on_stream=close, log=LOG
        )
        addresses = [Address(*address) for address in listener.addresses]
        listener.close()
        found = rails.pair(AUTO, addresses)
    else:
        found = rails.pair(OPTIONS, accepting.addresses)
    assert [rail.name for rail in found] == ["lo-lo"]


def test_memory_of_another_host_is_no_rail(accepting, monkeypatch):
    monkeypatch.setattr(same_host, "_host_id", lambda: "another host")
    assert [rail.name for rail in rails.pair(AUTO, accepting.addresses)] == ["lo-lo"]


def test_memory_out_of_reach_is_no_rail(accepting):
    lo, shm = accepting.addresses
    elsewhere = shm._replace(host=f"{shm.host}0")
    assert [rail.name for rail in rails.pair(AUTO, [lo, elsewhere])] == ["lo-lo"]
    accepting.listener.close()
    assert [rail.name for rail in rails.pair(AUTO, accepting.addresses)] == ["lo-lo"]


def test_stranger_is_refused_and_nothing_stays_open(accepting):
    before = num_fds(accepting)
    for _ in range(3):
        with pytest.raises(AuthError, match=r"the trainer on this host \(shm\) refused our token"):
            accepting.dial(dataclasses.replace(AUTO, token=b"wrong"))
    assert accepting.streams.empty()
    assert num_fds(accepting) == before


def test_trainer_of_another_user_is_lost_before_a_byte_is_sent(accepting, monkeypatch):
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert [rail.name for rail in rails.pair(AUTO, accepting.addresses)] == ["lo-lo"]
    with pytest.raises(PeerLostError, match="it belongs to another user"):
        accepting.dial()


def test_sampler_of_another_user_is_closed(accepting, monkeypatch):
    monkeypatch.setattr(same_host, "is_same_user", lambda _: False)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(same_host.name(accepting.rail.host))
        assert is_closed(connection)


def test_user_of_a_socket_is_known():
    one, other = socket.socketpair()
    with one, other:
        assert same_host.is_same_user(one) and same_host.is_same_user(other)


def test_name_of_another_namespace_leads_nowhere():
    rail = Rail(rails.LOOPBACK, "shm", f"unix:{same_host._host_id()}/nobody", 0)
    with pytest.raises(PeerLostError, match=r"the trainer on this host \(shm\): .*refused"):
        rails.dial(rail, AUTO, incarnation="life", sink=7, ticket=b"")


@pytest.mark.parametrize("num_rings", [0, 2])
def test_only_one_descriptor_is_taken_with_a_proof(accepting, num_rings):
    hello = Hello(authentication.new_nonce(), handshake.target("policy", "life"), 7, "shm")
    before = num_fds(accepting)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(same_host.name(accepting.rail.host))
        ring_fds = [same_host.make_ring() for _ in range(num_rings)]
        socket.send_fds(connection, [hello.encode()], ring_fds)  # too early: dropped
        _, challenge = handshake.decode_answer(receive(connection, handshake.ANSWER_NBYTES))
        ours, _ = handshake.proofs(
            AUTO.token, accepting.ticket, hello, challenge, job="policy", incarnation="life"
        )
        socket.send_fds(connection, [ours], ring_fds)
        code, _ = handshake.decode_answer(receive(connection, handshake.ANSWER_NBYTES))
        if num_rings == 0:
            assert code == handshake.Code.NOT_SHARED and is_closed(connection)
        else:
            assert code == handshake.Code.OK
            close(accepting.streams.get(timeout=WAIT_S))
        for fd in ring_fds:
            os.close(fd)
    assert accepting.streams.empty()
    assert num_fds(accepting) == before
