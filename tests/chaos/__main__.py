"""Runs chaos by hand: `python -m tests.chaos --faults 1000 --seed 1`."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `programs`, as pytest has it

from .place import PLACES
from .run import Run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--place", choices=PLACES, nargs="*", default=["shm"])
    parser.add_argument("--per_run", type=int, default=50, help="faults until a new job begins")
    args = parser.parse_args()
    num_violations = 0
    for number in range(-(-args.faults // args.per_run)):
        num_faults = min(args.per_run, args.faults - number * args.per_run)
        place = args.place[number % len(args.place)]
        run = Run(args.seed + number, num_faults, place, lambda text: print(text, flush=True))
        num_violations += len(run.go().violations)
    print(f"chaos: {args.faults} faults, {num_violations} violations")
    return min(num_violations, 1)


if __name__ == "__main__":
    sys.exit(main())
