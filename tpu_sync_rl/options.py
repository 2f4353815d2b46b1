"""Options that `connect_trainer` and `connect_sampler` share, checked once where they come in."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Literal, SupportsIndex

from tpu_sync_rl.job_token import resolve_token
from tpu_sync_rl.metrics import check_registry
from tpu_sync_rl.tls import TLS, check_tls

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

DEFAULT_TIMEOUT_S = 600.0
MAX_CHUNK_NBYTES = 64 << 20
LEAST_STREAMS = 2  # per rail and source, where the user leaves it to us
MOST_STREAMS = 16
MAX_PEER_TIMEOUT_S = 86400.0  # gRPC and epoll count it in 32 bits of milliseconds

Wait = Literal["received", "committed"]  # what a trainer's sync_weights may wait for
OnStraggler = Literal["wait", "drop"]  # what becomes of a call whose replica is too slow
Commit = Literal["replica", "fleet"]  # who returns a version together
Verify = Literal["off", "wire", "full"]  # how a version is held against its source
StagingMode = Literal["auto", "direct", "pinned_host"]  # how shards become host memory, and back
AgentChoice = Literal["auto", "process", "colocated"]  # where the data path runs
DEFAULT_WINDOW_NBYTES = 256 << 20  # of copies between devices and host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a session talks to its peers.

    Attributes:
        job: name of the policy; one coordinator serves several jobs.
        token: secret that every program of the job has; b"" allows loopback only.
        timeout_s: deadline of calls that name none.
        nics: names or addresses of the NICs that carry data; None finds them.
        streams_per_rail: TCP connections per (local NIC, remote NIC) pair and source; None is
            `LEAST_STREAMS`, and up to `MOST_STREAMS` where the way is too long for fewer.
        chunk_nbytes: most bytes of a chunk on the wire.
        congestion: TCP congestion control of data connections; None is cubic over loopback, where
            that is allowed, and the system's elsewhere.
        peer_timeout_s: after this long without a sign of life a peer is lost.
        same_host: "auto" takes shared memory between processes of one host and user, "tcp" never.
        verify: "wire" sums each chunk, "full" compares the memory of both ends, too, and on a
            trainer the copies of each version on several processes.
        insecure: listen beyond loopback without a token.
        trace: file for a Chrome trace of the stages and chunks of each sync.
        tls: certificates of the control streams; None leaves them in the clear.
        metrics: registry of the application that gets metrics.
    """

    job: str
    token: bytes
    timeout_s: float
    nics: tuple[str, ...] | None
    streams_per_rail: int | None
    chunk_nbytes: int
    congestion: str | None
    peer_timeout_s: float
    same_host: str
    verify: Verify
    insecure: bool
    trace: str | None
    tls: TLS | None
    metrics: "CollectorRegistry | None"

    @classmethod
    def checked(
        cls,
        *,
        job: str,
        token: str | bytes | None,
        timeout: float,
        nics: Sequence[str] | None,
        streams_per_rail: int | None,
        chunk_nbytes: int,
        congestion: str | None,
        peer_timeout: float,
        same_host: str,
        verify: Verify,
        insecure: bool,
        trace: str | os.PathLike[str] | None,
        tls: TLS | None,
        metrics: "CollectorRegistry | None",
    ) -> "Options":
        """The options as a user gave them to `connect_*`, each held against what it may be.

        Raises:
            ValueError, TypeError: names the option, what it may be and what it was.
        """
        if nics is not None:
            check_nics(nics)
        if congestion is not None:
            check_congestion(congestion)
        check_choice("same_host", same_host, "auto", "tcp")
        check_choice("verify", verify, "off", "wire", "full")
        if tls is not None:
            check_tls(tls)
        check_registry(metrics)
        return cls(
            job=checked_name("job", job),
            token=resolve_token(token),
            timeout_s=checked_seconds("timeout", timeout),
            nics=None if nics is None else tuple(nics),
            streams_per_rail=(
                None
                if streams_per_rail is None
                else checked_int("streams_per_rail", streams_per_rail, 1, 64)
            ),
            chunk_nbytes=checked_int("chunk_nbytes", chunk_nbytes, 4096, MAX_CHUNK_NBYTES),
            congestion=congestion,
            peer_timeout_s=checked_seconds("peer_timeout", peer_timeout, 1, MAX_PEER_TIMEOUT_S),
            same_host=same_host,
            verify=verify,
            insecure=bool(insecure),
            trace=None if trace is None else os.fspath(trace),
            tls=tls,
            metrics=metrics,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """How versions pass between devices and host memory, and how much of each they may take.

    Attributes:
        mode: "auto" takes "pinned_host" where a shard is on a device that is no CPU.
        window_nbytes: most bytes of copies between device and host that are under way at a time.
        max_host_nbytes: most bytes of host memory for versions; None for any number.
        max_device_nbytes: most bytes of params on one device; None for any number.
    """

    mode: StagingMode = "auto"
    window_nbytes: int = DEFAULT_WINDOW_NBYTES
    max_host_nbytes: int | None = None
    max_device_nbytes: int | None = None

    @classmethod
    def checked(
        cls,
        mode: StagingMode,
        *,
        max_host_nbytes: int | None,
        max_device_nbytes: int | None = None,
        **window: int,
    ) -> "Staging":
        """The options as a user gave them to `connect_*`; `window` is the one that has its name.

        Raises:
            ValueError, TypeError: names the option, what it may be and what it was.
        """
        check_choice("staging", mode, "auto", "direct", "pinned_host")
        ((name, nbytes),) = window.items()
        limits = {"max_host_nbytes": max_host_nbytes, "max_device_nbytes": max_device_nbytes}
        return cls(
            mode=mode,
            window_nbytes=checked_int(name, nbytes, 1),
            **{
                limit: None if most is None else checked_int(limit, most, 1)
                for limit, most in limits.items()
            },
        )


def checked_name(name: str, value: str) -> str:
    """The option `name`, which is a name itself. Raises ValueError where it is none."""
    if not isinstance(value, str) or not 0 < len(value) <= 200:
        raise ValueError(f"{name} must be a name of 1 to 200 characters, not {value!r}")
    return value


def check_choice(name: str, value: str, *choices: str) -> None:
    """Raises ValueError where the option `name` is none of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {value!r}")


def check_wait(wait: Wait | None) -> None:
    """Raises ValueError where `wait` is nothing that a trainer's sync_weights can wait for."""
    if wait not in ("received", "committed", None):
        raise ValueError(f"wait must be 'received', 'committed' or None, not {wait!r}")


def checked_int(
    name: str, value: SupportsIndex, least: int | None = None, most: int | None = None
) -> int:
    """The option `name` as an int from `least` to `most`.

    Raises:
        TypeError: it is no int.
        ValueError: it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an int, not {value!r}")
    number = value.__index__()
    if (least is not None and number < least) or (most is not None and number > most):
        bounds = f", {least} or more," if most is None else f" from {least} to {most},"
        raise ValueError(f"{name} must be an int{bounds} not {number}")
    return number


def checked_seconds(name: str, value: float, least: float = 0, most: float | None = None) -> float:
    """The option `name` as seconds from `least` to `most`. Raises ValueError where it is not."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not value >= least or (most is not None and value > most):
        bounds = f", {least} or more," if most is None else f" from {least} to {most:g},"
        raise ValueError(f"{name} must be a number of seconds{bounds} not {value!r}")
    return float(value)


def checked_timeout(timeout: float | None, default_s: float) -> float:
    """Seconds of a call's `timeout`, `default_s` for None. Raises as `checked_seconds` does."""
    return default_s if timeout is None else checked_seconds("timeout", timeout)


def check_nics(nics: Sequence[str]) -> None:
    """Raises TypeError where `nics` is no sequence of str, ValueError where it is empty."""
    if isinstance(nics, str) or not all(isinstance(nic, str) for nic in nics):
        raise TypeError(f"nics must be a sequence of names or addresses, not {nics!r}")
    if not nics:
        raise ValueError("nics must name one NIC or more; leave it out to have them found")


def check_congestion(name: str) -> None:
    """Raises ValueError where `name` is no TCP congestion control that may be used here."""
    if not isinstance(name, str):
        raise TypeError(f"congestion must be a name, not {name!r}")
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError as error:
            raise ValueError(
                f"congestion={name!r} can't be used here ({error.strerror}); see "
                "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
            ) from error
