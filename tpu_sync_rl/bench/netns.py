"""Two network namespaces joined by veth pairs that are shaped to the rates of NICs. Needs root.

Every address is inside the namespaces; they and all that is in them go when it is closed.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
FOLDER = Path("/run/netns")
PREFIX = "tsr-bench"
# Bytes that a token bucket may send at once, up to a rate: enough for its timer to hold the rate.
_BURSTS_NBYTES = {100: 64_000, 1000: 256_000, 2500: 512_000, 5000: 1_000_000, 10_000: 2_000_000}
_MAX_BURST = 4_000_000
_LATENCY = "20ms"


@dataclass(frozen=True, slots=True)
class Veth:
    """A pair of virtual NICs, named alike in both namespaces. Index 0 is the control network."""

    index: int

    @property
    def name(self) -> str:
        """Name of the NIC at either end."""
        return f"rail{self.index - 1}" if self.index else "control"

    @property
    def trainer_host(self) -> str:
        """Address in the trainer's namespace."""
        return f"10.99.{self.index}.1"

    @property
    def sampler_host(self) -> str:
        """Address in the sampler's namespace."""
        return f"10.99.{self.index}.2"


CONTROL = Veth(0)


class Namespaces:
    """A namespace for the trainer and one for the sampler, with a control network and rails.

    Attributes:
        trainer: name of the trainer's namespace.
        sampler: name of the sampler's.
        rails: pairs of NICs that carry data.
    """

    def __init__(self, rates_mbit: Sequence[int]) -> None:
        """Builds them, with a rail per rate.

        Raises:
            RuntimeError: this user may not, or `ip` or `tc` is missing.
        """
        check_rights()
        _remove_abandoned()
        self.trainer = f"{PREFIX}-{os.getpid()}-trainer"
        self.sampler = f"{PREFIX}-{os.getpid()}-sampler"
        self.rails = [Veth(index + 1) for index in range(len(rates_mbit))]
        try:
            for namespace in (self.trainer, self.sampler):
                _call("ip", "netns", "add", namespace)
                _call("ip", "-n", namespace, "link", "set", "lo", "up")
            for veth in (CONTROL, *self.rails):
                self._join(veth)
            for veth, rate_mbit in zip(self.rails, rates_mbit, strict=True):
                self.set_rate(veth, rate_mbit)
        except BaseException:
            self.close()
            raise

    def set_rate(self, veth: Veth, rate_mbit: int) -> None:
        """Shapes both directions of a rail."""
        burst = next((n for most, n in _BURSTS_NBYTES.items() if rate_mbit <= most), _MAX_BURST)
        for namespace in (self.trainer, self.sampler):
            _call(
                *("tc", "-n", namespace, "qdisc", "replace", "dev", veth.name, "root", "tbf"),
                *("rate", f"{rate_mbit}mbit", "burst", str(burst), "latency", _LATENCY),
            )

    def set_up(self, veth: Veth, is_up: bool) -> None:
        """Takes the trainer's NIC of a rail down, or up again: the other end loses its carrier."""
        _call("ip", "-n", self.trainer, "link", "set", veth.name, "up" if is_up else "down")

    def close(self) -> None:
        """Removes both, and kills what still runs there. Ctrl-C and SIGTERM wait. Idempotent."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            for namespace in (self.trainer, self.sampler):
                if (FOLDER / namespace).exists():
                    _remove(namespace)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> "Namespaces":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self, veth: Veth) -> None:
        _call(
            *("ip", "link", "add", veth.name, "netns", self.trainer, "type", "veth"),
            *("peer", "name", veth.name, "netns", self.sampler),
        )
        for namespace, host in (
            (self.trainer, veth.trainer_host),
            (self.sampler, veth.sampler_host),
        ):
            _call("ip", "-n", namespace, "addr", "add", f"{host}/24", "dev", veth.name)
            _call("ip", "-n", namespace, "link", "set", veth.name, "up")


def check_rights() -> None:
    """Raises RuntimeError where this process can't build namespaces; says why."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise RuntimeError(f"network namespaces need {tool!r} (Debian: iproute2)")
    if os.geteuid() != 0:
        raise RuntimeError("network namespaces need root")


def isolate(congestion: str | None = None) -> None:
    """Moves the calling thread, and what it starts, into a network that has loopback alone.

    It ends with them. Needs root.

    Args:
        congestion: TCP congestion control of connections there that choose none. The kernel lets
            no namespace but the first set one that is not allowed to everybody, but routes may
            name any.

    Raises:
        RuntimeError: this user may not, or the kernel does not know `congestion`.
    """
    check_rights()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise RuntimeError(f"a network namespace: {os.strerror(ctypes.get_errno())}")
    _call("ip", "link", "set", "lo", "up")
    if congestion is not None:
        for hosts in ("127.0.0.0/8", "127.0.0.1"):
            _call(
                *("ip", "route", "change", "table", "local", "local", hosts, "dev", "lo"),
                *("proto", "kernel", "scope", "host", "src", "127.0.0.1", "congctl", congestion),
            )


def enter(namespace: str) -> None:
    """Moves the calling thread, and those that it starts, into a namespace."""
    with (FOLDER / namespace).open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


def _remove_abandoned() -> None:
    """Removes the namespaces of processes that were killed before they could."""
    for path in FOLDER.glob(f"{PREFIX}-*"):
        owner = re.fullmatch(rf"{PREFIX}-(\d+)-\w+", path.name)
        if owner and not Path("/proc", owner[1]).exists():
            with contextlib.suppress(RuntimeError):  # another run was faster
                _remove(path.name)


def _remove(namespace: str) -> None:
    for pid in _call("ip", "netns", "pids", namespace).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _call("ip", "netns", "del", namespace)


def _call(*command: str) -> str:
    # A session of its own: Ctrl-C must not tear `ip` in the middle of what it builds or removes.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
