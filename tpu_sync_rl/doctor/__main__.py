"""Command line of the doctor."""

import argparse
import sys
from collections.abc import Iterator, Sequence

from tpu_sync_rl.doctor import job, machine
from tpu_sync_rl.doctor.findings import Finding, exit_status, print_table, to_json
from tpu_sync_rl.manifest import Manifest
from tpu_sync_rl.options import LEAST_STREAMS, Options
from tpu_sync_rl.tls import TLS

_DESCRIPTION = """\
Looks at this machine and, with --coordinator, at a job and the way to its trainer, as a sampler
here would go it. Says what is the case and what to do. It takes no part in the job and moves no
weights. Exits with 1 if something is broken.

The token of the job is taken from TSR_TOKEN, or the file that TSR_TOKEN_FILE names.

example:
  TSR_TOKEN=… python -m tpu_sync_rl.doctor --coordinator=10.0.0.2:8476
"""

_NUM_GENERATIONS = 2  # the current one, and one that is being received
_TLS = ("certificate", "key", "ca", "server_name")


def examine(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Everything there is to find out, from the machine outwards.

    Raises:
        ValueError, TypeError: an argument is not what it has to be.
    """
    options = _options(arguments)
    about_job: list[Finding] = []
    status = None
    if arguments.coordinator is not None:
        about_job, status = job.ask(arguments.coordinator, options)
    nbytes = arguments.nbytes
    if nbytes is None and status is not None and status.trainer is not None:
        nbytes = Manifest.decode(status.trainer.manifest).nbytes
    yield from machine.examine(
        nics=options.nics,
        num_streams=arguments.peers * (options.streams_per_rail or LEAST_STREAMS),
        nbytes=None if nbytes is None else int(nbytes) // arguments.processes,
        num_generations=_NUM_GENERATIONS,
    )
    yield from about_job
    if status is not None:
        yield from job.programs(status)
        yield from job.ways(status, options)


def _options(arguments: argparse.Namespace) -> Options:
    files = {name: getattr(arguments, f"tls_{name}") for name in _TLS}
    return Options.checked(
        job=arguments.job,
        token=None,
        timeout=arguments.timeout,
        nics=None if arguments.nics is None else arguments.nics.split(","),
        streams_per_rail=arguments.streams_per_rail,
        chunk_nbytes=1 << 20,
        congestion=None,
        peer_timeout=10.0,
        same_host=arguments.same_host,
        verify="wire",
        insecure=False,
        trace=None,
        tls=TLS(**files) if any(files.values()) else None,
        metrics=None,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tpu_sync_rl.doctor",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="that of the job (default: look at no job)"
    )
    parser.add_argument("--job", default="policy", help="its name (default: %(default)s)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="that the coordinator may take to answer (default: %(default)g)",
    )
    parser.add_argument("--nics", metavar="NAME,…", help="the NICs to use (default: all)")
    parser.add_argument(
        "--same_host",
        default="auto",
        choices=["auto", "tcp"],
        help="tcp: use no shortcut between processes of one host (default: %(default)s)",
    )
    parser.add_argument(
        "--streams_per_rail",
        type=int,
        metavar="N",
        help=f"connections per pair of NICs and peer (default: {LEAST_STREAMS}, more on long ways)",
    )
    parser.add_argument(
        "--peers",
        type=int,
        default=16,
        metavar="N",
        help="processes that one here has connections with (default: %(default)s)",
    )
    parser.add_argument(
        "--nbytes",
        type=float,
        metavar="N",
        help="bytes of the params of a replica (default: what the trainer has)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="processes of a replica, which share them (default: %(default)s)",
    )
    for name in _TLS:
        metavar = "NAME" if name == "server_name" else "FILE"
        parser.add_argument(f"--tls_{name}", metavar=metavar, help=f"{name} of tls=TLS(…)")
    parser.add_argument("--json", action="store_true", help="print a JSON array, not a table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Looks, prints what it found, and returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        findings = list(examine(arguments))
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    if arguments.json:
        print(to_json(findings))
    else:
        print_table(findings)
    return exit_status(findings)


if __name__ == "__main__":
    sys.exit(main())
