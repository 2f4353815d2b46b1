"""The messages that open a data connection. csrc/WIRE_FORMAT.md has their bytes.

hello (dialler), challenge (listener), proof (dialler), proof (listener). After it both are sure
that the other knows the token and the sink's ticket, for this job, incarnation, sink and rail, on
this very connection: a proof is good for one connection, once.
"""

import enum
import hashlib
import struct
from dataclasses import dataclass

from tpu_sync_rl import authentication
from tpu_sync_rl.authentication import MAC_NBYTES, NONCE_NBYTES

_HELLO = struct.Struct(f"<4s{NONCE_NBYTES}s32sQ96s")
_ANSWER = struct.Struct(f"<B{NONCE_NBYTES}s")
_MAGIC = b"TSRD"

HELLO_NBYTES = _HELLO.size
ANSWER_NBYTES = _ANSWER.size
PROOF_NBYTES = MAC_NBYTES


class Code(enum.IntEnum):
    """How the listener's answers begin. Values are on the wire: never renumber."""

    OK = 0
    OTHER_PEER = 1  # of another job or incarnation
    REFUSED = 2  # a proof that is not by our token and a ticket of ours
    NOT_SHARED = 3  # the memory that both ends were to share did not come, or can't be mapped


@dataclass(frozen=True, slots=True)
class Hello:
    """What the dialler says first, in the clear.

    Attributes:
        nonce: the dialler's.
        target: the listener that it wants, as `target` gives it.
        sink: id of the sink that will ask for chunks.
        rail: name that both ends count bytes under, at most 96 bytes.
    """

    nonce: bytes
    target: bytes
    sink: int
    rail: str

    def encode(self) -> bytes:
        """The message, `HELLO_NBYTES` bytes."""
        return _HELLO.pack(_MAGIC, self.nonce, self.target, self.sink, self.rail.encode())

    @classmethod
    def decode(cls, message: bytes) -> "Hello":
        """Reads a message of `HELLO_NBYTES` bytes.

        Raises:
            ValueError: it is no hello.
        """
        magic, nonce, target, sink, rail = _HELLO.unpack(message)
        if magic != _MAGIC:
            raise ValueError(f"a hello begins with {_MAGIC!r}, not {magic!r}")
        return cls(nonce, target, sink, rail.rstrip(b"\0").decode())


def target(job: str, incarnation: str) -> bytes:
    """Names a listener without telling strangers what it serves: 32 bytes."""
    return hashlib.sha256(f"{len(job)} {job} {incarnation}".encode()).digest()


def encode_answer(code: Code, body: bytes = b"") -> bytes:
    """What the listener says, `ANSWER_NBYTES` bytes; `body` is its nonce or its proof."""
    return _ANSWER.pack(code, body)


def decode_answer(message: bytes) -> tuple[int, bytes]:
    """Code and body of an answer."""
    code, body = _ANSWER.unpack(message)
    return code, body


def proofs(
    token: bytes, ticket: bytes, hello: Hello, challenge: bytes, *, job: str, incarnation: str
) -> tuple[bytes, bytes]:
    """What the dialler and the listener prove themselves with on the connection of `hello`.

    `challenge` is the listener's nonce. Each end sends its own proof and checks the other.
    """
    nonces = (hello.nonce, challenge)
    fields = ("data", job, incarnation, hello.sink, hello.rail, ticket)
    return (
        authentication.mac(token, "dialler", nonces, fields),
        authentication.mac(token, "listener", nonces, fields),
    )
