"""TLS of control streams: files of certificates, checked before anybody dials or listens."""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class TLS:
    """Encrypts the control streams of a session, and proves who is at their ends.

    All files are PEM, and no private key has a password. Weights do not take these streams.

    Attributes:
        certificate: of this end, followed by those that lead to its authority. The coordinator
            needs one, so who hosts it does; others need one where the coordinator asks for it.
        key: private key of `certificate`.
        ca: certificates of the authorities that vouch for the other end. A coordinator that has
            them takes only who shows a certificate of theirs. Without, others trust `certificate`
            alone where they have one, else the authorities that gRPC brings along.
        server_name: what the coordinator's certificate is made out to, if that is not the host of
            its address.

    Example:
        >>> import tpu_sync_rl as tsr
        >>> tsr.TLS(ca="/etc/policy/ca.pem", server_name="policy")
        TLS(certificate=None, key=None, ca='/etc/policy/ca.pem', server_name='policy')
    """

    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    ca: str | os.PathLike[str] | None = None
    server_name: str | None = None


class Files(NamedTuple):
    """What the files of a `TLS` hold."""

    certificate: bytes | None
    key: bytes | None
    ca: bytes | None


def read_files(tls: TLS) -> Files:
    """Reads the files. Raises OSError where one can't be read."""
    paths = (tls.certificate, tls.key, tls.ca)
    return Files(*(None if path is None else Path(path).read_bytes() for path in paths))


def check_tls(tls: TLS, *, serves: bool = False) -> None:
    """Holds the files against what they have to be.

    Args:
        tls: as the user gave it.
        serves: whether the coordinator listens with it.

    Raises:
        TypeError: `tls` is no TLS.
        ValueError: a file that is missing, can't be read, or is not what it is said to be.
    """
    if not isinstance(tls, TLS):
        raise TypeError(f"tls must be a tpu_sync_rl.TLS, not {tls!r}")
    if (tls.certificate is None) != (tls.key is None):
        raise ValueError(f"tls: certificate and key go together, not {tls!r}")
    if serves and tls.certificate is None:
        raise ValueError("tls: who hosts the coordinator needs its certificate= and key=")
    try:
        read_files(tls)
    except OSError as error:
        raise ValueError(f"tls: {error.filename}: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
    except ssl.SSLError as error:
        raise ValueError(f"tls: ca={tls.ca} holds no certificate ({error})") from error
    try:
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.key, password="")
    except ssl.SSLError as error:
        raise ValueError(
            f"tls: key={tls.key} is no key, without a password, of certificate={tls.certificate} "
            f"({error})"
        ) from error
