"""A process of a replica that takes versions: `python -m chaos.sampler OPTIONS`."""

import random
import time
from collections import deque
from functools import partial
from typing import NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tpu_sync_rl as tsr

from . import weights
from .child import Child, run

_CONNECT_S = 8.0
_MOST_PAUSE_S = 0.3
_NUM_HELD = 2  # updates that the application keeps
# Calls in a row that got no answer, after which a process takes it that the others of its program
# have gone on without it: they heard that the job has ended, and it did not.
_NUM_UNDECIDED = 2


def main(child: Child) -> NoReturn:
    options = child.options
    grid = Mesh(np.array(jax.devices()).reshape(options["mesh"]), weights.AXES)
    like = {
        key: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(grid, PartitionSpec(*leaf.sampler))
        )
        for key, leaf in reversed(weights.LEAVES.items())
    }
    rng = random.Random(f"{options['seed']} {jax.process_index()}")
    num_sessions = 0
    while True:
        connect = partial(
            tsr.connect_sampler,
            like=like,
            timeout=_CONNECT_S,
            max_generations=4,
            **options["connect"],
        )
        try:
            session = child.timed("connect", _CONNECT_S, connect)
        except (tsr.SyncTimeoutError, tsr.PeerLostError):
            if jax.process_count() > 1:
                child.end("ended")  # the others may be in
            continue
        num_sessions += 1
        child.tell("connected", session=num_sessions)
        try:
            with session:
                _take(child, session, num_sessions, like, rng)
            child.end("ended")
        except tsr.JobEndedError:
            child.tell("job_ended")
        except tsr.VersionError:
            child.end("fenced")


def _take(
    child: Child,
    session: tsr.SamplerSession,
    number: int,
    like: dict[str, jax.ShapeDtypeStruct],
    rng: random.Random,
) -> None:
    """Takes versions until the session ends, which raises, or this process is out of step."""
    num_undecided = 0
    held: deque[tuple[tsr.Update, weights.Digests]] = deque(maxlen=_NUM_HELD)
    while True:
        timeout_s, wait = rng.uniform(0.3, 3), rng.random() < 0.85
        update = None
        try:
            sync = partial(session.sync_weights, timeout=timeout_s, wait=wait)
            update = child.timed("sync", timeout_s, sync)
            num_undecided = 0
        except (tsr.SyncTimeoutError, tsr.PeerLostError) as error:
            num_undecided = num_undecided + 1 if "no answer from" in str(error) else 0
            if num_undecided == _NUM_UNDECIDED and jax.process_count() > 1:
                return
            if (session.current is None) != (not held) or (held and session.current != held[-1][0]):
                child.tell("wrong", text="a call that raised changed what is current")
        for older, digests in held:
            if _digests(older.params, like) != digests:
                child.tell("wrong", text=f"version {older.version} changed while it was held")
        if update is not None:
            digests = _digests(update.params, like)
            former = (held[-1][0].epoch, held[-1][0].version) if held else (0, 0)
            if former >= (update.epoch, update.version):
                child.tell("wrong", text=f"{(update.epoch, update.version)} came after {former}")
            held.append((update, digests))
            child.tell(
                "update",
                session=number,
                incarnation=update.incarnation,
                version=update.version,
                digests=digests,
            )
        time.sleep(rng.random() * _MOST_PAUSE_S)


def _digests(
    params: dict[str, jax.Array], like: dict[str, jax.ShapeDtypeStruct]
) -> weights.Digests:
    """Digests of every box of this process; raises where a leaf is not as `like` says."""
    assert params.keys() == like.keys()
    found: weights.Digests = {}
    for key, array in params.items():
        wanted = like[key]
        assert array.sharding == wanted.sharding and array.dtype == wanted.dtype, key
        assert array.shape == wanted.shape and array.committed, key
        boxes = found[key] = {}
        for shard in array.addressable_shards:
            name = weights.encode_box(weights.box_of(shard.index, wanted.shape))
            seen = weights.digest(np.asarray(shard.data))
            assert boxes.setdefault(name, seen) == seen, f"{key}: copies differ"
    return found


if __name__ == "__main__":
    run(main)
