"""A trainer that publishes until it is ended: `python -m chaos.trainer OPTIONS`."""

import random
import time
from functools import partial
from typing import NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tpu_sync_rl as tsr

from . import weights
from .child import Child, run

_WAITS = ("received", "received", "committed", None)
_MOST_PAUSE_S = 0.4
_IN_USE_S = 5.0


def main(child: Child) -> NoReturn:
    options = child.options
    rng = random.Random(options["seed"])  # equal in all processes of the program
    session = _connect(child)
    child.tell("connected", incarnation=session.incarnation)
    grid = Mesh(np.array(jax.devices()).reshape(options["mesh"]), weights.AXES)
    shardings = {
        key: NamedSharding(grid, PartitionSpec(*leaf.trainer))
        for key, leaf in weights.LEAVES.items()
    }
    # Writes a version into the memory of the one before, as a train step that donates does.
    step = jax.jit(
        lambda old, new: new, donate_argnums=0, keep_unused=True, out_shardings=shardings
    )
    params = _params(options["seed"], session.incarnation, 0, shardings)
    version = announced = 0
    try:
        while not child.closing.is_set():
            version += rng.randint(1, 3)
            params = step(params, _params(options["seed"], session.incarnation, version, shardings))
            if _publish(child, session, params, version, rng):
                announced = version
            time.sleep(rng.random() * _MOST_PAUSE_S)
            if child.quiet.is_set():
                _wait(child, session, announced)
        timeout_s = rng.uniform(0.5, 3)
        child.timed("close", timeout_s, lambda: session.close(timeout_s))
        child.end("closed")
    except tsr.VersionError:
        child.end("fenced")
    except tsr.PeerLostError:
        child.end("ended")


def _wait(child: Child, session: tsr.TrainerSession, version: int) -> None:
    """Publishes nothing for a while; the params of the last version stay alive."""
    child.tell("quiet", incarnation=session.incarnation, version=version)
    while child.quiet.is_set() and not child.closing.is_set():
        time.sleep(0.02)


def _connect(child: Child) -> tsr.TrainerSession:
    connect = partial(tsr.connect_trainer, timeout=10, **child.options["connect"])
    give_up = time.monotonic() + _IN_USE_S
    while True:
        try:
            return child.timed("connect", 10, connect)
        except (tsr.SyncTimeoutError, tsr.PeerLostError):
            if jax.process_count() > 1:
                child.end("ended")  # the others may be in
        except tsr.SyncError as error:
            # Of a trainer that was killed, the coordinator frees the port within a second.
            if "in use" not in str(error) or time.monotonic() > give_up:
                raise
            child.tell("in_use")
            time.sleep(0.05)


def _params(
    seed: int, incarnation: str, version: int, shardings: dict[str, NamedSharding]
) -> dict[str, jax.Array]:
    params = {}
    for key, sharding in shardings.items():
        data = weights.value(seed, incarnation, version, key)
        params[key] = jax.make_array_from_callback(data.shape, sharding, data.__getitem__)
    return params


def _publish(
    child: Child,
    session: tsr.TrainerSession,
    params: dict[str, jax.Array],
    version: int,
    rng: random.Random,
) -> bool:
    """Publishes one version; whether that is certain."""
    wait, timeout_s = rng.choice(_WAITS), rng.uniform(0.3, 4)
    child.tell("publish", incarnation=session.incarnation, version=version)
    try:
        done = child.timed(
            "publish",
            timeout_s,
            lambda: session.sync_weights(params, version=version, wait=wait, timeout=timeout_s),
        )
        if isinstance(done, tsr.SyncHandle):
            left_s = rng.uniform(0.1, 2)
            done = child.timed("result", left_s, lambda: done.result(left_s))
    except tsr.SyncTimeoutError:
        return False
    child.tell(
        "published",
        version=done.version,
        asked=version,
        wait=wait,
        replicas=dict(done.replicas),
        lost=list(done.lost),
        refused=dict(done.refused),
    )
    return True


if __name__ == "__main__":
    run(main)
