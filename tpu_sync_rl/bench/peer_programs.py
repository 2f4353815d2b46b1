"""A trainer and a sampler process per peer: what gets params across without us."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import jax

from tpu_sync_rl.bench import models, peer_transports
from tpu_sync_rl.bench.peer_transports import Transport

PEERS: Mapping[str, Transport] = {
    "jax.experimental.transfer": peer_transports.TRANSFER,
    "Orbax": peer_transports.ORBAX,
    "plain socket": peer_transports.SOCKET,
}


class PeerPrograms:
    """Both processes of the peer `name`, running. They end when it is closed."""

    def __init__(self, name: str, leaves: models.Model) -> None:
        transport = PEERS[name]
        self._name = name
        self._in_turn = transport.in_turn
        self._exits = contextlib.ExitStack()
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        info: Any = None
        with _environment(transport.environment):
            for role in (_trainer, _sampler):
                pipe, theirs = spawn.Pipe()
                process = spawn.Process(target=role, args=(theirs, name, leaves, info), daemon=True)
                process.start()
                theirs.close()
                self._exits.callback(process.join)
                self._exits.callback(pipe.close)
                self._pipes.append(pipe)
                info = self._answer(pipe)
        self._exits.callback(transport.clean, info)

    def sync(self, version: int) -> float:
        """Makes, moves and checks `version`; seconds from the word to go until both are done.

        Raises:
            RuntimeError: bytes differ on the sampler, or a process failed.
        """
        trainer, sampler = self._pipes
        trainer.send(("make", version))
        self._answer(trainer)
        sampler.send(("drop", version))
        self._answer(sampler)
        began = time.monotonic()
        ended = []
        if self._in_turn:
            for pipe in self._pipes:
                pipe.send(("move", version))
                ended.append(self._answer(pipe))
        else:
            for pipe in self._pipes:
                pipe.send(("move", version))
            ended = [self._answer(pipe) for pipe in self._pipes]
        sampler.send(("check", version))
        wrong = self._answer(sampler)
        if wrong:
            raise RuntimeError(f"{self._name}: version {version} is wrong in {wrong}")
        return float(max(ended) - began)

    def __enter__(self) -> "PeerPrograms":
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _answer(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except EOFError:  # its traceback stands above, on the terminal
            raise RuntimeError(f"a process of {self._name} failed") from None


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


def _words(pipe: Connection) -> Iterator[tuple[str, int]]:
    with contextlib.suppress(EOFError):
        while True:
            yield pipe.recv()


def _trainer(pipe: Connection, name: str, leaves: models.Model, _: Any) -> None:
    like = _start_jax(leaves)
    params = models.make_params(like, 0)
    trainer = PEERS[name].trainer()
    pipe.send(trainer.info)
    for word, version in _words(pipe):
        if word == "make":
            params = models.make_params(like, version, params)
            pipe.send(None)
        else:
            trainer.send(version, params)
            pipe.send(time.monotonic())


def _sampler(pipe: Connection, name: str, leaves: models.Model, info: Any) -> None:
    sampler = PEERS[name].sampler(info, _start_jax(leaves))
    pipe.send(info)
    for word, version in _words(pipe):
        if word == "drop":
            sampler.drop()
            pipe.send(None)
        elif word == "move":
            sampler.receive(version)
            pipe.send(time.monotonic())
        else:
            pipe.send(models.wrong_leaves(sampler.params(), version))


def _start_jax(leaves: models.Model) -> dict[str, jax.ShapeDtypeStruct]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever drives the programs
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.make_mesh((1, 1), models.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return models.structs(leaves, mesh)
