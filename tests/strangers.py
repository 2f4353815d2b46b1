"""How fast an honest job goes on while strangers attack its ports: `python -m tests.strangers`.

A trainer (this process) and a sampler move 128 MiB per version over TCP. Strangers, in a process
of the lowest priority since the cores of other machines would be theirs, throw at the trainer's
listener and at the coordinator: random bytes, connections that never finish their handshake, dials
with a wrong token, and the recorded bytes of such a dial. Rounds with and without them alternate,
for some numbers of connections a second, and for as many as they can open.
"""

import contextlib
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

NBYTES = 128 << 20
NUM_ROUNDS = 9
RATES = (100, 1000, 0)  # connections a second; 0 for as many as there can be
NUM_SILENT = 200
TOKEN = "honest"


def attack(coordinator: str, host: str, port: int, incarnation: str, rate: int) -> None:
    """Attacks both ports until the process ends, with `rate` connections a second."""
    from tpu_sync_rl import handshake, rails
    from tpu_sync_rl.addresses import split_address
    from tpu_sync_rl.nics import LOOPBACK

    options = SimpleNamespace(token=b"wrong", job="policy", congestion=None, peer_timeout_s=10.0)
    rail = rails.Rail(LOOPBACK, "lo", host, port)
    target = handshake.target("policy", incarnation)
    hello = handshake.Hello(bytes(32), target, 1, rail.name).encode()

    def dial(where: tuple[str, int], data: bytes) -> socket.socket:
        connection = socket.create_connection(where, 5)
        with contextlib.suppress(OSError):
            connection.sendall(data)
        return connection

    def throw(where: tuple[str, int], seed: int) -> None:
        rng = random.Random(seed)
        silent: list[socket.socket] = []
        while True:
            time.sleep(8 / rate if rate else 0)  # two of these threads, four connections each
            with contextlib.suppress(OSError):
                silent.append(dial(where, hello[: rng.randrange(len(hello))]))
                silent.append(dial(where, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
                dial(where, rng.randbytes(rng.randrange(4096))).close()
                with dial(where, hello + bytes(32)) as replayed:
                    replayed.settimeout(1)
                    replayed.recv(4096)
            while len(silent) > NUM_SILENT:
                silent.pop(0).close()

    def guess(where: tuple[str, int]) -> None:
        while True:
            time.sleep(5 / rate if rate else 0)
            with contextlib.suppress(Exception):
                rails.dial(rail, options, incarnation=incarnation, sink=1, ticket=bytes(32))

    os.nice(19)
    places = [(host, port), split_address(coordinator)]
    for seed, place in enumerate(places):
        threading.Thread(target=throw, args=(place, seed), daemon=True).start()
    guess(places[0])


def sample(coordinator: str) -> None:
    """Takes every version."""
    import jax
    import jax.numpy as jnp

    import tpu_sync_rl as tsr

    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {"w": jax.ShapeDtypeStruct((NBYTES,), jnp.uint8, sharding=one)}
    with tsr.connect_sampler(
        coordinator=coordinator, replica="honest", like=like, token=TOKEN, same_host="tcp"
    ) as session:
        for update in session:
            del update


def measure() -> None:
    """Prints the medians, and what was allocated meanwhile."""
    import jax

    import tpu_sync_rl as tsr

    w = jax.device_put(np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8))
    command = [sys.executable, "-m", "tests.strangers"]
    with tsr.connect_trainer(token=TOKEN, same_host="tcp", min_replicas=1) as session:
        at, *_ = session._listener.addresses
        sampler = subprocess.Popen([*command, "sample", session.coordinator])
        for rate in RATES:
            names = [session.coordinator, at.host, str(at.port), session.incarnation, str(rate)]
            strangers = subprocess.Popen([*command, "attack", *names])
            try:
                alone, attacked = _alternate(lambda: _sync(session, w), strangers)
            finally:
                strangers.kill()
                strangers.wait()
            fds, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
            print(
                f"{rate or 'any number of'} strangers a second: {attacked:.2f} of {alone:.2f} GB/s "
                f"({attacked / alone:.2f}); the trainer has {fds} descriptors, {threads} threads"
            )
    sampler.wait(20)


def _sync(session: Any, w: Any) -> None:
    session.sync_weights({"w": w}, wait="committed")


def _alternate(sync: Callable[[], None], strangers: "subprocess.Popen[bytes]") -> list[float]:
    """Median GB/s without and with strangers."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for index in range(2 * NUM_ROUNDS + 4):
        attacked = index % 2 == 1
        strangers.send_signal(signal.SIGCONT if attacked else signal.SIGSTOP)
        time.sleep(0.2)  # they reach their pace
        began = time.monotonic()
        sync()
        if index >= 4:
            seconds[attacked].append(time.monotonic() - began)
    return [NBYTES / 1e9 / statistics.median(seconds[attacked]) for attacked in (False, True)]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["attack", coordinator, host, port, incarnation, rate]:
            attack(coordinator, host, int(port), incarnation, int(rate))
        case ["sample", coordinator]:
            sample(coordinator)
        case _:
            measure()
