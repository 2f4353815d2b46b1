"""The way of rollouts from the samplers to process 0 of the trainer: one gRPC call each.

Messages are proved by the job's token (HMAC-SHA256) and travel in the clear. Only the newest of
each replica is kept, so memory does not grow with time.
"""

import hashlib
import hmac
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import grpc
import msgspec
import numpy as np

from tpu_sync_rl.addresses import is_loopback, join_address, split_address
from tpu_sync_rl.examples.sorting_task import LENGTH

_SERVICE = "tpu_sync_rl.examples.Rollouts"
_PROOF_NBYTES = hashlib.sha256().digest_size


class Rollouts(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica answered with one version of the params.

    Attributes:
        replica: name of the replica.
        incarnation: of the trainer that published the params.
        version: of the params that gave these answers.
        digests: per key, of the params as the replica received them.
        prompts: int32 digits, row-major `[batch, LENGTH]`; each prompt stands once per answer.
        answers: int32 digits, likewise.
        logprobs: f32, likewise.
    """

    replica: str
    incarnation: str
    version: int
    digests: dict[str, int]
    prompts: bytes
    answers: bytes
    logprobs: bytes

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Prompts, answers and logprobs; views of the message."""
        prompts, answers, logprobs = (
            np.frombuffer(data, dtype).reshape(-1, LENGTH)
            for data, dtype in (
                (self.prompts, np.int32),
                (self.answers, np.int32),
                (self.logprobs, np.float32),
            )
        )
        return prompts, answers, logprobs


class RolloutServer:
    """Takes rollouts from samplers; its calls come from gRPC's threads, `collect` from the loop's.

    Attributes:
        address: "host:port" that samplers dial.
    """

    def __init__(self, address: str, token: bytes) -> None:
        """Listens at `address`; port 0 finds a free one.

        Raises:
            ValueError: it can be reached from other machines, and there is no token.
            RuntimeError: it is in use.
        """
        host, port = split_address(address, "rollouts")
        if not token and not is_loopback(host):
            raise ValueError(f"{address} needs a token: set TSR_TOKEN or TSR_TOKEN_FILE")
        self._token = token
        self._newest: dict[str, Rollouts] = {}  # guarded by _arrived
        self._arrived = threading.Condition()
        # Without so_reuseport=0 a second server would share the port, and take half the messages.
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        method = grpc.unary_unary_rpc_method_handler(self._submit)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {"Submit": method}),)
        )
        port = self._server.add_insecure_port(join_address(host, port))
        self.address = join_address(host, port)
        self._server.start()

    def collect(
        self, incarnation: str, version: int, num_replicas: int, timeout_s: float
    ) -> list[Rollouts]:
        """Waits for the rollouts of a version from that many replicas; sorted by replica.

        Raises:
            TimeoutError: says which replicas have come.
        """

        def come() -> list[Rollouts]:
            return [
                rollouts
                for _, rollouts in sorted(self._newest.items())
                if (rollouts.incarnation, rollouts.version) == (incarnation, version)
            ]

        with self._arrived:
            if not self._arrived.wait_for(lambda: len(come()) >= num_replicas, timeout_s):
                names = ", ".join(rollouts.replica for rollouts in come()) or "none"
                raise TimeoutError(
                    f"rollouts of version {version}: expected {num_replicas} replicas, got {names}"
                )
            return come()

    def _submit(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        proof, body = message[:_PROOF_NBYTES], message[_PROOF_NBYTES:]
        if not hmac.compare_digest(proof, _prove(self._token, body)):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token differs from the trainer's")
        rollouts = msgspec.msgpack.decode(body, type=Rollouts)
        with self._arrived:
            self._newest[rollouts.replica] = rollouts
            self._arrived.notify_all()
        return b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=1).wait()


def submit_rollouts(address: str, token: bytes, rollouts: Rollouts, timeout_s: float) -> None:
    """Sends `rollouts` to the server at `address`, and waits for it to come up if need be.

    Raises:
        ValueError: `address` is none.
        grpc.RpcError: the token was refused, or the deadline passed.
    """
    body = msgspec.msgpack.encode(rollouts)
    host, port = split_address(address, "rollouts", dialled=True)
    with grpc.insecure_channel(join_address(host, port)) as channel:
        submit = channel.unary_unary(f"/{_SERVICE}/Submit")
        submit(_prove(token, body) + body, timeout=timeout_s, wait_for_ready=True)


def _prove(token: bytes, body: bytes) -> bytes:
    return hmac.digest(token, body, "sha256")
