import json
import subprocess
import sys

import pytest
from bench_commands import add_to_path, has_namespaces, measured, needs_namespaces, run_bench
from jax.sharding import PartitionSpec as P

from tpu_sync_rl.bench import models
from tpu_sync_rl.bench.peer_programs import PeerPrograms
from tpu_sync_rl.bench.readv_limit import THREADS, ReadvLimit

# A Mooncake that writes by process_vm_writev, or only says that it did.
MOONCAKE = """
import ctypes, os

class TransferEngine:
    def initialize(self, *arguments): return 0
    def register_memory(self, *arguments): return 0
    def get_rpc_port(self): return os.getpid()

    def transfer_sync_write(self, host, here, there, nbytes):
        spans = [(ctypes.c_size_t * 2)(address, nbytes) for address in (here, there)]
        pid = int(host.split(":")[1])
        write = ctypes.CDLL(None).process_vm_writev
        return 0 if LIES else int(write(pid, spans[0], 1, spans[1], 1, 0) != nbytes)
"""


# A TPU Sync that copies through a file.
TPU_SYNC = {
    "api/jax/weight_synchronizer.py": """
import ctypes, pathlib
import numpy as np
FILE = pathlib.Path(__file__).with_name("host_memory")

class WeightSynchronizer:
    local_port, listener_port = 1, 2
    def __init__(self, arrays, **options): self._arrays = arrays
    def test_only_set_skip_tiling(self, skip): assert skip == [False] * len(self._arrays)
    def bind_weights(self, arrays): self._arrays = arrays
    def d2h(self):
        if not FILE.with_name("lies").exists():
            FILE.write_bytes(b"".join(np.asarray(x).tobytes() for x in self._arrays))

    def wait_for_transfer_completion(self, uuid): pass

    def h2d(self):
        data = FILE.read_bytes()
        for array in self._arrays:
            ctypes.memmove(array.unsafe_buffer_pointer(), data, array.nbytes)
            data = data[array.nbytes:]
""",
    "rpc/raiden_controller.py": """
def RaidenId(*words): return words
WeightSyncWorkerRpcClient = object

class RaidenController:
    def __init__(self, port, worker_rpc_client): self._units = []
    def register_work_unit(self, unit, shards, **described): self._units.append(unit)

    def start_transfer(self, sources, sinks, **how):
        assert self._units == sources + sinks
        return self

    async def wait(self): pass
""",
    "rpc/raiden_service_pb2.py": "VariableMetadataProto = dict",
}


@pytest.fixture
def mooncake(tmp_path, monkeypatch):
    """Installs it for programs that start from now on."""

    def install(*, lies):
        (tmp_path / "mooncake").mkdir()
        (tmp_path / "mooncake/engine.py").write_text(f"LIES = {lies}\n{MOONCAKE}")
        add_to_path(tmp_path, monkeypatch)

    return install


@pytest.mark.slow
@pytest.mark.end_to_end
def test_peers_run_beside_ours(tmp_path, mooncake):
    mooncake(lies=False)
    congestion = ["--congestion=reno"] if has_namespaces() else []
    figures = measured(
        *(tmp_path, "peers", "--model=one-big", "--nbytes=500000", "--rounds=1", *congestion),
        *(f"--mooncake_python={sys.executable}", "--peers"),
        *("Orbax", "jax.experimental.transfer", "plain socket", "Mooncake"),
    )
    assert [figure["limit"]["name"] for figure in figures] == [
        "Orbax",
        "jax.experimental.transfer",
        "plain socket",
        "Mooncake",
    ]


def test_wrong_bytes_of_a_peer_are_found(mooncake):
    mooncake(lies=True)
    leaves = models.model("one-big", 5_000_000)
    with (
        PeerPrograms("Mooncake", leaves, sys.executable) as peer,
        pytest.raises(RuntimeError, match="version 1 of Mooncake is wrong in block 0, block 1"),
    ):
        peer.sync(1)


@pytest.mark.end_to_end
def test_arrays_of_tpu_sync_are_compared(tmp_path, monkeypatch):
    for path, source in TPU_SYNC.items():
        (tmp_path / "tpu_sync" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tpu_sync" / path).write_text(source)
    add_to_path(tmp_path, monkeypatch)
    leaves = {"a": ((4, 6), P()), "b": ((3,), P()), "c": ((4, 6), P())}
    with PeerPrograms("TPU Sync", leaves, sys.executable) as peer:
        assert all(peer.sync(version) > 0 for version in (1, 2))
        lies = tmp_path / "tpu_sync/api/jax/lies"
        lies.touch()
        with pytest.raises(RuntimeError, match="version 3 of TPU Sync is wrong in leaf 0"):
            peer.sync(3)


def test_peer_that_is_not_installed_is_refused():
    done = run_bench("peers", "--peers", "Mooncake")
    assert done.returncode == 1
    assert "Mooncake is not installed here; --mooncake_python names an interpreter" in done.stderr


@needs_namespaces
def test_isolated_process_has_the_congestion_control_that_was_asked_for(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ISOLATED], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["reno", "reno"], done.stderr


ISOLATED = """
import socket
from tpu_sync_rl.bench import netns
netns.isolate("reno")
with socket.create_server(("127.0.0.1", 0)) as listener:
    with socket.create_connection(listener.getsockname()) as one, listener.accept()[0] as other:
        for end in (one, other):
            name = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            print(name.rstrip(b"\\0").decode())
"""


@needs_namespaces
def test_unknown_congestion_control_of_peers_is_refused():
    done = run_bench("peers", "--congestion=nothing")
    assert done.returncode == 1
    assert "congctl nothing" in done.stderr


@pytest.mark.end_to_end
def test_shm_is_held_against_what_the_kernel_copies(tmp_path):
    figures = measured(tmp_path, "shm", "--model=one-big", "--nbytes=500000", "--rounds=1")
    pairs = {(figure["name"], figure["limit"]["name"]) for figure in figures}
    assert pairs >= {(name, "process_vm_readv") for name in ("whole call", "bytes alone")}
    (rail,) = json.loads((tmp_path / "result.json").read_text())["rails"]
    assert rail == "shm"


def test_memory_of_another_process_is_read_again_and_again():
    with ReadvLimit(3 << 20) as readv:
        assert readv.nbytes == 3 << 20
        assert readv.way in THREADS
        assert all(readv.gbytes_per_s() > 0 for readv.way in (*THREADS, *THREADS))
