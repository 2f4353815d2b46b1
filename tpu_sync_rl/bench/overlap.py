"""`bench overlap`: what a sync in the background costs the training step beside it. Needs root.

Trainer and sampler are joined by one NIC of `--rate`, in network namespaces that are removed at
the end. In each round the trainer takes a step alone, publishes with `wait=None`, and takes the
next step while the sampler receives. A step that does not donate leaves the published params where
they are. For one that does, JAX first copies what is still pinned: beside it stand a step alone
and a copy of all params.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import tpu_sync_rl as tsr
from tpu_sync_rl.bench import cases, figures, models, netns
from tpu_sync_rl.bench.cases import NUM_WARMUPS
from tpu_sync_rl.bench.figures import Figure, Row, count
from tpu_sync_rl.bench.netns import CONTROL, Namespaces
from tpu_sync_rl.bench.processes import KEEP_MEMORY, Processes, answer, environment, words
from tpu_sync_rl.bench.programs import TIMEOUT_S

MODES = {"not donating": False, "donating": True}

_WIDTH = 1024  # of the square matrices that a step multiplies
_TRIED = 8  # products that tell how long one takes


class Round(NamedTuple):
    """Seconds of what the trainer did in a round."""

    step: float  # alone
    copy: float  # of all params
    publish: float
    beside: float  # a step during the sync
    is_beside: bool  # whether the sync took longer than that step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    models.add_arguments(parser, nbytes=300_000_000)
    parser.add_argument(
        "--rate", type=count, default=1000, metavar="MBIT", help="of the NIC (default: %(default)s)"
    )
    parser.add_argument(
        "--step",
        type=float,
        default=0.5,
        help="seconds that a step takes, about (default: %(default)s)",
    )
    cases.add_arguments(parser)
    figures.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        RuntimeError: a program failed, a sampler has wrong bytes, a sync was over before the step
            beside it, or there are no namespaces here.
    """
    leaves = models.model(args.model, args.nbytes)
    options = cases.options(args) | {"timeout": TIMEOUT_S, "token": "bench", "nics": ("rail0",)}
    rounds: dict[str, list[Round]] = {mode: [] for mode in MODES}
    with Namespaces([args.rate]) as namespaces, Processes() as processes:
        with environment(KEEP_MEMORY):
            trainer = processes.start(_trainer, namespaces.trainer, leaves, options, args.step)
        coordinator = answer(trainer, "connecting")
        sampler = processes.start(_sampler, namespaces.sampler, leaves, options, coordinator)
        version = 1
        for index in range(NUM_WARMUPS + args.rounds):
            for mode, donates in MODES.items():
                for pipe in (trainer, sampler):
                    pipe.send((version, donates))
                what = f"version {version}, {mode}"
                seconds = answer(trainer, what)
                models.refuse_wrong(answer(sampler, what), what)
                if not seconds.is_beside:
                    raise RuntimeError("a sync was over before the step beside it: raise --nbytes")
                if index >= NUM_WARMUPS:
                    rounds[mode].append(seconds)
                version += 2
    rows = _rows(rounds["not donating"], rounds["donating"])
    nbytes = models.model_nbytes(leaves)
    figures.print_table(
        f"{args.model}: {len(leaves):,} bf16 leaves, {nbytes / 1e9:.3f} GB, {args.rate} Mbit/s; "
        f"every byte of {args.rounds} versions each verified",
        rows,
        beside="beside",
    )
    figures.write_json(args, rows, nbytes=nbytes)


def _rows(keeping: list[Round], donating: list[Round]) -> list[Row]:
    publish_ms = [x.publish * 1e3 for x in (*keeping, *donating)]
    return [
        Row(Figure("trainer blocked by wait=None", publish_ms, "ms")),
        Row(
            Figure("step during a sync, not donating", [x.beside for x in keeping], "s"),
            Figure("alone", [x.step for x in keeping], "s"),
        ),
        Row(
            Figure("step during a sync, donating", [x.beside for x in donating], "s"),
            Figure("alone, and a copy", [x.step + x.copy for x in donating], "s"),
        ),
    ]


class _Training:
    """Steps that make the params of the next version, and multiply matrices for a while."""

    def __init__(self, like: Mapping[str, jax.ShapeDtypeStruct], step_s: float) -> None:
        self._like = like
        self._x = jnp.ones((_WIDTH, _WIDTH)) / _WIDTH
        self._count = _TRIED
        for _ in range(2):  # the first one compiles
            tried_s = _timed(self._multiply)
        self._count = max(1, round(step_s / tried_s * _TRIED))
        self.params = models.make_params(like, 0)

    def step(self, version: int, *, donates: bool) -> float:
        """Takes the step to `version`; returns its seconds."""
        return _timed(lambda: self._step(version, self.params if donates else None))

    def copy(self) -> float:
        """Copies all params; returns the seconds."""
        leaves = self.params.items()
        return _timed(lambda: jax.block_until_ready({key: jnp.copy(x) for key, x in leaves}))

    def _step(self, version: int, donated: dict[str, jax.Array] | None) -> None:
        self.params = models.make_params(self._like, version, donated)
        self._multiply()

    def _multiply(self) -> None:
        jax.block_until_ready(_products(self._x, self._count))


@jax.jit
def _products(x: jax.Array, count: int) -> jax.Array:
    product: jax.Array = jax.lax.fori_loop(0, count, lambda _, y: y @ x, x)
    return product


def _timed(call: Callable[[], object]) -> float:
    """Seconds that `call` takes."""
    began = time.monotonic()
    call()
    return time.monotonic() - began


def _trainer(
    pipe: Connection,
    namespace: str,
    leaves: models.Model,
    options: Mapping[str, Any],
    step_s: float,
) -> None:
    netns.enter(namespace)
    training = _Training(models.structs_on_one_device(leaves), step_s)
    coordinator = f"{CONTROL.trainer_host}:0"
    with tsr.connect_trainer(coordinator=coordinator, min_replicas=1, **options) as session:
        pipe.send(session.coordinator)
        for version, donates in words(pipe):
            step_s = training.step(version, donates=donates)
            copy_s = training.copy()
            began = time.monotonic()
            handle = session.sync_weights(training.params, version=version, wait=None)
            publish_s = time.monotonic() - began
            beside_s = training.step(version + 1, donates=donates)
            assert isinstance(handle, tsr.SyncHandle)
            is_beside = not handle.done()
            handle.result()
            pipe.send(Round(step_s, copy_s, publish_s, beside_s, is_beside))


def _sampler(
    pipe: Connection,
    namespace: str,
    leaves: models.Model,
    options: Mapping[str, Any],
    coordinator: str,
) -> None:
    netns.enter(namespace)
    like = models.structs_on_one_device(leaves)
    with tsr.connect_sampler(
        coordinator=coordinator, replica="sampler-0", like=like, **options
    ) as session:
        for version, _ in words(pipe):
            update = session.sync_weights()
            assert update is not None
            pipe.send(models.wrong_leaves(update.params, version))
