"""Whether large packets pass on a rail, both ways; where they vanish, streams open and stall."""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable

from tpu_sync_rl import _native

# See csrc/WIRE_FORMAT.md.
_FRAME = struct.Struct("<3sBIQQI")
_MAGIC, _ECHO, _ECHO_IS = b"TSR", 7, 25
_ECHO_NBYTES = 1 << 16
_CRC_NBYTES = 4

_PATIENCE_S = 3.0  # above what some lost packets cost
_LEAST_NBYTES = 576  # every host takes packets of this size


def pass_over(stream: socket.socket, patience_s: float = _PATIENCE_S) -> bool:
    """Whether many bytes come to the other end and back. Blocks for `patience_s` at most."""
    payload = os.urandom(_ECHO_NBYTES)
    head = _FRAME.pack(_MAGIC, _ECHO, 0, 0, 0, _ECHO_NBYTES)
    request = head + struct.pack("<I", _native.crc32c(head)) + payload
    answer = bytearray()
    deadline = time.monotonic() + patience_s
    try:
        stream.settimeout(patience_s)
        stream.sendall(request)
        while len(answer) < len(request):
            stream.settimeout(max(0.001, deadline - time.monotonic()))
            part = stream.recv(len(request) - len(answer))
            if not part:
                return False
            answer += part
    except OSError:
        return False
    return answer[3] == _ECHO_IS and answer[_FRAME.size + _CRC_NBYTES :] == payload


def most_nbytes(
    dial: Callable[[int], socket.socket], headers_nbytes: int, vanish_nbytes: int
) -> int | None:
    """The largest packet that passes; None where not even small ones do.

    Blocks for some seconds.

    Args:
        dial: opens a connection whose segments are no larger than its argument.
        headers_nbytes: of a packet, besides its segment.
        vanish_nbytes: of a packet that does not pass.
    """

    def passes(nbytes: int) -> bool:
        with contextlib.closing(dial(nbytes - headers_nbytes)) as stream:
            return pass_over(stream, _PATIENCE_S / 2)

    if vanish_nbytes <= _LEAST_NBYTES or not passes(_LEAST_NBYTES):
        return None
    passed = _LEAST_NBYTES
    while vanish_nbytes - passed > 1:
        middle = (passed + vanish_nbytes) // 2
        if passes(middle):
            passed = middle
        else:
            vanish_nbytes = middle
    return passed
