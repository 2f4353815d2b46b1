import msgspec
import pytest

from tpu_sync_rl.long_messages import PIECE_NBYTES, Joiner, join, split


@pytest.mark.parametrize(
    "nbytes", [0, 1, PIECE_NBYTES, PIECE_NBYTES + 1, 2 * PIECE_NBYTES, 5 * PIECE_NBYTES + 7]
)
def test_messages_come_out_as_they_went_in(nbytes):
    messages = [bytes([0xC0]) * nbytes, b"short", bytes([0xC1]) * (3 * PIECE_NBYTES), b"\x80"]
    pieces = [piece for message in messages for piece in split(message)]
    assert max(map(len, pieces)) <= PIECE_NBYTES
    assert list(join(pieces, 10 * PIECE_NBYTES)) == messages


def test_short_message_is_its_own_piece():
    message = msgspec.msgpack.encode({"type": "Leave"})
    assert list(split(message)) == [message]


def test_message_that_is_too_long_is_refused_before_it_is_there():
    joiner = Joiner(100)
    assert joiner.add(b"\xc1" + bytes(100)) is None
    with pytest.raises(msgspec.DecodeError, match="a message of more than 100 bytes"):
        joiner.add(b"\xc1x")


def test_message_within_another_is_refused():
    joiner = Joiner(100)
    joiner.add(b"\xc1begun")
    with pytest.raises(msgspec.DecodeError, match="a message within a message"):
        joiner.add(b"another")
