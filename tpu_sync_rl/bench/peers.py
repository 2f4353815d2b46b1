"""`bench peers`: other ways to get params to a sampler, beside ours, over loopback.

`jax.experimental.transfer`, Orbax (save and restore in /dev/shm, no compression) and a plain Python
socket into reused buffers; where they are installed, NIXL and Mooncake, one flat buffer each, and
TPU Sync, which is made for TPUs and gets arrays on CPUs here. Every peer has processes of its own
and the best settings that were found, and takes its turn in every round. Whole calls: from the word
to go until all sides are done.

All of them, ours as well, use the system's TCP congestion control, as not every peer can choose.
`--congestion` (root) runs them in a network namespace where another is in use.
"""

import argparse
import contextlib
from pathlib import Path

from tpu_sync_rl.bench import figures, models, netns, peer_programs
from tpu_sync_rl.bench.cases import NUM_WARMUPS, Case, Layout, Settings
from tpu_sync_rl.bench.figures import Figure, Row
from tpu_sync_rl.bench.peer_programs import TRANSPORTS, PeerPrograms
from tpu_sync_rl.bench.programs import Programs

CASE = "peers"
LIBRARIES = ("NIXL", "Mooncake", "TPU Sync")
PEERS = (*TRANSPORTS, *LIBRARIES)
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    models.add_arguments(parser)
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="default: all that can run here")
    parser.add_argument("--congestion", help="TCP congestion control of all; needs root")
    peer_programs.add_arguments(parser, LIBRARIES)
    figures.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        ValueError: a peer that was asked for is not installed.
        RuntimeError: a program failed, a sampler has wrong bytes, or there are no namespaces here.
    """
    pythons = _interpreters(args)
    congestion = args.congestion or _CONGESTION.read_text().strip()
    if args.congestion is not None:
        netns.isolate(congestion)
    leaves = models.model(args.model, args.nbytes)
    one = Layout(fsdp=1, tp=1)
    case = Case(leaves=leaves, trainer=one, sampler=one)
    settings = Settings(cases={CASE: case}, options={"same_host": "tcp", "congestion": congestion})
    seconds: dict[str, list[float]] = {name: [] for name in pythons}
    ours_s: list[float] = []
    with contextlib.ExitStack() as exits:
        programs = exits.enter_context(Programs(settings))
        peers = {
            name: exits.enter_context(PeerPrograms(name, leaves, python))
            for name, python in pythons.items()
        }
        for version in range(1, NUM_WARMUPS + args.rounds + 1):
            ours_s.append(programs.sync(CASE, version).call_s)
            for name, peer in peers.items():
                seconds[name].append(peer.sync(version))
    ours = _figure("tpu_sync_rl", case.nbytes, ours_s)
    rows = [Row(ours, _figure(name, case.nbytes, samples)) for name, samples in seconds.items()]
    figures.print_table(
        f"{args.model}: {len(leaves):,} bf16 leaves, {case.nbytes / 1e9:.3f} GB; whole calls under "
        f"{congestion}; every byte of {args.rounds} versions of each verified",
        rows,
        beside="peer",
    )
    figures.write_json(args, rows, nbytes=case.nbytes, congestion=congestion)


def _interpreters(args: argparse.Namespace) -> dict[str, str]:
    """The peers that run, and what runs them."""
    found = {name: peer_programs.interpreter(args, name) for name in args.peers or PEERS}
    for name in args.peers or ():
        if found[name] is None:
            option = f"--{peer_programs.LIBRARIES[name].module}_python"
            raise ValueError(f"{name} is not installed here; {option} names an interpreter with it")
    return {name: python for name, python in found.items() if python is not None}


def _figure(name: str, nbytes: int, seconds: list[float]) -> Figure:
    return Figure(name, [nbytes / s / 1e9 for s in seconds[NUM_WARMUPS:]])
