"""What a container denies costs speed, and never a version."""

import errno
import fcntl
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest
import sandbox
from test_same_host import AUTO, Accepting

import tpu_sync_rl as tsr
from tpu_sync_rl import rails, same_host
from tpu_sync_rl.errors import PeerLostError
from tpu_sync_rl.same_host import NotSharedError

PARAMS = {"w": jnp.arange(1000.0)}


def refuse(error: int):
    def refused(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    return refused


def deny_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    control = fcntl.fcntl

    def controlled(fd: int, command: int, *arguments: int) -> int:
        if command == fcntl.F_ADD_SEALS:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        return control(fd, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", controlled)


# What is denied to both sides, and what the log then has to say.
DENIALS = {
    "memfd_create: Operation not permitted": lambda patch: patch.setattr(
        os, "memfd_create", refuse(errno.EPERM)
    ),
    "memfd_create: Function not implemented": lambda patch: patch.setattr(
        os, "memfd_create", refuse(errno.ENOSYS)
    ),
    "memfd_create: module 'os' has no attribute": lambda patch: patch.delattr(os, "memfd_create"),
    "sizing and sealing a memfd: Operation not permitted": deny_seals,
    "mapping a memfd: Cannot allocate memory": lambda patch: patch.setattr(
        mmap, "mmap", refuse(errno.ENOMEM)
    ),
    "boot_id: No such file or directory": lambda patch: patch.setattr(
        same_host, "_BOOT_ID", Path("/nowhere/boot_id")
    ),
    "passing a descriptor: Operation not permitted": lambda patch: patch.setattr(
        socket, "send_fds", refuse(errno.EPERM)
    ),
    "it belongs to another user, or user namespace": lambda patch: patch.setattr(
        same_host, "is_same_user", lambda _: False
    ),
}


@pytest.mark.parametrize("reason", DENIALS)
def test_without_shared_memory_a_version_comes_by_tcp(reason, monkeypatch, caplog):
    DENIALS[reason](monkeypatch)
    assert moved_over(caplog) == {"lo-lo"}
    (record,) = [record for record in caplog.records if "not by memory" in record.message]
    assert reason in record.message and record.levelname == "INFO"


def test_memory_that_does_not_come_along_is_told_at_both_ends(monkeypatch, caplog):
    receive = same_host.receive

    def receive_less(connection: socket.socket, nbytes: int) -> tuple[bytes, int]:
        part, fd = receive(connection, nbytes)
        if fd >= 0:
            os.close(fd)
        return part, -1

    monkeypatch.setattr(same_host, "receive", receive_less)
    assert moved_over(caplog) == {"lo-lo"}
    told = [record.message for record in caplog.records if "not by memory" in record.message]
    assert "is served by TCP, not by memory: no descriptor came with the proof" in told[0]
    assert told[1].startswith("policy, s[0]: reads by TCP, not by memory, from trainer process 0: ")
    assert told[1].endswith("it could not take the memory, and its log says why")
    assert len(told) == 2


def moved_over(caplog: pytest.LogCaptureFixture) -> set[str]:
    """The rails over which a version of a job comes from one session to another."""
    with (
        caplog.at_level("INFO", "tpu_sync_rl"),
        tsr.connect_trainer(timeout=20) as trainer,
        tsr.connect_sampler(
            coordinator=trainer.coordinator, replica="s", like=PARAMS, timeout=20
        ) as sampler,
    ):
        trainer.sync_weights(PARAMS)
        update = sampler.sync_weights()
        assert jnp.array_equal(update.params["w"], PARAMS["w"])
        return set(update.report.rails)


@pytest.fixture
def accepting() -> Iterator[Accepting]:
    accepting = Accepting()
    yield accepting
    accepting.listener.close()


def test_what_is_denied_in_mid_life_is_told_and_leaves_nothing_open(accepting, monkeypatch):
    num_fds = len(os.listdir("/proc/self/fd"))
    for denial in ("memfd_create: Operation", "sizing and sealing", "mapping a memfd", "passing"):
        (reason,) = [reason for reason in DENIALS if reason.startswith(denial)]
        with monkeypatch.context() as denied:
            DENIALS[reason](denied)
            with pytest.raises(PeerLostError, match=f"on this host .shm.: {reason}"):
                accepting.dial()
            told: list[NotSharedError] = []
            found = rails.pair(AUTO, accepting.addresses, told.append)
        if denial != "passing":
            assert [rail.name for rail in found] == ["lo-lo"] and reason in str(told[0])
    accepting.listener.close()
    assert len(os.listdir("/proc/self/fd")) <= num_fds


SESSIONS = """
import sys
sys.path.insert(0, sys.argv[1])
import jax.numpy as jnp
import sandbox, socket
import tpu_sync_rl as tsr
sandbox.deny(sandbox.MEMFD_CREATE, sandbox.PIDFD_OPEN, families=(socket.AF_UNIX, socket.AF_NETLINK))
params = {"w": jnp.arange(1000.0)}
with tsr.connect_trainer(timeout=20) as trainer:
    trainer._coordinator_process._process.kill()  # it comes again, without a pidfd to watch it by
    with tsr.connect_sampler(
        coordinator=trainer.coordinator, replica="s", like=params, timeout=20
    ) as sampler:
        trainer.sync_weights(params)
        print(*sampler.sync_weights().report.rails)
"""


@pytest.mark.skipif(not sandbox.is_known_here(), reason="needs x86-64")
def test_program_in_a_sandbox_gets_its_versions():
    ran = subprocess.run(
        [sys.executable, "-c", SESSIONS, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "lo-lo\n"), ran.stderr


MEMORY = """
import sys
sys.path.insert(0, sys.argv[1])
import sandbox
from tpu_sync_rl import _native
sandbox.deny(sandbox.MADVISE)
print(memoryview(_native.HostMemory(1 << 20, 1)).nbytes)
"""


@pytest.mark.skipif(not sandbox.is_known_here(), reason="needs x86-64")
def test_memory_is_had_without_advice():
    command = [sys.executable, "-c", MEMORY, str(Path(__file__).parent)]
    assert subprocess.check_output(command, text=True) == f"{1 << 20}\n"
