"""What two processes of one host share: a socket of the kernel's own, and memory.

The socket has an abstract name, which nobody can guess and which lives in one network namespace.
csrc/WIRE_FORMAT.md describes what crosses it. A container may deny any part of it: then TCP does
what memory would have done, and `NotSharedError` says why.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from tpu_sync_rl.errors import PeerLostError

NIC = "shm"  # where there is no NIC in between

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SCHEME = "unix:"
_FD = struct.Struct("i")
_UCRED = struct.Struct("3i")  # pid, uid, gid
# A ring for the sink's bytes, and one for the source's. CPU of both ends per GB with one of 1, 2
# and 4 MiB: 93, 83 and 79 ms; larger ones leave the cache (2-core Zen 5 VM, 2026-11-29).
_RING_NBYTES = (64 << 10) + (4 << 20)


class NotSharedError(PeerLostError):
    """No memory can be shared with a process of this host, and why; TCP reaches it all the same."""


def check_usable() -> None:
    """Tries all that this process does by itself to share memory. Nothing stays open.

    Raises:
        NotSharedError: this host, container or user does not let it.
    """
    _host_id()
    _new_socket().close()
    os.close(make_ring())


def bind() -> tuple[socket.socket, str]:
    """A socket under a new name; and that with the host's id, as peers are told it.

    Raises:
        NotSharedError: as `check_usable` does.
    """
    check_usable()
    bound = _new_socket()
    secret = f"tpu_sync_rl-{secrets.token_hex(16)}"
    try:
        with _named("an abstract Unix socket"):
            bound.bind(f"\0{secret}")
        return bound, f"{_SCHEME}{_host_id()}/{secret}"
    except NotSharedError:
        bound.close()
        raise


def is_shared(host: str) -> bool:
    """Whether `host` is what `bind` returned, on whatever host."""
    return host.startswith(_SCHEME)


def is_in_reach(host: str) -> bool:
    """Whether that is a socket of this host and network namespace, and somebody listens.

    Raises:
        NotSharedError: somebody does, but no memory can be shared with them; or this host can't be
            told from others.
    """
    if not host.startswith(f"{_SCHEME}{_host_id()}/"):
        return False
    with _new_socket() as connection:
        connection.setblocking(False)
        try:
            connection.connect(name(host))
        except (ConnectionRefusedError, BlockingIOError):  # nobody, or with a full backlog
            return False
        except OSError as error:
            raise NotSharedError(f"its socket is not reached: {error.strerror}") from error
        if not is_same_user(connection):
            raise NotSharedError("it belongs to another user, or user namespace")
    os.close(make_ring())
    return True


def name(host: str) -> str:
    """The name to connect to."""
    return "\0" + host.rpartition("/")[2]


def is_same_user(connection: socket.socket) -> bool:
    """Whether the other end of a connected socket belongs to our user, as the kernel says."""
    try:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        _, uid, _ = _UCRED.unpack(credentials)
    except (OSError, struct.error):  # the kernel does not say
        return False
    return bool(uid == os.geteuid())


def make_ring() -> int:
    """Memory for one connection, of fixed size. The caller owns the descriptor.

    Raises:
        NotSharedError: there is none to be had here.
    """
    with _named("memfd_create"):
        ring = os.memfd_create("tpu_sync_rl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with _named("sizing and sealing a memfd"):
            os.ftruncate(ring, _RING_NBYTES)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(ring, fcntl.F_ADD_SEALS, seals)
        check_ring(ring)
    except NotSharedError:
        os.close(ring)
        raise
    return ring


def check_ring(ring: int) -> None:
    """Tries to map the memory that `make_ring` made, here or in a peer; -1 is none.

    Raises:
        NotSharedError: it can't be mapped, or did not come.
    """
    if ring < 0:
        raise NotSharedError("no descriptor came with the proof")
    with _named("mapping a memfd"):
        mmap.mmap(ring, os.fstat(ring).st_size).close()


def send(connection: socket.socket, message: bytes, ring: int) -> None:
    """Sends a message and the memory along with it.

    Raises:
        NotSharedError: the memory can't be sent.
        OSError: the peer is gone, or does not take it in time.
    """
    try:
        socket.send_fds(connection, [message], [ring])
    except (ConnectionError, TimeoutError):
        raise
    except OSError as error:
        raise NotSharedError(f"passing a descriptor: {error.strerror}") from error


def receive(connection: socket.socket, nbytes: int) -> tuple[bytes, int]:
    """At most `nbytes` bytes, and the descriptor that came along, else -1; the caller owns it."""
    # socket.recv_fds() drops its flags, and so would leak the descriptor into child programs.
    part, ancillary, _, _ = connection.recvmsg(
        nbytes, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            (fd,) = _FD.unpack(data)
            return part, fd
    return part, -1


def _new_socket() -> socket.socket:
    with _named("a Unix socket"):
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _host_id() -> str:
    with _named(str(_BOOT_ID)):
        return _BOOT_ID.read_text().strip()


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Turns what the kernel, or a Python built without `what`, says into a NotSharedError."""
    try:
        yield
    except (OSError, ValueError, AttributeError) as error:
        raise NotSharedError(f"{what}: {getattr(error, 'strerror', None) or error}") from error
