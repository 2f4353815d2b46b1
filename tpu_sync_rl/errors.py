"""What can go wrong in the world around a sync. A caller's mistake is ValueError or TypeError."""


class SyncError(Exception):
    """A sync that did not happen. The params that the caller held before stay whole and valid."""


class ManifestError(SyncError):
    """Trainer and sampler differ in keys, shapes, dtypes or coverage; lists every difference."""


class PlanError(SyncError):
    """Boxes that can't be read from what the trainer holds: our bug, or an unsupported layout."""


class VersionError(SyncError):
    """A version that does not grow, is no longer held, or belongs to a fenced incarnation."""


class CorruptionError(SyncError):
    """Bytes that did not match their checksum, again and again, or copies that are not equal."""


class AuthError(SyncError):
    """A peer without the right token."""


class JobEndedError(SyncError):
    """The trainer closed cleanly, and every version that it published here has been taken."""


class PeerLostError(SyncError, ConnectionError):
    """A process that this call needs has died, left or fallen silent."""


class SyncTimeoutError(SyncError, TimeoutError):
    """The deadline of a call passed; the message says who lacks what."""


_BY_NAME: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        ValueError,
        TypeError,
        SyncError,
        ManifestError,
        PlanError,
        VersionError,
        CorruptionError,
        AuthError,
        JobEndedError,
        PeerLostError,
        SyncTimeoutError,
    )
}


def by_name(name: str) -> type[Exception]:
    """The class that a peer named, so that an error is the same in all processes of a program.

    SyncError where it is neither ours nor one for mistakes of the caller.
    """
    return _BY_NAME.get(name, SyncError)
