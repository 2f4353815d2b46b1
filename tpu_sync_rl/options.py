"""Options that `connect_trainer` and `connect_sampler` share, checked once where they come in."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

DEFAULT_TIMEOUT_S = 600.0
MAX_CHUNK_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a session talks to its peers.

    Attributes:
        job: name of the policy; one coordinator serves several jobs.
        token: secret that every program of the job has; b"" allows loopback only.
        timeout_s: deadline of calls that name none.
        nics: names or addresses of the NICs that carry data; None finds them.
        streams_per_rail: TCP connections per (local NIC, remote NIC) pair.
        chunk_nbytes: most bytes of a chunk on the wire.
        congestion: TCP congestion control of data connections; None leaves the system's.
        peer_timeout_s: after this long without a sign of life a peer is lost.
        same_host: "auto", or "tcp" to use no shortcut between processes of one host.
        insecure: listen beyond loopback without a token.
        trace: file for a Chrome trace of the stages of each sync.
    """

    job: str
    token: bytes
    timeout_s: float
    nics: tuple[str, ...] | None
    streams_per_rail: int
    chunk_nbytes: int
    congestion: str | None
    peer_timeout_s: float
    same_host: str
    insecure: bool
    trace: str | None

    @classmethod
    def checked(
        cls,
        *,
        job: str,
        token: str | bytes | None,
        timeout: float,
        nics: Sequence[str] | None,
        streams_per_rail: int,
        chunk_nbytes: int,
        congestion: str | None,
        peer_timeout: float,
        same_host: str,
        insecure: bool,
        trace: str | os.PathLike[str] | None,
    ) -> "Options":
        """The options as a user gave them to `connect_*`, each held against what it may be.

        Raises:
            ValueError, TypeError: names the option, what it may be and what it was.
        """
        if not isinstance(job, str) or not 0 < len(job) <= 200:
            raise ValueError(f"job must be a name of 1 to 200 characters, not {job!r}")
        if isinstance(nics, str):
            raise TypeError(f"nics must be a sequence of names or addresses, not {nics!r}")
        _in_range("streams_per_rail", streams_per_rail, 1, 64)
        _in_range("chunk_nbytes", chunk_nbytes, 4096, MAX_CHUNK_NBYTES)
        if not peer_timeout >= 1:
            raise ValueError(f"peer_timeout must be at least 1 second, not {peer_timeout!r}")
        if congestion is not None:
            _check_congestion(congestion)
        if same_host not in ("auto", "tcp"):
            raise ValueError(f"same_host must be 'auto' or 'tcp', not {same_host!r}")
        return cls(
            job=job,
            token=resolve_token(token),
            timeout_s=checked_timeout(timeout, DEFAULT_TIMEOUT_S),
            nics=None if nics is None else tuple(nics),
            streams_per_rail=streams_per_rail,
            chunk_nbytes=chunk_nbytes,
            congestion=congestion,
            peer_timeout_s=float(peer_timeout),
            same_host=same_host,
            insecure=bool(insecure),
            trace=None if trace is None else os.fspath(trace),
        )


def checked_timeout(timeout: float | None, default: float) -> float:
    """Seconds of `timeout`, or `default` for None.

    Raises:
        ValueError: it is negative or not a number.
    """
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not timeout >= 0:
        raise ValueError(f"timeout must be a number of seconds, 0 or more, not {timeout!r}")
    return float(timeout)


def resolve_token(token: str | bytes | None) -> bytes:
    """The token as bytes: the argument, else TSR_TOKEN, else what the file TSR_TOKEN_FILE holds.

    Raises:
        ValueError: the token is empty, or its file can't be read.
    """
    if token is None:
        token = os.environb.get(b"TSR_TOKEN")
    if token is None:
        path = os.environ.get("TSR_TOKEN_FILE")
        if path is None:
            return b""
        try:
            token = Path(path).read_bytes().strip()
        except OSError as error:
            raise ValueError(f"TSR_TOKEN_FILE={path}: {error.strerror}") from error
    secret = token.encode() if isinstance(token, str) else bytes(token)
    if not secret:
        raise ValueError("the token is empty; leave it out to use loopback without one")
    return secret


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port".

    Raises:
        ValueError: it is neither.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"coordinator must be 'host:port', not {address!r}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The address that `split_address` takes apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True where `host` can't be reached from other machines."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _in_range(name: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be an int from {least} to {most}, not {value!r}")


def _check_congestion(name: str) -> None:
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError as error:
            raise ValueError(
                f"congestion={name!r} can't be used here ({error.strerror}); see "
                "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
            ) from error
