"""The processes of a peer: what gets params across without us."""

import argparse
import importlib.util
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tpu_sync_rl.bench import models, peer_transports
from tpu_sync_rl.bench.peer_transports import Transport
from tpu_sync_rl.bench.processes import KEEP_MEMORY, Processes, answer, environment, words

_SCRIPT = Path(__file__).with_name("peer_buffers.py")
# Idle without that, and slow once it has stood still (1.8 against 6.1 GB/s, two cores).
_NEVER_PAUSED = {"NIXL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A peer that runs by the interpreter that has its library.

    Attributes:
        module: name of the library.
        roles: processes, in the order in which they start.
        environment: of all of them.
        in_turn: the sampler begins when the trainer has done its part.
        clean: removes what it left behind, by what the first process said.
    """

    module: str
    roles: Sequence[str] = ("sampler", "trainer")
    environment: Mapping[str, str] = field(default_factory=dict)
    clean: Callable[[Any], None] = lambda info: None
    in_turn: bool = False


TRANSPORTS: Mapping[str, Transport] = {
    "jax.experimental.transfer": peer_transports.TRANSFER,
    "Orbax": peer_transports.ORBAX,
    "plain socket": peer_transports.SOCKET,
}
LIBRARIES: Mapping[str, Library] = {
    "NIXL": Library(module="nixl", environment={"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}),
    "Mooncake": Library(
        module="mooncake",
        environment={"MC_TCP_SLICE_SIZE": str(1 << 20), "MC_TCP_LANES_PER_PEER": "4"},
    ),
    "TPU Sync": Library(
        module="tpu_sync",
        roles=("trainer", "sampler"),
        environment={"JAX_PLATFORMS": "cpu", **KEEP_MEMORY},
        in_turn=True,
    ),
    **{
        name: Library(
            module="ray",
            roles=(role,),
            environment={"RAY_USAGE_STATS_ENABLED": "0"},
            clean=lambda folder: shutil.rmtree(folder, ignore_errors=True),
        )
        for name, role in (("Ray, an array per leaf", "leaves"), ("Ray, one array", "whole"))
    },
}


def add_arguments(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """The interpreters of the libraries `names`, each of which may need one of its own."""
    for module in dict.fromkeys(LIBRARIES[name].module for name in names):
        parser.add_argument(
            f"--{module}_python",
            metavar="PATH",
            help=f"interpreter that has the library {module!r}; default: this one, if it has",
        )


def interpreter(args: argparse.Namespace, name: str) -> str | None:
    """What runs the peer `name`: None where that is not installed."""
    module = LIBRARIES[name].module if name in LIBRARIES else "jax"
    given: str | None = getattr(args, f"{module}_python", None)
    return given or (sys.executable if importlib.util.find_spec(module) else None)


class PeerPrograms(Processes):
    """The processes of the peer `name`, running. They end when it is closed.

    Args:
        name: of the peer.
        leaves: what it moves; a library moves as many bytes of its own.
        python: the interpreter of a library.
    """

    def __init__(self, name: str, leaves: models.Model, python: str) -> None:
        super().__init__()
        self._name = name
        self._peer = TRANSPORTS.get(name) or LIBRARIES[name]
        self._info: Any = None
        self._ends: list[Connection] = []
        try:
            with environment(self._peer.environment):
                for pipe in self._started(leaves, python):
                    self._join(pipe)
                self._rest()
        except BaseException:
            self.kill()
            raise

    def sync(self, version: int) -> float:
        """Makes, moves and checks `version`; seconds from the word to go until all are done.

        Peers stand still between their turns: some look for work without a pause.

        Raises:
            RuntimeError: bytes differ on the sampler, or a process failed.
        """
        self.resume()
        self._ask("make", version)
        began = time.monotonic()
        ended = max(self._ask("move", version, in_turn=self._peer.in_turn))
        wrong = [key for keys in self._ask("check", version) for key in keys or ()]
        models.refuse_wrong(wrong, f"version {version} of {self._name}")
        self._rest()
        return float(ended - began)

    def close(self) -> None:
        """Ends them, and removes what they left behind."""
        super().close()
        if self._info is not None:
            self._peer.clean(self._info)

    def __enter__(self) -> "PeerPrograms":
        return self

    def _started(self, leaves: models.Model, python: str) -> Iterator[Connection]:
        if self._name in TRANSPORTS:
            yield self.start(_trainer, self._name, leaves)
            yield self.start(_sampler, self._name, leaves)
            return
        library = LIBRARIES[self._name]
        shapes = ["x".join(map(str, shape)) for shape, _ in leaves.values()]
        for role in library.roles:
            yield self.start_script(python, _SCRIPT, library.module, role, *shapes)

    def _rest(self) -> None:
        if self._name not in _NEVER_PAUSED:
            self.pause()

    def _join(self, pipe: Connection) -> None:
        """Waits until a process has begun. The second is told what the first says of itself."""
        if self._ends:
            pipe.send(self._info)
            answer(pipe, self._name)
        else:
            self._info = answer(pipe, self._name)
        self._ends.append(pipe)

    def _ask(self, word: str, version: int, *, in_turn: bool = False) -> list[Any]:
        what = f"{word!r} of {self._name}, {version}"
        answers = []
        for pipe in self._ends:
            pipe.send((word, version))
            if in_turn:
                answers.append(answer(pipe, what))
        return answers or [answer(pipe, what) for pipe in self._ends]


def _trainer(pipe: Connection, name: str, leaves: models.Model) -> None:
    like = models.structs_on_one_device(leaves)
    params = models.make_params(like, 0)
    trainer = TRANSPORTS[name].trainer()
    pipe.send(trainer.info)
    for word, version in words(pipe):
        if word == "make":
            params = models.make_params(like, version, params)
        elif word == "move":
            trainer.send(version, params)
        pipe.send(time.monotonic() if word == "move" else None)


def _sampler(pipe: Connection, name: str, leaves: models.Model) -> None:
    like = models.structs_on_one_device(leaves)
    sampler = TRANSPORTS[name].sampler(pipe.recv(), like)
    pipe.send(None)
    for word, version in words(pipe):
        if word == "make":
            sampler.drop()
            pipe.send(None)
        elif word == "move":
            sampler.receive(version)
            pipe.send(time.monotonic())
        else:
            pipe.send(models.wrong_leaves(sampler.params(), version))
