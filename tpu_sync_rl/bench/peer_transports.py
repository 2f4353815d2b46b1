"""How peers move params, each as its users would write it, with the best settings found."""

import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from tpu_sync_rl.bench.processes import KEEP_MEMORY

Like = Mapping[str, jax.ShapeDtypeStruct]
Params = dict[str, jax.Array]


class Trainer(Protocol):
    """Gives params away."""

    info: Any  # what the sampler has to know of it

    def send(self, version: int, params: Params) -> None:
        """Returns when it has done its part."""


class Sampler(Protocol):
    """Takes params."""

    def drop(self) -> None:
        """Lets go of the version before, where the next does not go over it. Not timed."""

    def receive(self, version: int) -> None:
        """Returns when all of `version` is in memory."""

    def params(self) -> Params:
        """What was received last, as arrays. Not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """A peer.

    Attributes:
        trainer: makes its trainer's side.
        sampler: makes its sampler's side, from the trainer's info.
        in_turn: the sampler begins when the trainer has done its part.
        environment: of both processes.
        clean: removes what it left behind, by the trainer's info.
    """

    trainer: Callable[[], Trainer]
    sampler: Callable[[Any, Like], Sampler]
    in_turn: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    clean: Callable[[Any], None] = lambda info: None


# --- jax.experimental.transfer


class _TransferTrainer:
    def __init__(self) -> None:
        self._server = _transfer_server()
        self.info = self._server.address()

    def send(self, version: int, params: Params) -> None:
        self._server.await_pull(version, list(params.values()))


class _TransferSampler:
    def __init__(self, info: Any, like: Like) -> None:
        self._like = like
        self._server = _transfer_server()
        self._connection = self._server.connect(info)
        self._pulled: list[jax.Array] = []

    def drop(self) -> None:
        self._pulled = []

    def receive(self, version: int) -> None:
        pulled = self._connection.pull(version, list(self._like.values()))
        self._pulled = jax.block_until_ready(pulled)

    def params(self) -> Params:
        return dict(zip(self._like, self._pulled, strict=True))


def _transfer_server() -> Any:
    from jax.experimental import transfer

    addresses = ["127.0.0.1:0"] * 4
    client = jax.devices()[0].client
    return transfer.start_transfer_server(client, "127.0.0.1:0", addresses, transfer_size=16 << 20)


# --- Orbax


class _OrbaxTrainer:
    def __init__(self) -> None:
        self.info = tempfile.mkdtemp(prefix="tsr-bench-", dir="/dev/shm")
        self._checkpointer = _checkpointer()

    def send(self, version: int, params: Params) -> None:
        import orbax.checkpoint as ocp

        self._checkpointer.save(Path(self.info, str(version)), args=ocp.args.PyTreeSave(params))


class _OrbaxSampler:
    def __init__(self, info: Any, like: Like) -> None:
        self._folder = Path(info)
        self._like = dict(like)
        self._checkpointer = _checkpointer()
        self._restored: Params = {}

    def drop(self) -> None:
        self._restored = {}
        for path in self._folder.iterdir():
            shutil.rmtree(path)

    def receive(self, version: int) -> None:
        import orbax.checkpoint as ocp

        how = ocp.checkpoint_utils.construct_restore_args(self._like)
        args = ocp.args.PyTreeRestore(item=self._like, restore_args=how)
        restored = self._checkpointer.restore(self._folder / str(version), args=args)
        self._restored = jax.block_until_ready(restored)

    def params(self) -> Params:
        return self._restored


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


# --- a plain socket


class _SocketTrainer:
    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.info = self._listener.getsockname()
        self._connection: socket.socket | None = None

    def send(self, version: int, params: Params) -> None:
        if self._connection is None:
            self._connection, _ = self._listener.accept()
        for leaf in params.values():
            self._connection.sendall(np.asarray(leaf).view(np.uint8).reshape(-1).data)


class _SocketSampler:
    def __init__(self, info: Any, like: Like) -> None:
        self._connection = socket.create_connection(info)
        self._like = like
        self._buffers = {key: np.ones(leaf.shape, leaf.dtype) for key, leaf in like.items()}

    def drop(self) -> None:
        """Nothing: the next version goes into the same memory."""

    def receive(self, version: int) -> None:
        for buffer in self._buffers.values():
            left = buffer.view(np.uint8).reshape(-1).data
            while left:
                left = left[self._connection.recv_into(left) :]

    def params(self) -> Params:
        return {
            key: jax.device_put(x, self._like[key].sharding) for key, x in self._buffers.items()
        }


TRANSFER = Transport(trainer=_TransferTrainer, sampler=_TransferSampler, environment=KEEP_MEMORY)
ORBAX = Transport(
    trainer=_OrbaxTrainer,
    sampler=_OrbaxSampler,
    in_turn=True,
    clean=lambda folder: shutil.rmtree(folder, ignore_errors=True),
)
SOCKET = Transport(trainer=_SocketTrainer, sampler=_SocketSampler)
