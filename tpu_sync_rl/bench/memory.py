"""`bench memory`: what the library adds to the memory of a trainer and of a sampler, at its peak.

A trainer whose step does not donate, and a sampler, run the same versions with the library and
without it: then the sampler makes its params itself, in place. The peaks are those of the processes
(VmHWM). With the library a sampler has one generation more, into which the next version comes.
"""

import argparse
import contextlib
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import jax

import tpu_sync_rl as tsr
from tpu_sync_rl.bench import cases, figures, models
from tpu_sync_rl.bench.figures import Figure, Row, count
from tpu_sync_rl.bench.processes import FREE_MEMORY, Processes, answer, environment, peak_mib, words
from tpu_sync_rl.bench.programs import TIMEOUT_S

Options = Mapping[str, Any]  # of both sessions

_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    models.add_arguments(parser)
    parser.add_argument(
        "--versions", type=count, default=5, help="that each round syncs (default: %(default)s)"
    )
    cases.add_arguments(parser)
    figures.add_arguments(parser)
    parser.set_defaults(rounds=3)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        RuntimeError: a program failed, or a sampler has wrong bytes.
    """
    leaves = models.model(args.model, args.nbytes)
    options = cases.options(args) | {"timeout": TIMEOUT_S}
    without, with_us = [], []
    for _ in range(args.rounds):
        without.append(_peaks_mib(leaves, args.versions, None))
        with_us.append(_peaks_mib(leaves, args.versions, options))
    generation_mib = models.model_nbytes(leaves) / _MIB
    rows = []
    for index, role in enumerate(("trainer", "sampler")):
        ours, alone = ([peaks[index] for peaks in runs] for runs in (with_us, without))
        rows.append(Row(Figure(role, ours, "MiB"), Figure("without us", alone, "MiB")))
        more = Figure(f"{role}, more", [a - b for a, b in zip(ours, alone, strict=True)], "MiB")
        generation = Figure("one generation", [generation_mib] * args.rounds, "MiB")
        rows.append(Row(more, generation))
    figures.print_table(
        f"{args.model}: {len(leaves):,} bf16 leaves, {generation_mib:,.0f} MiB; peaks; every byte "
        f"of {args.versions} versions a round verified",
        rows,
        beside="beside",
    )
    figures.write_json(args, rows)


def _peaks_mib(
    leaves: models.Model, num_versions: int, options: Options | None
) -> tuple[float, float]:
    """Peaks of trainer and sampler; without the library where it gets no options."""
    with Processes() as processes, environment(FREE_MEMORY):
        trainer = processes.start(_trainer, leaves, options)
        coordinator = answer(trainer, "connecting")
        sampler = processes.start(_sampler, leaves, options, coordinator)
        for version in range(1, num_versions + 1):
            for pipe in (trainer, sampler):
                pipe.send(version)
            what = f"version {version}"
            answer(trainer, what)
            models.refuse_wrong(answer(sampler, what), what)
        trainer_mib, sampler_mib = map(peak_mib, processes.pids)
        return trainer_mib, sampler_mib


def _trainer(pipe: Connection, leaves: models.Model, options: Options | None) -> None:
    like = models.structs_on_one_device(leaves)
    params = models.make_params(like, 0)
    with contextlib.ExitStack() as exits:
        session = None
        if options is not None:
            session = exits.enter_context(tsr.connect_trainer(min_replicas=1, **options))
        pipe.send(session and session.coordinator)
        for version in words(pipe):
            params = models.make_params(like, version)  # beside the ones before
            if session is not None:
                session.sync_weights(params, version=version)
            pipe.send(None)


def _sampler(
    pipe: Connection, leaves: models.Model, options: Options | None, coordinator: str
) -> None:
    like = models.structs_on_one_device(leaves)
    with contextlib.ExitStack() as exits:
        session = None
        if options is not None:
            session = exits.enter_context(
                tsr.connect_sampler(
                    coordinator=coordinator, replica="sampler-0", like=like, **options
                )
            )
        params: dict[str, jax.Array] | None = None
        for version in words(pipe):
            if session is None:
                params = models.make_params(like, version, params)
            else:
                params = next(session).params
            pipe.send(models.wrong_leaves(params, version))
