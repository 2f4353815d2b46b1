"""A trainer and a sampler process per peer: what gets params across without us."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import jax

from tpu_sync_rl.bench import models, peer_transports
from tpu_sync_rl.bench.peer_transports import Transport
from tpu_sync_rl.bench.processes import Processes, answer, words

PEERS: Mapping[str, Transport] = {
    "jax.experimental.transfer": peer_transports.TRANSFER,
    "Orbax": peer_transports.ORBAX,
    "plain socket": peer_transports.SOCKET,
}


class PeerPrograms(Processes):
    """Both processes of the peer `name`, running. They end when it is closed."""

    def __init__(self, name: str, leaves: models.Model) -> None:
        super().__init__()
        self._name = name
        self._transport = PEERS[name]
        self._info: Any = None
        try:
            with _environment(self._transport.environment):
                self._trainer = self.start(_trainer, name, leaves)
                self._info = answer(self._trainer, name)
                self._sampler = self.start(_sampler, name, leaves, self._info)
                answer(self._sampler, name)
        except BaseException:
            self.kill()
            raise

    def sync(self, version: int) -> float:
        """Makes, moves and checks `version`; seconds from the word to go until both are done.

        Raises:
            RuntimeError: bytes differ on the sampler, or a process failed.
        """
        self._ask(self._trainer, "make", version)
        self._ask(self._sampler, "drop", version)
        began = time.monotonic()
        if self._transport.in_turn:
            self._ask(self._trainer, "move", version)
            ended = self._ask(self._sampler, "move", version)
        else:
            self._trainer.send(("move", version))
            ended = self._ask(self._sampler, "move", version)
            ended = max(ended, answer(self._trainer, self._name))
        wrong = self._ask(self._sampler, "check", version)
        if wrong:
            raise RuntimeError(f"{self._name}: version {version} is wrong in {wrong}")
        return float(ended - began)

    def close(self) -> None:
        """Ends both, and removes what they left behind."""
        super().close()
        if self._info is not None:
            self._transport.clean(self._info)

    def __enter__(self) -> "PeerPrograms":
        return self

    def _ask(self, pipe: Connection, word: str, version: int) -> Any:
        pipe.send((word, version))
        return answer(pipe, f"{word!r} of {self._name}, {version}")


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Lets processes that start meanwhile have `variables`; malloc reads its own at the start."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def _trainer(pipe: Connection, name: str, leaves: models.Model) -> None:
    like = _start_jax(leaves)
    params = models.make_params(like, 0)
    trainer = PEERS[name].trainer()
    pipe.send(trainer.info)
    for word, version in words(pipe):
        if word == "make":
            params = models.make_params(like, version, params)
            pipe.send(None)
        else:
            trainer.send(version, params)
            pipe.send(time.monotonic())


def _sampler(pipe: Connection, name: str, leaves: models.Model, info: Any) -> None:
    sampler = PEERS[name].sampler(info, _start_jax(leaves))
    pipe.send(info)
    for word, version in words(pipe):
        if word == "drop":
            sampler.drop()
            pipe.send(None)
        elif word == "move":
            sampler.receive(version)
            pipe.send(time.monotonic())
        else:
            pipe.send(models.wrong_leaves(sampler.params(), version))


def _start_jax(leaves: models.Model) -> dict[str, jax.ShapeDtypeStruct]:
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.make_mesh((1, 1), models.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return models.structs(leaves, mesh)
