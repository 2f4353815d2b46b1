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


class Joiner:
    """Puts the messages of one stream together again.

    Args:
        most_nbytes: of a message.
    """

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._pieces: list[bytes] = []
        self._nbytes = 0

    def add(self, piece: bytes) -> bytes | None:
        """The message that `piece` completes, if it does.

        Raises:
            msgspec.DecodeError: the message is too long, or `piece` does not go on with it.
        """
        if piece.startswith(_CONTINUED):
            self._nbytes += len(piece) - len(_CONTINUED)
            if self._nbytes > self._most_nbytes:
                raise DecodeError(f"a message of more than {self._most_nbytes} bytes")
            self._pieces.append(piece[len(_CONTINUED) :])
            return None
        if not self._pieces:
            return piece
        if piece:
            raise DecodeError("a message within a message")
        message = b"".join(self._pieces)
        self._pieces.clear()
        self._nbytes = 0
        return message


def join(pieces: Iterable[bytes], most_nbytes: int) -> Iterator[bytes]:
    """The messages of a stream, as its pieces come. Raises what `Joiner.add` raises."""
    joiner = Joiner(most_nbytes)
    for piece in pieces:
        message = joiner.add(piece)
        if message is not None:
            yield message
