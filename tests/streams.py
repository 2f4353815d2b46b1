"""Processes of a job over real streams, without params: they say what a session would say."""

import threading
import time
from typing import Any, TypeVar

from tpu_sync_rl.client import CoordinatorClient
from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.messages import ProcessStats, TrainerUp
from tpu_sync_rl.options import Options
from tpu_sync_rl.sampler_messages import Admit, Fetch, JoinSampler, Prepared, SamplerJoined
from tpu_sync_rl.tls import TLS
from tpu_sync_rl.trainer_messages import JoinTrainer, Publish, TrainerJoined

JOB = "policy"
TOKEN = b"secret"
PATIENCE_S = 30.0  # far more than anything here takes
STATS = ProcessStats(nbytes=8, wire_nbytes=4, seconds={}, rails={})
T = TypeVar("T")


def options(token: bytes, peer_timeout: float, tls: TLS | None = None) -> Options:
    return Options.checked(
        job=JOB,
        token=token or None,
        timeout=60,
        nics=None,
        streams_per_rail=2,
        chunk_nbytes=1 << 20,
        congestion=None,
        peer_timeout=peer_timeout,
        same_host="auto",
        verify="wire",
        insecure=False,
        trace=None,
        tls=tls,
        metrics=None,
    )


class Session:
    """A client and what it has heard."""

    def __init__(
        self,
        address: str,
        role: str,
        name: str,
        *,
        token: bytes = TOKEN,
        peer_timeout: float = 1.5,
        tls: TLS | None = None,
    ) -> None:
        self.heard: list[Any] = []
        self.refusals: list[SyncError] = []
        self.num_joins = 0
        self._changed = threading.Condition()
        self.client = CoordinatorClient(
            address,
            options(token, peer_timeout, tls),
            role=role,
            name=name,
            process_index=0,
            join=self.join,
            on_message=self.on_message,
            on_refused=self.on_refused,
        )

    def join(self) -> JoinTrainer | JoinSampler:
        raise NotImplementedError

    def on_message(self, message: Any) -> None:
        with self._changed:
            if isinstance(message, TrainerJoined | SamplerJoined):
                self.num_joins += 1
            self.heard.append(message)
            self._changed.notify_all()

    def on_refused(self, error: SyncError) -> None:
        with self._changed:
            self.refusals.append(error)
            self._changed.notify_all()

    def wait_until(self, condition: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S), self.heard

    def wait_for(self, kind: type[T], number: int = 1) -> T:
        """The `number`-th message of a kind, once it has come."""
        self.wait_until(lambda: len(self.all(kind)) >= number)
        return self.all(kind)[number - 1]

    def all(self, kind: type[T]) -> list[T]:
        return [message for message in self.heard if isinstance(message, kind)]

    def __enter__(self) -> Any:
        self.client.start(time.monotonic() + PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


class TrainerSession(Session):
    def __init__(self, address: str, name: str = "A", **arguments: Any) -> None:
        self.epoch = 0
        super().__init__(address, "trainer", name, **arguments)
        self.name = name

    def join(self) -> JoinTrainer:
        return JoinTrainer(self.name, self.epoch, 1, [], b"", 60.0, "wait", "replica", [], 0)

    def on_message(self, message: Any) -> None:
        if isinstance(message, TrainerJoined):
            self.epoch = message.epoch
        super().on_message(message)

    def publish(self, version: int = 1, manifest: bytes = b"manifest") -> None:
        call = version - 1
        self.client.send(Publish(call, version, "d", manifest, "received", 0, 60.0, {}, "", ""))


class SamplerSession(Session):
    def __init__(self, address: str, name: str = "s", **arguments: Any) -> None:
        self.sink = 0
        super().__init__(address, "sampler", name, **arguments)

    def join(self) -> JoinSampler:
        return JoinSampler("life", 1, self.sink, [], None, None, 0, [])

    def on_message(self, message: Any) -> None:
        if isinstance(message, SamplerJoined):
            self.sink = message.sink
        super().on_message(message)

    def receive(self) -> None:
        """Admits the trainer and prepares the first version that it is told to receive."""
        self.client.send(Admit(self.wait_for(TrainerUp).digest))
        self.client.send(Prepared(self.wait_for(Fetch).held, STATS))
