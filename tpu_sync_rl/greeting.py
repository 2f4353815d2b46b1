"""How a control stream opens: both ends prove that they know the token, before anything else.

`Greeting` (client), `Challenge` (coordinator), `Credentials` (client), `Proof` (coordinator). The
proofs are those of `authentication`.
"""

from msgspec import field

from tpu_sync_rl import authentication
from tpu_sync_rl.messages import Message


class Greeting(Message, frozen=True):
    """Who dials, in the clear, with the dialler's nonce."""

    role: str  # "trainer" or "sampler", or "doctor", which hears a `JobStatus` and takes no part
    job: str
    name: str  # a trainer's incarnation, a sampler's replica
    process_index: int
    nonce: bytes
    software: dict[str, str] = field(default_factory=dict)  # versions by package


class Challenge(Message, frozen=True):
    """The coordinator's nonce."""

    nonce: bytes


class Credentials(Message, frozen=True):
    """The dialler's proof that it knows the token."""

    mac: bytes


class Proof(Message, frozen=True):
    """The coordinator's own proof, for a client that has given its credentials."""

    mac: bytes


def proofs(token: bytes, greeting: Greeting, challenge: Challenge) -> tuple[bytes, bytes]:
    """What the client and the coordinator prove themselves with on the stream of `greeting`.

    Each end sends its own proof and checks the other.
    """
    nonces = (greeting.nonce, challenge.nonce)
    fields = ("control", greeting.role, greeting.job, greeting.name, greeting.process_index)
    return (
        authentication.mac(token, "dialler", nonces, fields),
        authentication.mac(token, "listener", nonces, fields),
    )
