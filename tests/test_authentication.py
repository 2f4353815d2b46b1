import pytest

from tpu_sync_rl import authentication
from tpu_sync_rl.authentication import mac, matches, new_nonce

NONCES = (bytes(range(32)), bytes(range(32, 64)))


def test_both_ends_make_the_same_proof():
    ours = mac(b"token", "dialler", NONCES, ("data", "policy", 7))
    theirs = mac(b"token", "dialler", NONCES, ("data", "policy", 7))
    assert len(ours) == authentication.MAC_NBYTES
    assert matches(ours, theirs)


def test_proof_stays_what_it_is_between_releases():
    proof = mac(b"token", "listener", NONCES, ("data", 7, b"\0"))
    assert proof.hex() == "43b4169cb95b23413d6bc152bbc3a148b88b417ea08777020f62a1966104d957"


@pytest.mark.parametrize(
    "other",
    [
        mac(b"Token", "dialler", NONCES, ("data", 7)),
        mac(b"", "dialler", NONCES, ("data", 7)),
        mac(b"token", "listener", NONCES, ("data", 7)),
        mac(b"token", "dialler", NONCES[::-1], ("data", 7)),
        mac(b"token", "dialler", NONCES, ("data", 8)),
        mac(b"token", "dialler", NONCES, ("data", "7")),
        mac(b"token", "dialler", NONCES, ("data7",)),
        mac(b"token", "dialler", NONCES, ("dat", "a", 7)),
        mac(b"token", "dialler", NONCES, ("data", 7, "")),
    ],
)
def test_any_difference_makes_another_proof(other):
    assert not matches(mac(b"token", "dialler", NONCES, ("data", 7)), other)


def test_nonces_never_repeat():
    assert len({new_nonce() for _ in range(100)}) == 100


def test_short_nonce_is_refused():
    with pytest.raises(ValueError, match="nonces have 32 bytes, got \\[32, 3\\]"):
        mac(b"token", "dialler", (NONCES[0], b"abc"), ())
