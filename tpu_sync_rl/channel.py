"""gRPC channels to a coordinator: their options, their certificates, what their errors mean."""

import contextlib

import grpc

from tpu_sync_rl import long_messages
from tpu_sync_rl.keepalive import keepalive_options
from tpu_sync_rl.options import Options
from tpu_sync_rl.tls import read_files

# How gRPC says that the other end has no TLS, or a certificate that is not to be trusted.
_TLS_FLAWS = (
    "CERTIFICATE_VERIFY_FAILED",
    "Hostname Verification Check failed",
    "WRONG_VERSION_NUMBER",
)


class Channels:
    """The channels of one session, one after another. One thread at a time."""

    def __init__(self, address: str, options: Options) -> None:
        """Dials nothing; raises OSError where the files of `options.tls` can't be read."""
        self._address = address
        self._tls = options.tls
        self._files = None if options.tls is None else read_files(options.tls)
        name = None if options.tls is None else options.tls.server_name
        self._options = [
            *keepalive_options(options.peer_timeout_s),
            *([] if name is None else [("grpc.ssl_target_name_override", name)]),
            ("grpc.max_receive_message_length", long_messages.PIECE_NBYTES),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
            # A pool that is shared would keep the long pauses of earlier attempts to connect.
            ("grpc.use_local_subchannel_pool", 1),
        ]

    def new(self) -> grpc.Channel:
        """One that dials when a stream is opened on it; a context manager."""
        if self._tls is None:
            return grpc.insecure_channel(self._address, self._options)
        with contextlib.suppress(OSError):  # they may have been renewed, or are about to be
            self._files = read_files(self._tls)
        assert self._files is not None
        certificate, key, ca = self._files
        credentials = grpc.ssl_channel_credentials(ca or certificate, key, certificate)
        return grpc.secure_channel(self._address, credentials, self._options)


def failure(error: grpc.RpcError, *, joined_once: bool) -> str:
    """Why a stream broke, to a coordinator that had taken this process in before, or had not."""
    if not isinstance(error, grpc.Call):
        return str(error)
    text = f"{error.code().name.lower().replace('_', ' ')}: {error.details()}"
    if joined_once and error.code() is grpc.StatusCode.UNAVAILABLE:
        text += " (its program has ended or can't be reached)"
    elif "Socket closed" in text:  # all that one learns of a coordinator with other ideas of TLS
        text += " (it ended just so; does it want tls=, or tls= with a certificate and key?)"
    return text


def is_tls_flaw(text: str) -> bool:
    """Whether a `failure` is for good: the ends have other ideas of TLS, or of whom to trust."""
    return any(flaw in text for flaw in _TLS_FLAWS)
