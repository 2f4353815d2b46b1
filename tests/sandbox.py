"""A sandbox such as containers have: the kernel refuses some system calls to this process."""

import ctypes
import errno
import os
import platform
import struct

MEMFD_CREATE, PIDFD_OPEN, MADVISE, SOCKET = 319, 434, 28, 41  # of x86-64, in asm/unistd_64.h
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
# Of linux/bpf_common.h and linux/seccomp.h.
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _FIRST_ARGUMENT = 0, 16  # offsets in struct seccomp_data


class _Program(ctypes.Structure):
    _fields_ = [("num_instructions", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def is_known_here() -> bool:
    """Whether `deny` knows the numbers of this machine's system calls."""
    return platform.machine() == "x86_64"


def deny(*calls: int, families: tuple[int, ...] = (), error: int = errno.EPERM) -> None:
    """Has the system calls `calls`, and sockets of `families`, fail in this and child processes."""
    refuse = (_RETURN, 0, 0, _ERRNO | error)
    program = [(_LOAD, 0, 0, _NUMBER)]
    for call in calls:
        program += [(_JUMP_IF_EQUAL, 0, 1, call), refuse]
    past = 1 + 2 * len(families)  # instructions about what is a socket
    program += [(_JUMP_IF_EQUAL, 0, past, SOCKET), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    for family in families:
        program += [(_JUMP_IF_EQUAL, 0, 1, family), refuse]
    program.append((_RETURN, 0, 0, _ALLOW))
    encoded = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    filter_ = _Program(len(program), encoded)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
