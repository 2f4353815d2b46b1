"""Rails from a sampler process to those that it reads from: pairs NICs, dials, authenticates."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tpu_sync_rl import authentication, handshake, same_host
from tpu_sync_rl.addresses import is_loopback, join_address
from tpu_sync_rl.errors import AuthError, PeerLostError
from tpu_sync_rl.handshake import Code, Hello
from tpu_sync_rl.nic_pairs import pair_up
from tpu_sync_rl.nics import LOOPBACK, LOOPBACK_6, Nic, find_nics
from tpu_sync_rl.options import Options
from tpu_sync_rl.report import UNKNOWN_LINE, Line
from tpu_sync_rl.same_host import NotSharedError

HANDSHAKE_S = 5.0

_BOUND_S = 1.0  # for a connection that is bound to its NIC, before one is tried that is not


class Address(Protocol):
    """Where one NIC of a process listens; `messages.Address` is one."""

    @property
    def nic(self) -> str:
        """Name of the NIC."""

    @property
    def host(self) -> str:
        """IP address."""

    @property
    def port(self) -> int:
        """TCP port."""

    @property
    def line(self) -> Line:
        """What the NIC is made for."""


@dataclass(frozen=True, slots=True)
class Rail:
    """A pair of a local NIC and a remote NIC that listens.

    Attributes:
        line: what both NICs are made for.
    """

    local: Nic
    remote_nic: str
    host: str
    port: int
    line: Line = UNKNOWN_LINE

    @classmethod
    def between(cls, local: Nic, remote: Address) -> "Rail":
        """The rail from a local NIC to where a remote one listens."""
        return cls(local, remote.nic, remote.host, remote.port, local.line.to(remote.line))

    @property
    def is_shared(self) -> bool:
        """Whether it is memory that both ends share, with no NIC in between."""
        return same_host.is_shared(self.host)

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.remote_nic if self.is_shared else f"{self.local.name}-{self.remote_nic}"

    @property
    def place(self) -> str:
        """Where errors say that the other end is."""
        where = "on this host" if self.is_shared else f"at {join_address(self.host, self.port)}"
        return f"{where} ({self.name})"


class Connection(NamedTuple):
    """An authenticated connection. Whoever gets it owns both descriptors."""

    fd: int
    ring_fd: int = -1  # of the memory that both ends share, on such a rail


def pair(
    options: Options,
    addresses: Sequence[Address],
    on_not_shared: Callable[[NotSharedError], object] = lambda _: None,
) -> list[Rail]:
    """Pairs the local NICs with those that `addresses` name, as `pair_nics` does.

    One rail of shared memory takes their place where the peer is on this host, of our user and in
    reach, unless the options say "tcp".

    Args:
        options: of the session.
        addresses: of the peer.
        on_not_shared: is told why memory that the peer offers can't be shared with it.

    Raises:
        ValueError: `options.nics` names what is no NIC here.
    """
    offered = [address for address in addresses if same_host.is_shared(address.host)]
    if options.same_host == "auto":
        try:
            for address in offered:
                if same_host.is_in_reach(address.host):
                    return [Rail.between(Nic(address.nic, ""), address)]
        except NotSharedError as error:
            on_not_shared(error)
    return pair_nics(options.nics, [at for at in addresses if at not in offered])


def pair_nics(wanted: Sequence[str] | None, addresses: Sequence[Address]) -> list[Rail]:
    """Pairs the local NICs, or those `wanted`, with `addresses`, as `pair_up` does.

    Local NICs without a route to any of them are left out, unless they are wanted or no NIC has
    one.

    Raises:
        ValueError: `wanted` names what is no NIC here, or one side has IPv4 alone, the other IPv6.
    """
    loopback = all(is_loopback(address.host) for address in addresses)
    nics = [LOOPBACK, LOOPBACK_6] if loopback else find_nics(wanted)
    if wanted is None:
        nics = [nic for nic in nics if any(nic.reaches(a.host) for a in addresses)] or nics
    pairs = pair_up(nics, addresses)
    if not pairs:
        theirs, ours = ([x.host for x in side] for side in (addresses, nics))
        raise ValueError(
            f"it listens at {', '.join(theirs)}, which no address here goes with "
            f"({', '.join(ours)}): give both sides IPv4, or both global IPv6 addresses"
        )
    return [Rail.between(nic, address) for nic, address in pairs]


def dial(
    rail: Rail,
    options: Options,
    *,
    incarnation: str,
    sink: int,
    ticket: bytes,
    peer: str = "the trainer",
    timeout_s: float = HANDSHAKE_S,
    segment_nbytes: int | None = None,
) -> Connection:
    """Opens an authenticated connection over `rail`, with the `ticket` of `sink`.

    Errors call the other end `peer`. No TCP segment, of either end, has more than `segment_nbytes`;
    None leaves that to the kernel. Blocks for at most about `timeout_s`. May be called from any
    thread.

    Raises:
        AuthError: the peer has another token than we, or the ticket is none of its.
        PeerLostError: nobody listens there, it does not answer, or it is of another job,
            incarnation or, on a rail of shared memory, user.
    """
    deadline = time.monotonic() + timeout_s
    hello = Hello(
        authentication.new_nonce(), handshake.target(options.job, incarnation), sink, rail.name
    )
    with contextlib.ExitStack() as on_failure:
        try:
            connection = on_failure.enter_context(
                _connected(rail, options, timeout_s, segment_nbytes)
            )
            connection.sendall(hello.encode())
            code, challenge = _receive_answer(connection, deadline)
            if code != Code.OK:
                raise PeerLostError("it belongs to another job or incarnation")
            ours, theirs = handshake.proofs(
                options.token, ticket, hello, challenge, job=options.job, incarnation=incarnation
            )
            ring_fd = -1
            if rail.is_shared:
                ring_fd = same_host.make_ring()
                on_failure.callback(os.close, ring_fd)
                same_host.send(connection, ours, ring_fd)
            else:
                connection.sendall(ours)
            code, proof = _receive_answer(connection, deadline)
            if code == Code.NOT_SHARED:
                raise NotSharedError("it could not take the memory, and its log says why")
        except OSError as error:
            raise PeerLostError(f"{peer} {rail.place}: {error}") from error
        if code != Code.OK:
            raise AuthError(f"{peer} {rail.place} refused our token, or our ticket")
        if not authentication.matches(proof, theirs):
            raise AuthError(
                f"{peer} {rail.place} does not have our token, or did not issue our ticket"
            )
        connection.settimeout(None)
        fd = connection.detach()
        on_failure.pop_all()
        return Connection(fd, ring_fd)


def new_socket(host: str, device: str = "") -> socket.socket:
    """A TCP socket of the family that `host` is of, bound to the NIC `device` if there is one.

    Raises:
        OSError: there is no such NIC, or we may not; Linux before 5.7 lets root alone.
    """
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if device:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
    except OSError:
        made.close()
        raise
    return made


def _connected(
    rail: Rail, options: Options, timeout_s: float, segment_nbytes: int | None
) -> socket.socket:
    if rail.is_shared:
        return _connected_here(rail, timeout_s)
    local = rail.local
    if local.shares_subnet and local.is_beside(rail.host):
        # A peer that answers for one NIC over the other is not heard this way.
        with contextlib.suppress(OSError):
            bound_s = min(timeout_s, _BOUND_S)
            return _connected_over(rail, options, bound_s, segment_nbytes, local.name)
    return _connected_over(rail, options, timeout_s, segment_nbytes)


def _connected_here(rail: Rail, timeout_s: float) -> socket.socket:
    with contextlib.ExitStack() as on_failure:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        on_failure.enter_context(connection)
        connection.settimeout(timeout_s)
        connection.connect(same_host.name(rail.host))
        if not same_host.is_same_user(connection):
            raise PeerLostError("it belongs to another user, or user namespace")
        on_failure.pop_all()
        return connection


def _connected_over(
    rail: Rail, options: Options, timeout_s: float, segment_nbytes: int | None, device: str = ""
) -> socket.socket:
    with contextlib.ExitStack() as on_failure:
        connection = on_failure.enter_context(new_socket(rail.host, device))
        tune(connection, options, rail.host)
        if segment_nbytes is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_nbytes)
        connection.settimeout(timeout_s)
        connection.bind((rail.local.host, 0))
        connection.connect((rail.host, rail.port))
        on_failure.pop_all()
        return connection


def _receive_answer(connection: socket.socket, deadline: float) -> tuple[int, bytes]:
    received = b""
    while len(received) < handshake.ANSWER_NBYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(handshake.ANSWER_NBYTES - len(received))
        if not part:
            raise PeerLostError("it closed the connection during the handshake")
        received += part
    return handshake.decode_answer(received)


def tune(connection: socket.socket, options: Options, host: str) -> None:
    """Sets what a data connection needs; those that a socket accepts inherit it.

    Over loopback that is cubic, where we have the right to it: bbr, the default of many systems,
    moves half as much there.
    """
    # Otherwise the kernel holds what was sent to a peer that is gone for a quarter of an hour.
    lost_after_ms = int(options.peer_timeout_s * 1000)
    settings: dict[int, int | bytes] = {
        socket.TCP_NODELAY: 1,
        socket.TCP_USER_TIMEOUT: lost_after_ms,
    }
    name = options.congestion or ("cubic" if is_loopback(host) else None)
    if name is not None:
        # One that was asked for was found to be usable when the session connected.
        settings[socket.TCP_CONGESTION] = name.encode()
    for setting, value in settings.items():
        with contextlib.suppress(OSError):  # a sandbox may know less; the connection works without
            connection.setsockopt(socket.IPPROTO_TCP, setting, value)
