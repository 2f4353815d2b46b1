"""Where the programs of a run live: on one host, or in two network namespaces with two rails."""

import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from programs import free_port

from tpu_sync_rl.bench.netns import CONTROL, Namespaces

from .control_proxy import ControlProxy
from .faults import PEER_TIMEOUT_S

TOKEN = "chaos"
_RATES_MBIT = (80, 80)  # slow enough for faults to meet versions on their way
PLACES = ("shm", "tcp", "netns")


@dataclass(frozen=True)
class Place:
    """How to start programs, and how they reach one another.

    Attributes:
        trainer_prefix: what a command of the trainer's side begins with.
        sampler_prefix: of the samplers' side.
        host: address that the coordinator listens on.
        port: of the coordinator.
        proxy: what samplers dial in place of the coordinator.
        data: options of both `connect_*` that say how data moves.
        namespaces: None where all is on one host.
    """

    trainer_prefix: list[str]
    sampler_prefix: list[str]
    host: str
    port: int
    proxy: ControlProxy
    data: dict[str, Any]
    namespaces: Namespaces | None = None

    @property
    def num_links(self) -> int:
        """How many rails may be lost."""
        return 0 if self.namespaces is None else len(self.namespaces.rails)

    def set_up(self, link: str, is_up: bool) -> None:
        """Takes one rail, or "all", down or up."""
        assert self.namespaces is not None
        for index, rail in enumerate(self.namespaces.rails):
            if link in (str(index), "all"):
                self.namespaces.set_up(rail, is_up)

    def connect_trainer(self, hosted: bool) -> dict[str, Any]:
        """Options of the trainer."""
        # Where the coordinator runs alone on this host, the trainer reaches it as samplers do.
        through_proxy = not hosted and self.namespaces is None
        address = self.proxy.address if through_proxy else f"{self.host}:{self.port}"
        return {
            **self.data,
            "coordinator": address,
            "host_coordinator": hosted,
            "straggler_timeout": 5,
            "token": TOKEN,
            "peer_timeout": PEER_TIMEOUT_S,
        }

    def connect_sampler(self, replica: str) -> dict[str, Any]:
        """Options of a replica."""
        return {
            **self.data,
            "coordinator": self.proxy.address,
            "replica": replica,
            "token": TOKEN,
            "peer_timeout": PEER_TIMEOUT_S,
        }

    def coordinator_command(self, parent: int) -> list[str]:
        """Runs a coordinator alone, until `parent` ends."""
        return [
            *self.trainer_prefix,
            *(sys.executable, "-m", "tpu_sync_rl.coordinator"),
            *("--address", f"{self.host}:{self.port}", "--peer_timeout", str(PEER_TIMEOUT_S)),
            *("--parent", str(parent)),
        ]


@contextlib.contextmanager
def make_place(kind: str, seed: int) -> Iterator[Place]:
    """Builds a place of `PLACES`; "netns" needs root."""
    rng = random.Random(f"{seed} place")
    data: dict[str, Any] = {"chunk_nbytes": rng.choice((4096, 1 << 16, 1 << 20))}
    with contextlib.ExitStack() as stack:
        if kind == "netns":
            namespaces = stack.enter_context(Namespaces(_RATES_MBIT))
            host, port = CONTROL.trainer_host, 8476
            prefixes = [
                ["ip", "netns", "exec", name] for name in (namespaces.trainer, namespaces.sampler)
            ]
            data |= {"same_host": "tcp", "nics": [rail.name for rail in namespaces.rails]}
            proxy = ControlProxy((host, port), namespaces.sampler)
        else:
            namespaces, prefixes = None, [[], []]
            host, port = "127.0.0.1", free_port()
            data["same_host"] = "auto" if kind == "shm" else "tcp"
            proxy = ControlProxy((host, port), None)
        stack.callback(proxy.close)
        yield Place(*prefixes, host, port, proxy, data, namespaces)
