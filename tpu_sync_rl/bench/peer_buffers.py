"""A process of a peer that has a library: `python peer_buffers.py FD PEER ROLE SHAPE SHAPE …`.

Runs by the interpreter that has the peer's library, so it needs NumPy and nothing else of ours.
The shapes are those of leaves of 2 bytes an element, such as 2048x1024. Where the peer does not
move arrays, they lie one after the other in one buffer. FD leads to a
`multiprocessing.connection.Connection`, on which it answers three words about a version: "make" it,
"move" it, and "check" it. Each peer is used as its users would, with the best settings found.
"""

import asyncio
import contextlib
import importlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

Shapes = list[tuple[int, ...]]

_BLOCK = 1 << 19  # words of 8 bytes that are filled or checked at once
_ITEMSIZE = 2  # bytes of an element


def _fill(buffer: np.ndarray, version: int) -> None:
    for part, contents in _blocks(buffer, version):
        part[:] = contents


def _wrong(buffer: np.ndarray, version: int) -> list[str]:
    """Where bytes are not those of `version`."""
    parts = enumerate(_blocks(buffer, version))
    return [f"block {index}" for index, (part, want) in parts if not np.array_equal(part, want)]


def _blocks(buffer: np.ndarray, version: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    words = buffer.view(np.uint64)
    for start in range(0, len(words), _BLOCK):
        part = words[start : start + _BLOCK]
        position = np.arange(start, start + len(part), dtype=np.uint64)
        yield part, position * np.uint64(0x9E3779B97F4A7C15) + np.uint64(version)


def _serve(pipe: Connection, **words: Callable[[int], Any]) -> None:
    """Answers until the other end is closed."""
    with contextlib.suppress(EOFError):
        while True:
            word, version = pipe.recv()
            said = words[word](version)
            pipe.send(time.monotonic() if word == "move" else said)


def _nothing(version: int) -> None:
    """The other side does it."""


# --- Mooncake: the trainer writes into the sampler's buffer


def _mooncake(pipe: Connection, role: str, shapes: Shapes) -> None:
    nbytes = sum(_sizes(shapes))
    buffer = np.ones(nbytes, np.uint8)
    address = buffer.ctypes.data
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    _check(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0)
    _check(engine.register_memory(address, nbytes) == 0)
    if role == "sampler":
        pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", address))
        _serve(pipe, make=_nothing, move=_nothing, check=lambda v: _wrong(buffer, v))
        return
    host, there = pipe.recv()
    pipe.send(None)

    def move(version: int) -> None:
        _check(engine.transfer_sync_write(host, address, there, nbytes) == 0)

    _serve(pipe, make=lambda v: _fill(buffer, v), move=move, check=_nothing)


# --- NIXL, by UCX: the trainer writes into the sampler's buffer


def _nixl(pipe: Connection, role: str, shapes: Shapes) -> None:
    nbytes = sum(_sizes(shapes))
    api = importlib.import_module("nixl._api")
    buffer = np.ones(nbytes, np.uint8)
    address = buffer.ctypes.data
    # Without a thread of its own that looks for progress: three times as fast on two cores.
    config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    agent = api.nixl_agent(role, config)
    agent.register_memory([(address, nbytes, 0, "")], "DRAM")
    if role == "sampler":
        pipe.send((agent.get_agent_metadata(), address))

        def await_done(version: int) -> None:
            done = f"done {version}".encode()
            while not any(done in told for told in agent.get_new_notifs().values()):
                pass

        _serve(pipe, make=_nothing, move=await_done, check=lambda v: _wrong(buffer, v))
        return
    metadata, there = pipe.recv()
    sampler = agent.add_remote_agent(metadata)
    local, remote = (
        agent.get_xfer_descs([(start, nbytes, 0)], "DRAM") for start in (address, there)
    )
    transfer = agent.initialize_xfer("WRITE", local, remote, sampler, b"done")
    pipe.send(None)

    def move(version: int) -> None:
        state = agent.transfer(transfer, f"done {version}".encode())
        while state == "PROC":
            state = agent.check_xfer_state(transfer)
        _check(state == "DONE")

    _serve(pipe, make=lambda v: _fill(buffer, v), move=move, check=_nothing)


# --- Ray: this process puts the buffer into the object store, whole or an array per leaf; an actor
# --- gets views of it there


def _ray(pipe: Connection, role: str, shapes: Shapes) -> None:
    sizes = _sizes(shapes)
    nbytes = sum(sizes)
    ray = importlib.import_module("ray")
    folder = tempfile.mkdtemp(prefix="tsr-bench-")
    ray.init(
        num_cpus=2,
        object_store_memory=2 * nbytes + (256 << 20),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
    )
    buffer = np.ones(nbytes, np.uint8)
    arrays = [buffer] if role == "whole" else np.split(buffer, np.cumsum(sizes)[:-1])

    class Sampler:
        def __init__(self) -> None:
            self._got: list[np.ndarray] = []

        def drop(self) -> None:
            self._got = []

        def take(self, references: list[Any]) -> None:
            self._got = ray.get(references[0])

        def check(self, version: int) -> list[str]:
            return _wrong(np.concatenate(self._got), version)

    sampler = ray.remote(Sampler).remote()

    def make(version: int) -> None:
        ray.get(sampler.drop.remote())
        _fill(buffer, version)

    def move(version: int) -> None:
        ray.get(sampler.take.remote([ray.put(arrays)]))

    def check(version: int) -> Any:
        return ray.get(sampler.check.remote(version))

    pipe.send(folder)
    _serve(pipe, make=make, move=move, check=check)


# --- TPU Sync: the trainer's arrays are copied to its host memory, pushed into the sampler's, and
# --- copied into arrays there. It takes those of CPUs where no leaf skips the step for TPU tiles.

_PARALLELISM = 4  # connections: the best of 1, 4 and 8


def _tpu_sync(pipe: Connection, role: str, shapes: Shapes) -> None:
    jax = importlib.import_module("jax")
    api = importlib.import_module("tpu_sync.api.jax.weight_synchronizer")
    axes = ("fsdp", "tp")
    mesh = jax.make_mesh((1, 1), axes, devices=jax.devices()[:1])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def arrays(version: int) -> list[Any]:
        """Leaves of a version; no two have equal parts at one place."""
        made = []
        for index, shape in enumerate(shapes):
            bits = np.arange(np.prod(shape), dtype=np.uint32) * np.uint32(0x9E3779B1)
            bits += np.uint32(version * 0x10001 + index)
            elements = (bits >> 16).astype(np.uint16).view(jax.numpy.bfloat16)
            made.append(jax.device_put(elements.reshape(shape), sharding))
        return list(jax.block_until_ready(made))

    params = arrays(0)
    worker = api.WeightSynchronizer(
        params,
        local_port=0,
        listener_port=0,
        parallelism=_PARALLELISM,
        bind_ip="127.0.0.1",
        unsafe_skip_buffer_lock=True,  # else arrays that are bound can't be replaced by others
    )
    worker.test_only_set_skip_tiling([False] * len(shapes))
    here = (worker.local_port, worker.listener_port)
    if role == "trainer":
        pipe.send(here)

        def make(version: int) -> None:
            params[:] = arrays(version)
            worker.bind_weights(params)

        _serve(pipe, make=make, move=lambda version: worker.d2h(), check=_nothing)
        return
    # Whoever has the controller starts transfers: this one, when the trainer has done its part.
    controllers = importlib.import_module("tpu_sync.rpc.raiden_controller")
    client = controllers.WeightSyncWorkerRpcClient()
    controller = controllers.RaidenController(0, worker_rpc_client=client)
    units = [controllers.RaidenId(name, "0", "weights") for name in ("trainer", "sampler")]
    variables = _tpu_sync_variables(shapes)
    for unit, (data_port, control_port) in zip(units, (pipe.recv(), here), strict=True):
        controller.register_work_unit(
            unit,
            [f"127.0.0.1:{data_port}"],
            control_plane_rpc_address=f"127.0.0.1:{control_port}",
            mesh_shape=[1, 1],
            mesh_axes=axes,
            host_subgrid=[1, 1],
            variables=variables,
        )
    pipe.send(None)

    def move(version: int) -> None:
        transfer = controller.start_transfer(
            units[:1],
            units[1:],
            use_block_chunks=True,
            uuid=version,
            parallelism=_PARALLELISM,
            skip_d2h=True,
            skip_tiling=dict.fromkeys(range(len(shapes)), False),
        )
        asyncio.run(transfer.wait())
        worker.wait_for_transfer_completion(version)
        worker.h2d()

    def wrong(version: int) -> list[str]:
        pairs = enumerate(zip(params, arrays(version), strict=True))
        return [f"leaf {index}" for index, (got, want) in pairs if _bits(got) != _bits(want)]

    _serve(pipe, make=_nothing, move=move, check=wrong)


def _tpu_sync_variables(shapes: Shapes) -> list[Any]:
    messages = importlib.import_module("tpu_sync.rpc.raiden_service_pb2")
    return [
        messages.VariableMetadataProto(
            name=f"leaf {index}",
            shape=shape,
            mesh_shape=[1, 1],
            layout=list(reversed(range(len(shape)))),
            item_size=_ITEMSIZE,
            layer_idx=index,
            sharding_spec=[""] * len(shape),
        )
        for index, shape in enumerate(shapes)
    ]


def _bits(leaf: Any) -> bytes:
    return np.asarray(leaf).tobytes()


def _sizes(shapes: Shapes) -> list[int]:
    """Bytes of each leaf."""
    return [_ITEMSIZE * math.prod(shape) for shape in shapes]


def _check(is_done: bool) -> None:
    if not is_done:
        raise RuntimeError("the library says that it failed")


_PEERS = {"mooncake": _mooncake, "nixl": _nixl, "ray": _ray, "tpu_sync": _tpu_sync}


def main(fd: str, peer: str, role: str, *shapes: str) -> None:
    """Is a process of `peer`. What its library logs is dropped; what went wrong is not."""
    terminal = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        leaves = [tuple(map(int, shape.split("x"))) for shape in shapes]
        _PEERS[peer](Connection(int(fd)), role, leaves)
    except BaseException:
        os.dup2(terminal, 2)
        raise


if __name__ == "__main__":
    del sys.path[0]  # our folder, with names that others have for modules of their own
    main(*sys.argv[1:])
