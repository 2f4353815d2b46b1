"""Bits that flip on the wire: caught, fetched again or refused, never committed.

Those that flip in a source's memory are in tests/csrc/source_stream_test.cc.
"""

import random
import threading
from collections.abc import Callable, Iterator

import jax
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh
from wire_proxy import PARTS, Change, Part, WireProxy

import tpu_sync_rl as tsr
from tpu_sync_rl.listener import Listener

pytestmark = pytest.mark.end_to_end

AXES = ("fsdp", "tp")
SPECS = oracle.ODD_LEAVES
TRAINER = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), AXES)
SAMPLER = Mesh(np.array(jax.devices()[4:8]).reshape(1, 4), AXES)


class Flips:
    """Flips one bit of a part now and then.

    Attributes:
        wanted: (direction, name) of the parts that are hit.
        left: how many bits are still to be flipped.
        done: how many were.
    """

    def __init__(self, seed: int, wanted: set[tuple[str, str]], left: int, odds: float) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._odds = odds
        self.wanted = wanted
        self.left = left
        self.done = 0

    def __call__(self, part: Part) -> None:
        with self._lock:
            if (part.direction, part.name) not in self.wanted or self.left <= 0:
                return
            if self._rng.random() < self._odds:
                part.data[self._rng.randrange(len(part.data))] ^= 1 << self._rng.randrange(8)
                self.left -= 1
                self.done += 1


@pytest.fixture
def proxied(monkeypatch) -> Iterator[Callable[[Change], None]]:
    """Has every trainer of this test be reached through proxies that call what is given."""
    proxies: list[WireProxy] = []
    init, changes = Listener.__init__, []

    def init_behind_proxies(self, *args, **options):
        init(self, *args, **options)
        proxies.extend(WireProxy(at.host, at.port, changes[0]) for at in self.addresses)
        self.addresses = [
            at._replace(host="127.0.0.1", port=proxy.port)
            for at, proxy in zip(self.addresses, proxies, strict=True)
        ]

    monkeypatch.setattr(Listener, "__init__", init_behind_proxies)
    yield changes.append
    for proxy in proxies:
        proxy.close()


def connect_trainer(**options) -> tsr.TrainerSession:
    return tsr.connect_trainer(timeout=20, peer_timeout=1, same_host="tcp", **options)


def connect_sampler(trainer: tsr.TrainerSession, **options) -> tsr.SamplerSession:
    options = {
        "timeout": 20,
        "peer_timeout": 1,
        "same_host": "tcp",
        "chunk_nbytes": 4096,
        **options,
    }
    like = oracle.like(SPECS, SAMPLER)
    return tsr.connect_sampler(coordinator=trainer.coordinator, replica="s", like=like, **options)


@pytest.mark.parametrize(
    "direction, name", [(direction, name) for direction in PARTS for name in PARTS[direction]]
)
def test_flipped_bit_is_caught_and_what_it_hit_comes_again(proxied, direction, name):
    # A table is shown once, a handshake seldom; a chunk hit three times would end its sync.
    num_flips, odds = {"table": (1, 1.0), "handshake": (6, 0.3)}.get(name, (4, 0.1))
    flips = Flips(1, {(direction, name)}, num_flips, odds)
    proxied(flips)
    options = {"token": "secret", "verify": "full" if name == "digest" else "wire"}
    with connect_trainer(token="secret") as trainer, connect_sampler(trainer, **options) as s:
        version = 0
        while version < 5 or flips.left:
            version += 1
            params = oracle.params(SPECS, TRAINER, version)
            tsr.sync_weights(params, to=trainer, version=version)
            oracle.assert_equal(s.sync_weights().params, SPECS, version, SAMPLER)
            assert version < 200
    assert flips.done == num_flips


@pytest.mark.slow
def test_flips_anywhere_commit_no_wrong_byte(proxied):
    anywhere = {(direction, name) for direction in PARTS for name in PARTS[direction]}
    flips = Flips(2, anywhere, 10**9, odds=0.03)
    proxied(flips)
    taken = 0
    with connect_trainer() as trainer, connect_sampler(trainer) as sampler:
        for version in range(1, 21):
            params = oracle.params(SPECS, TRAINER, version)
            handle = tsr.sync_weights(params, to=trainer, version=version, wait=None)
            try:
                update = sampler.sync_weights(timeout=2)
            except (tsr.SyncTimeoutError, tsr.CorruptionError):
                continue
            oracle.assert_equal(update.params, SPECS, update.version, SAMPLER)
            taken += 1
        flips.left = 0
        final = oracle.params(SPECS, TRAINER, 21)
        tsr.sync_weights(final, to=trainer, version=21)
        update = sampler.sync_weights(min_version=21)
        oracle.assert_equal(update.params, SPECS, 21, SAMPLER)
        del handle
    assert flips.done > 10 and taken > 5


def test_flipped_bit_goes_unseen_where_nothing_is_verified(proxied):
    flips = Flips(4, {("replies", "payload")}, 1, odds=1.0)
    proxied(flips)
    with connect_trainer() as trainer, connect_sampler(trainer, verify="off") as sampler:
        tsr.sync_weights(oracle.params(SPECS, TRAINER, 1), to=trainer, version=1)
        with pytest.raises(AssertionError, match="of version 1"):
            oracle.assert_equal(sampler.sync_weights().params, SPECS, 1, SAMPLER)
        tsr.sync_weights(oracle.params(SPECS, TRAINER, 2), to=trainer, version=2)
        oracle.assert_equal(sampler.sync_weights().params, SPECS, 2, SAMPLER)
    assert flips.done == 1


def test_chunk_that_never_arrives_whole_is_refused_and_former_params_stay(proxied):
    flips = Flips(3, set(), 10**9, odds=1.0)
    proxied(flips)
    with connect_trainer() as trainer, connect_sampler(trainer) as sampler:
        first = oracle.params(SPECS, TRAINER, 1)
        tsr.sync_weights(first, to=trainer, version=1)
        former = sampler.sync_weights()
        flips.wanted = {("replies", "payload")}
        second = oracle.params(SPECS, TRAINER, 2)
        handle = tsr.sync_weights(second, to=trainer, version=2, wait=None)
        with pytest.raises(tsr.CorruptionError, match="does not match its checksum"):
            sampler.sync_weights()
        assert sampler.current is former
        oracle.assert_equal(former.params, SPECS, 1, SAMPLER)
        flips.wanted = set()
        update = sampler.sync_weights()
        assert handle.result().replicas == {"s": 2}
        oracle.assert_equal(update.params, SPECS, 2, SAMPLER)
        oracle.assert_equal(former.params, SPECS, 1, SAMPLER)
