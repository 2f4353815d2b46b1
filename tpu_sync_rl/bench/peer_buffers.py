"""A process of a peer that moves a buffer: `python peer_buffers.py FD PEER ROLE NBYTES NBYTES …`.

Runs by the interpreter that has the peer's library, so it needs NumPy and nothing else of ours.
The sizes are those of leaves, which lie one after the other in one buffer. FD leads to a
`multiprocessing.connection.Connection`, on which it answers three words about a version: "make" it,
"move" it, and "check" it. Each peer is used as its users would, with the best settings found.
"""

import contextlib
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

_BLOCK = 1 << 19  # words of 8 bytes that are filled or checked at once


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


def _mooncake(pipe: Connection, role: str, sizes: list[int]) -> None:
    nbytes = sum(sizes)
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


def _nixl(pipe: Connection, role: str, sizes: list[int]) -> None:
    nbytes = sum(sizes)
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


def _ray(pipe: Connection, role: str, sizes: list[int]) -> None:
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


def _check(is_done: bool) -> None:
    if not is_done:
        raise RuntimeError("the library says that it failed")


_PEERS = {"mooncake": _mooncake, "nixl": _nixl, "ray": _ray}


def main(fd: str, peer: str, role: str, *sizes: str) -> None:
    """Is a process of `peer`. What its library logs is dropped; what went wrong is not."""
    terminal = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        _PEERS[peer](Connection(int(fd)), role, list(map(int, sizes)))
    except BaseException:
        os.dup2(terminal, 2)
        raise


if __name__ == "__main__":
    del sys.path[0]  # our folder, with names that others have for modules of their own
    main(*sys.argv[1:])
