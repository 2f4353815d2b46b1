"""What the kernel allows TCP connections, and what it says of one."""

import socket
import struct
from pathlib import Path

_SYSCTL = Path("/proc/sys/net/ipv4")
DEFAULT_NBYTES = 4 << 20  # that Linux lets a connection have under way, as it comes
_RTT_OF_TCP_INFO = 68  # offset of tcpi_rtt in linux/tcp.h, microseconds


def most_buffer_nbytes(name: str) -> int | None:
    """The most that a buffer grows to by itself; None where the kernel does not say.

    Args:
        name: "tcp_wmem", of what is sent, or "tcp_rmem", of what is received.
    """
    try:
        return int((_SYSCTL / name).read_text().split()[-1])
    except OSError:
        return None


def most_flight_nbytes() -> int:
    """The most that one connection has under way, where both ends are set as this one is.

    Half of what a receiver has is for the kernel's own use.
    """
    sent = most_buffer_nbytes("tcp_wmem") or DEFAULT_NBYTES
    received = most_buffer_nbytes("tcp_rmem") or 2 * DEFAULT_NBYTES
    return min(sent, received // 2)


def round_trip_s(connection: socket.socket) -> float:
    """How long a packet took to the other end and back, lately."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    (rtt_us,) = struct.unpack_from("I", info, _RTT_OF_TCP_INFO)
    return float(rtt_us) / 1e6
