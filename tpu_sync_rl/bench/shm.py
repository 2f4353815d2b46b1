"""`bench shm`: from one process to another of the same host, through memory that both share.

Whole calls of sync_weights over the rail that sessions choose by themselves. Beside it stand
`process_vm_readv` (one or two threads, whichever is faster, and huge pages at both ends), which is
what the kernel copies at best, and Ray's object store where Ray is installed: arrays are put there,
and views of them are got, which share the store's memory.
"""

import argparse
import contextlib
from collections.abc import Callable
from itertools import count

from tpu_sync_rl.bench import cases, figures, models, peer_programs
from tpu_sync_rl.bench.cases import Case, Layout, Settings
from tpu_sync_rl.bench.figures import Figure, Row
from tpu_sync_rl.bench.peer_programs import PeerPrograms
from tpu_sync_rl.bench.programs import Programs, interleaved
from tpu_sync_rl.bench.readv_limit import ReadvLimit

CASE = "shm"
RAY = ("Ray, an array per leaf", "Ray, one array")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    models.add_arguments(parser)
    cases.add_arguments(parser)
    parser.set_defaults(same_host="auto")
    peer_programs.add_arguments(parser, RAY)
    figures.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        RuntimeError: a program failed, a sampler has wrong bytes, or memory can't be read here.
    """
    one = Layout(fsdp=1, tp=1)
    case = Case(leaves=models.model(args.model, args.nbytes), trainer=one, sampler=one)
    settings = Settings(cases={CASE: case}, options=cases.options(args))
    with contextlib.ExitStack() as exits:
        readv = exits.enter_context(ReadvLimit(case.nbytes))
        programs = exits.enter_context(Programs(settings))
        limits = {"process_vm_readv": readv.gbytes_per_s}
        for name in RAY:
            python = peer_programs.interpreter(args, name)
            if python is not None:
                ray = exits.enter_context(PeerPrograms(name, case.leaves, python))
                limits[name] = _sampled(ray, case.nbytes)
        syncs, samples = interleaved(programs, [CASE], args.rounds, limits)
    moved = syncs[CASE]
    call = Figure("whole call", [x.nbytes / x.call_s / 1e9 for x in moved])
    wire = Figure("bytes alone", [x.nbytes / x.stage_s("wire") / 1e9 for x in moved])
    beside = {name: Figure(name, values) for name, values in samples.items()}
    rows = [Row(call, limit) for limit in beside.values()]
    rows.append(Row(wire, beside["process_vm_readv"]))
    figures.print_table(
        f"{args.model}: {len(case.leaves):,} bf16 leaves, {case.nbytes / 1e9:.3f} GB over "
        f"{', '.join(moved[-1].rails)}; every byte of {args.rounds} versions verified; "
        f"threads of process_vm_readv: {readv.way}",
        rows,
        beside="limit or peer",
    )
    rails = sorted(moved[-1].rails)
    figures.write_json(args, rows, nbytes=case.nbytes, rails=rails, readv_threads=readv.way)


def _sampled(peer: PeerPrograms, nbytes: int) -> Callable[[], float]:
    """GB/s of one version after the other."""
    versions = count(1)
    return lambda: nbytes / peer.sync(next(versions)) / 1e9
