"""Long control messages in pieces, so that nobody has to take one whole from a stranger.

gRPC puts a message together before anybody can look at it, and knows one limit for all streams of a
server. So that limit is a piece; whether a message may be longer is up to who reads the stream.

A short message travels as it is. Of a long one, each piece is led by a byte that begins no message,
and an empty piece ends it.
"""

from collections.abc import Iterable, Iterator

from msgspec import DecodeError

PIECE_NBYTES = 256 << 10

_CONTINUED = b"\xc1"  # the one byte that MessagePack never uses


def split(message: bytes) -> Iterator[bytes]:
    """The pieces of a message, each of at most `PIECE_NBYTES` bytes."""
    if len(message) <= PIECE_NBYTES:
        yield message
        return
    step = PIECE_NBYTES - len(_CONTINUED)
    for start in range(0, len(message), step):
        yield _CONTINUED + message[start : start + step]
    yield b""


def is_part(piece: bytes) -> bool:
    """Whether a piece is not yet the whole message, or its end."""
    return piece.startswith(_CONTINUED)


class Joiner:
    """Puts the messages of one stream together again.

    Args:
        most_nbytes: of a message.
    """

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._message = bytearray()  # so far; it grows in place, so there is one of it

    def add(self, piece: bytes) -> bytes | bytearray | None:
        """The message that `piece` completes, if it does.

        Raises:
            msgspec.DecodeError: the message is too long, or `piece` does not go on with it.
        """
        if is_part(piece):
            if len(self._message) + len(piece) - len(_CONTINUED) > self._most_nbytes:
                raise DecodeError(f"a message of more than {self._most_nbytes} bytes")
            self._message += memoryview(piece)[len(_CONTINUED) :]
            return None
        if not self._message:
            return piece
        if piece:
            raise DecodeError("a message within a message")
        message, self._message = self._message, bytearray()
        return message


def join(pieces: Iterable[bytes], most_nbytes: int) -> Iterator[bytes | bytearray]:
    """The messages of a stream, as its pieces come. Raises what `Joiner.add` raises."""
    joiner = Joiner(most_nbytes)
    for piece in pieces:
        message = joiner.add(piece)
        if message is not None:
            yield message
