"""`bench peers`: other ways to get params to a sampler, beside ours, over loopback.

`jax.experimental.transfer`, Orbax (save and restore in /dev/shm, no compression) and a plain Python
socket into reused buffers, each between two processes and with the best settings that were found.
All take their turn in every round, under the system's congestion control, as not all of them can
choose one. Whole calls: from the word to go until both sides are done.
"""

import argparse
import contextlib

from tpu_sync_rl.bench import figures, models
from tpu_sync_rl.bench.cases import NUM_WARMUPS, Case, Layout, Settings
from tpu_sync_rl.bench.figures import Figure, Row
from tpu_sync_rl.bench.peer_programs import PEERS, PeerPrograms
from tpu_sync_rl.bench.programs import Programs

CASE = "peers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--model", choices=sorted(models.MODELS), default="list")
    parser.add_argument("--nbytes", type=int, help="scale the model to about this many bytes")
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=sorted(PEERS))
    figures.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        RuntimeError: a program failed, or a sampler has wrong bytes.
    """
    leaves = models.model(args.model, args.nbytes)
    one = Layout(fsdp=1, tp=1)
    case = Case(leaves=leaves, trainer=one, sampler=one)
    settings = Settings(cases={CASE: case}, options={"same_host": "tcp"})
    seconds: dict[str, list[float]] = {name: [] for name in args.peers}
    ours_s: list[float] = []
    with contextlib.ExitStack() as exits:
        programs = exits.enter_context(Programs(settings))
        peers = {name: exits.enter_context(PeerPrograms(name, leaves)) for name in args.peers}
        for version in range(1, NUM_WARMUPS + args.rounds + 1):
            ours_s.append(programs.sync(CASE, version).call_s)
            for name, peer in peers.items():
                seconds[name].append(peer.sync(version))
    ours = _figure("tpu_sync_rl", case.nbytes, ours_s)
    rows = [Row(ours, _figure(name, case.nbytes, samples)) for name, samples in seconds.items()]
    figures.print_table(
        f"{args.model}: {len(leaves):,} bf16 leaves, {case.nbytes / 1e9:.3f} GB; whole calls; "
        f"every byte of {args.rounds} versions of each verified",
        rows,
        beside="peer",
    )
    figures.write_json(args, rows, nbytes=case.nbytes)


def _figure(name: str, nbytes: int, seconds: list[float]) -> Figure:
    return Figure(name, [nbytes / s / 1e9 for s in seconds[NUM_WARMUPS:]])
