"""Command line of the benchmarks.

Ctrl-C and SIGTERM end any of them at once, with its programs and whatever it has built.
"""

import argparse
import signal
import sys
from types import FrameType
from typing import NoReturn

from tpu_sync_rl import _native
from tpu_sync_rl.bench import (
    leaves,
    local,
    memory,
    overlap,
    peers,
    plan,
    rails,
    replay,
    reshard,
    shm,
    tiles,
    wire,
)
from tpu_sync_rl.errors import SyncError

COMMANDS = {
    "wire": wire,
    "reshard": reshard,
    "leaves": leaves,
    "shm": shm,
    "local": local,
    "tiles": tiles,
    "rails": rails,
    "overlap": overlap,
    "plan": plan,
    "replay": replay,
    "memory": memory,
    "peers": peers,
}


def main() -> None:
    """Runs the command that the command line names."""
    signal.signal(signal.SIGTERM, _end)
    parser = argparse.ArgumentParser(prog="python -m tpu_sync_rl.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0].partition(": ")[2]
        module.add_arguments(commands.add_parser(name, help=summary, description=module.__doc__))
    args = parser.parse_args()
    try:
        _native.cpu_level()  # refuses what TSR_CPU may not be, before anything is measured
        COMMANDS[args.command].run(args)
    except (ValueError, RuntimeError, SyncError) as error:
        sys.exit(f"{parser.prog} {args.command}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Ends as an exception does, so that all is left as it was found."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
