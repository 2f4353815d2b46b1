"""Command line of the benchmarks."""

import argparse
import sys

from tpu_sync_rl.bench import leaves, local, peers, plan, rails, reshard, wire

COMMANDS = {
    "wire": wire,
    "reshard": reshard,
    "leaves": leaves,
    "plan": plan,
    "rails": rails,
    "local": local,
    "peers": peers,
}


def main() -> None:
    """Runs the command that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tpu_sync_rl.bench")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0].partition(": ")[2]
        module.add_arguments(commands.add_parser(name, help=summary, description=module.__doc__))
    args = parser.parse_args()
    try:
        COMMANDS[args.command].run(args)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"{parser.prog} {args.command}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
