"""What two processes of one host share: a socket of the kernel's own, and memory.

The socket has an abstract name, which nobody can guess and which lives in one network namespace.
csrc/WIRE_FORMAT.md describes what crosses it.
"""

import fcntl
import os
import secrets
import socket
import struct
from pathlib import Path

NIC = "shm"  # where there is no NIC in between

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SCHEME = "unix:"
_FD = struct.Struct("i")
_UCRED = struct.Struct("3i")  # pid, uid, gid
# A ring for the sink's bytes, and one for the source's. CPU of both ends per GB with one of 1, 2
# and 4 MiB: 93, 83 and 79 ms; larger ones leave the cache (2-core Zen 5 VM, 2026-11-29).
_RING_NBYTES = (64 << 10) + (4 << 20)


def bind() -> tuple[socket.socket, str]:
    """A socket under a new name; and that with the host's id, as peers are told it."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    secret = f"tpu_sync_rl-{secrets.token_hex(16)}"
    bound.bind(f"\0{secret}")
    return bound, f"{_SCHEME}{_host_id()}/{secret}"


def is_shared(host: str) -> bool:
    """Whether `host` is what `bind` returned, on whatever host."""
    return host.startswith(_SCHEME)


def is_in_reach(host: str) -> bool:
    """Whether that is a socket of this host, network namespace and user, and somebody listens."""
    if not host.startswith(f"{_SCHEME}{_host_id()}/"):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            connection.connect(name(host))
            return is_same_user(connection)
        except OSError:
            return False


def name(host: str) -> str:
    """The name to connect to."""
    return "\0" + host.rpartition("/")[2]


def is_same_user(connection: socket.socket) -> bool:
    """Whether the other end of a connected socket belongs to our user, as the kernel says."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(credentials)
    return bool(uid == os.geteuid())


def make_ring() -> int:
    """Memory for one connection, of fixed size. The caller owns the descriptor."""
    ring = os.memfd_create("tpu_sync_rl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(ring, _RING_NBYTES)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(ring, fcntl.F_ADD_SEALS, seals)
    return ring


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


def _host_id() -> str:
    return _BOOT_ID.read_text().strip()
