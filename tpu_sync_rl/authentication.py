"""Proof that both ends of a connection know the same token, without sending it.

Each end draws a nonce and sends it in the clear; then the dialler proves itself, and only to a
dialler that did so the listener proves itself. A proof covers both nonces, the end that made it,
and everything that the ends have to agree on, so it is worth nothing on another connection, in the
other direction, for another job or under another name. It does not hide or protect what is sent
afterwards: who can change packets on the path is out of its reach.

Data connections take a ticket as well, which only the coordinator gives: one per sink and trainer
process, made of a secret that a listener draws for its one life. It is a part of their proofs and
crosses none of their connections. So the token alone opens none of them, a ticket alone neither;
and where TLS hides the control streams, nobody can try tokens against a proof that was overheard.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from typing import Literal

Side = Literal["dialler", "listener"]

NONCE_NBYTES = 32
MAC_NBYTES = 32

_CONTEXT = b"tpu_sync_rl authentication 1"
_SECRET_NBYTES = 32


def new_nonce() -> bytes:
    """Draws the `NONCE_NBYTES` random bytes that one end contributes to one connection."""
    return secrets.token_bytes(NONCE_NBYTES)


def mac(
    token: bytes, side: Side, nonces: tuple[bytes, bytes], fields: Iterable[str | int | bytes]
) -> bytes:
    """Returns the proof that `side` knows `token`: HMAC-SHA256, `MAC_NBYTES` bytes.

    Args:
        token: the shared secret; `b""` where there is none (loopback only).
        side: the end that makes the proof. A proof of one end is never one of the other.
        nonces: the dialler's and the listener's, in this order on both ends.
        fields: what both ends have to agree on: kind of connection, job, incarnation, ids. Types
            and lengths are part of the proof, so no two sequences of fields share one.

    Raises:
        ValueError: a nonce of another length than `NONCE_NBYTES`.
    """
    if any(len(nonce) != NONCE_NBYTES for nonce in nonces):
        raise ValueError(f"nonces have {NONCE_NBYTES} bytes, got {[len(n) for n in nonces]}")
    proof = hmac.new(token, digestmod=hashlib.sha256)
    for part in (_CONTEXT, side, *nonces, *fields):
        proof.update(_framed(part))
    return proof.digest()


def new_ticket_secret() -> bytes:
    """Draws what a listener's tickets are made of. Only the coordinator is told."""
    return secrets.token_bytes(_SECRET_NBYTES)


def ticket(secret: bytes, sink: int) -> bytes:
    """What opens connections of `sink`, and of no other, to the listener that drew `secret`."""
    return hmac.new(secret, b"ticket" + _framed(sink), hashlib.sha256).digest()


def matches(proof: bytes, expected: bytes) -> bool:
    """Compares two proofs in a time that does not depend on where they differ."""
    return hmac.compare_digest(proof, expected)


def _framed(part: str | int | bytes) -> bytes:
    if isinstance(part, bytes):
        kind, body = b"b", part
    elif isinstance(part, str):
        kind, body = b"s", part.encode()
    else:
        kind, body = b"i", str(part).encode()
    return kind + len(body).to_bytes(8, "little") + body
