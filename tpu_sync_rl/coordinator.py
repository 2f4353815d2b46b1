"""The coordinator: a process that keeps the programs of jobs in step, and touches no weights.

    python -m tpu_sync_rl.coordinator --address=0.0.0.0:8476

It imports no JAX.
"""

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence

from tpu_sync_rl.addresses import is_loopback, join_address, split_address
from tpu_sync_rl.coordinator_server import CoordinatorServer
from tpu_sync_rl.descriptors import check_descriptors
from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.job_token import resolve_token
from tpu_sync_rl.options import (
    MAX_PEER_TIMEOUT_S,
    checked_seconds,
)
from tpu_sync_rl.tls import TLS, check_tls

_PARENT_POLL_S = 0.2
_DESCRIPTORS = 16  # it takes 10, and one more for each client
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h

_DESCRIPTION = """\
Runs a coordinator until it is interrupted. Trainers and samplers connect to it and take their
versions in step; the weights themselves go from trainer to sampler, not through it. A trainer
runs one itself, unless it connects with host_coordinator=False.

All programs of a job, and this one, share a secret token: TSR_TOKEN, or the content of the file
that TSR_TOKEN_FILE names. Without one it listens on loopback alone.

example:
  TSR_TOKEN=… python -m tpu_sync_rl.coordinator --address=0.0.0.0:8476
"""


def _die_with_parent() -> None:
    """Has the kernel kill this process with the thread that started it, even if it is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with(parent: int) -> None:
    """Ends this process within a fraction of a second of its parent, whatever its loop does."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(0)


async def _run(arguments: argparse.Namespace, token: bytes) -> None:
    host, port = split_address(arguments.address, "--address")
    tls = _tls(arguments)
    peer_timeout_s = checked_seconds("peer_timeout", arguments.peer_timeout, 1, MAX_PEER_TIMEOUT_S)
    server = CoordinatorServer(token=token, peer_timeout_s=peer_timeout_s, tls=tls)
    port = await server.start(host, port)
    if arguments.ready_fd is None:
        print(f"coordinator at {join_address(host, port)}", flush=True)
    else:
        _report(arguments.ready_fd, str(port))
    try:
        await server.run()
    finally:
        await server.stop()


def _tls(arguments: argparse.Namespace) -> TLS | None:
    files = [arguments.tls_certificate, arguments.tls_key, arguments.tls_ca]
    if files == [None] * len(files):
        return None
    tls = TLS(certificate=files[0], key=files[1], ca=files[2])
    check_tls(tls, serves=True)
    return tls


def _report(ready_fd: int, line: str) -> None:
    with open(ready_fd, "w") as pipe:
        print(line, file=pipe)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tpu_sync_rl.coordinator",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--address",
        required=True,
        help="host:port to listen on; port 0 is a free one, which is printed (required)",
    )
    parser.add_argument(
        "--peer_timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="silence after which a process counts as lost (default: %(default)g)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="listen beyond loopback without a token (default: refuse to)",
    )
    for name, help_text in (
        ("certificate", "PEM file of the certificate that it shows; streams are encrypted then"),
        ("key", "PEM file of the private key of that certificate"),
        ("ca", "PEM file of the authorities that have to vouch for clients (default: any client)"),
    ):
        parser.add_argument(f"--tls_{name}", metavar="FILE", help=help_text)
    # For the process that starts this one: the parent to end with, and where to write the port or
    # an error.
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ready_fd", type=int, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a coordinator until it is told to end; its exit status."""
    arguments = _parser().parse_args(argv)
    # Within a trainer's output, only what its user has to know.
    level = logging.INFO if arguments.parent is None else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    # Strangers may hold connections for some seconds; there should be room for others meanwhile.
    most_fds = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # a sandbox may not let it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_fds, most_fds))
    if arguments.parent is not None:
        _die_with_parent()
        watch = threading.Thread(target=_end_with, args=(arguments.parent,), daemon=True)
        watch.start()
    try:
        check_descriptors("a coordinator", _DESCRIPTORS)
        token = resolve_token(None)
        host, _ = split_address(arguments.address, "--address")
        if not token and not arguments.insecure and not is_loopback(host):
            raise ValueError(
                f"{host} can be reached from other machines: set TSR_TOKEN or TSR_TOKEN_FILE, "
                "here and in every program of the job, or pass --insecure"
            )
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_run(arguments, token))
    except (SyncError, ValueError) as error:
        if arguments.ready_fd is None:
            print(f"error: {error}", file=sys.stderr)
        else:
            _report(arguments.ready_fd, str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
