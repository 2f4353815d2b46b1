"""Faults that no checksum of a chunk can see: `verify="full"` does, and refuses the version."""

import ctypes
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from trainer_program import TrainerProgram

import tpu_sync_rl as tsr
from tpu_sync_rl import planner, verification
from tpu_sync_rl.generations import Generation
from tpu_sync_rl.transport import Fetcher

pytestmark = pytest.mark.end_to_end

AXES = ("fsdp", "tp")
SPECS = {
    **oracle.ODD_LEAVES,
    "twin/a": oracle.LeafSpec((16, 8), "float32", P("fsdp"), P("tp")),
    "twin/b": oracle.LeafSpec((16, 8), "float32", P("fsdp"), P("tp")),
}
COLUMNS = ("embed/table", "block/kernel")
TRAINER = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), AXES)
SAMPLER = Mesh(np.array(jax.devices()[4:8]).reshape(1, 4), AXES)
LIKE = oracle.like(SPECS, SAMPLER)
POSITION = {key: index for index, key in enumerate(sorted(SPECS))}


def flip(address: int) -> None:
    """Flips a bit of the byte there."""
    ctypes.c_uint8.from_address(address).value ^= 4


class Fault:
    """Strikes once, when it is armed."""

    def __init__(self, strike) -> None:
        self._strike = strike
        self.armed = False

    def __call__(self, *arguments):
        if not self.armed:
            return None
        self.armed = False
        return self._strike(*arguments)


@pytest.fixture
def after_arrays(monkeypatch):
    """Has a function change the arrays of a generation, once it is armed."""
    arrays = Generation.arrays

    def install(strike) -> Fault:
        fault = Fault(strike)

        def made(self):
            leaves = arrays(self)
            return fault(leaves) or leaves

        monkeypatch.setattr(Generation, "arrays", made)
        return fault

    return install


def params(version: int) -> dict[str, jax.Array]:
    return oracle.params(SPECS, TRAINER, version, COLUMNS)


def connect_sampler(trainer: tsr.TrainerSession, verify: str, **options) -> tsr.SamplerSession:
    options = {"like": LIKE, "chunk_nbytes": 4096, **options}
    return tsr.connect_sampler(
        coordinator=trainer.coordinator, replica="s", timeout=20, verify=verify, **options
    )


def assert_only_full_sees(fault: Fault, message: str) -> None:
    """Version 2 is struck: unseen by "wire", refused by "full", which gets it anew."""
    with tsr.connect_trainer(timeout=20) as trainer, connect_sampler(trainer, "wire") as sampler:
        tsr.sync_weights(params(1), to=trainer, version=1)
        sampler.sync_weights()
        fault.armed = True
        tsr.sync_weights(params(2), to=trainer, version=2)
        with pytest.raises(AssertionError):
            oracle.assert_equal(sampler.sync_weights().params, SPECS, 2, SAMPLER)
    with tsr.connect_trainer(timeout=20) as trainer, connect_sampler(trainer, "full") as sampler:
        tsr.sync_weights(params(1), to=trainer, version=1)
        former = sampler.sync_weights()
        oracle.assert_equal(former.params, SPECS, 1, SAMPLER)
        fault.armed = True
        second = params(2)
        handle = tsr.sync_weights(second, to=trainer, version=2, wait=None)
        with pytest.raises(tsr.CorruptionError, match=message) as refusal:
            sampler.sync_weights()
        assert "version 2 is not in process 0 of replica 's' what" in str(refusal.value)
        assert sampler.current is former
        update = sampler.sync_weights()
        assert handle.result().replicas == {"s": 2}
        oracle.assert_equal(update.params, SPECS, 2, SAMPLER)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("piece_nbytes", [100, 4 << 20])
def test_every_kind_of_leaf_passes(monkeypatch, cast, piece_nbytes):
    monkeypatch.setattr(verification, "_PIECE_NBYTES", piece_nbytes)
    specs, like = SPECS, LIKE
    if cast:
        specs = {"w": oracle.LeafSpec((64, 32), "float32", P("tp", "fsdp"), P(None, "tp"))}
        sharding = NamedSharding(SAMPLER, P(None, "tp"))
        like = {"renamed": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16, sharding=sharding)}
    options = {"like": like, "cast": cast, "rename": {"w": "renamed"} if cast else None}
    with (
        tsr.connect_trainer(timeout=20) as trainer,
        connect_sampler(trainer, "full", **options) as sampler,
    ):
        for version in (1, 2):
            given = oracle.params(specs, TRAINER, version, ("w",) if cast else COLUMNS)
            tsr.sync_weights(given, to=trainer, version=version)
            update = sampler.sync_weights()
            assert update.report.seconds["verify"] > 0.0
            if not cast:
                oracle.assert_equal(update.params, specs, version, SAMPLER)


def test_sampler_with_leaves_by_column_and_copies_of_shards_passes():
    both = NamedSharding(SAMPLER, P())
    columns = Format(Layout((1, 0)), NamedSharding(SAMPLER, P("tp")))
    first = {"a": jnp.zeros((8, 4)), "b": jnp.zeros((6, 10))}
    like = {"a": jax.device_put(first["a"], columns), "b": jax.device_put(first["b"], both)}
    with (
        tsr.connect_trainer(timeout=20) as trainer,
        connect_sampler(trainer, "full", like=like) as sampler,
    ):
        given = {
            key: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) for key, x in first.items()
        }
        tsr.sync_weights(given, to=trainer)
        update = sampler.sync_weights()
        for key, array in given.items():
            np.testing.assert_array_equal(update.params[key], array)


@pytest.fixture
def shared():
    """A trainer of two processes that both hold "bias" and "norm" whole, and half of "kernel".

    The loads of what is moved and of what is summed differ, so that one by the other would choose
    different processes for "norm".
    """
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    specs = {"bias": ((5 << 18,), P()), "kernel": ((64, 512), P("fsdp")), "norm": ((512,), P())}
    params = {
        key: jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), of)
        for key, (shape, spec) in specs.items()
        for of in [NamedSharding(mesh, spec)]
    }
    with TrainerProgram([[device] for device in mesh.devices.flat]) as program:
        yield program, params


def connect_whole(program: TrainerProgram, params) -> tsr.SamplerSession:
    """A sampler of one process, which wants everything."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[4])
    like = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for k, x in params.items()}
    return tsr.connect_sampler(
        coordinator=program.coordinator, replica="s", like=like, timeout=20, verify="full"
    )


def test_processes_let_go_of_leaves_that_are_not_read_from_them(shared, monkeypatch):
    program, params = shared
    begin_digests = Fetcher.begin_digests

    def begin_late(self, version, requests):
        pins = [session._source._pins for session in program.sessions]
        keys = [leaf.key for leaf in program.sessions[0]._source.manifest.leaves]
        deadline = time.monotonic() + 20
        while all(pin._pinned[1].holds(keys.index("norm")) for pin in pins):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        begin_digests(self, version, requests)

    monkeypatch.setattr(Fetcher, "begin_digests", begin_late)
    with connect_whole(program, params) as sampler:
        handles = program.sync(params, wait=None)
        update = sampler.sync_weights()
        for key, array in params.items():
            np.testing.assert_array_equal(update.params[key], array)
        for handle in handles:
            handle.result()


def test_digests_that_do_not_come_do_not_move_the_version_again(shared, monkeypatch):
    program, params = shared
    begin, begin_digests, begun = Fetcher.begin, Fetcher.begin_digests, []

    def counted(self, version, *arguments):
        begun.append(version)
        begin(self, version, *arguments)

    def strike(self, version, requests):
        raise tsr.PeerLostError("no digest comes")

    fault = Fault(strike)
    fault.armed = True

    def failing(self, version, requests):
        fault(self, version, requests)
        begin_digests(self, version, requests)

    monkeypatch.setattr(Fetcher, "begin", counted)
    monkeypatch.setattr(Fetcher, "begin_digests", failing)
    with connect_whole(program, params) as sampler:
        for version in (1, 2):
            program.sync(params)
            update = sampler.sync_weights()
            assert (update.version, begun[-1]) == (version, version)
            assert update.report.seconds["verify"] > 0.0
            np.testing.assert_array_equal(update.params["kernel"], params["kernel"])
        assert begun == [1, 2]
        assert not fault.armed


def test_bit_that_flips_in_the_memory_of_a_generation_is_seen(after_arrays):
    def strike(leaves):
        shard = leaves[POSITION["odd/mask"]].addressable_shards[1]
        flip(shard.data.unsafe_buffer_pointer())

    fault = after_arrays(strike)
    assert_only_full_sees(fault, "leaf 'odd/mask', box \\[0:4, 3:6\\]$")


def test_bit_that_flips_in_the_memory_of_a_source_is_seen(monkeypatch):
    address = 0
    end = Fetcher.end

    def strike():
        flip(address)

    fault = Fault(strike)

    def ended(self):
        fault()
        end(self)

    monkeypatch.setattr(Fetcher, "end", ended)
    with tsr.connect_trainer(timeout=20) as trainer, connect_sampler(trainer, "full") as sampler:
        given = params(1)
        address = given["odd/count"].addressable_shards[0].data.unsafe_buffer_pointer()
        fault.armed = True
        handle = tsr.sync_weights(given, to=trainer, version=1, wait=None)
        with pytest.raises(tsr.CorruptionError, match=r"leaf 'odd/count', box \[\]$"):
            sampler.sync_weights()
        update = sampler.sync_weights()  # what the trainer's memory has now
        handle.result()
        np.testing.assert_array_equal(update.params["odd/count"], given["odd/count"])


def test_leaves_that_are_swapped_are_seen(after_arrays):
    def strike(leaves):
        one, other = POSITION["twin/a"], POSITION["twin/b"]
        leaves[one], leaves[other] = leaves[other], leaves[one]

    assert_only_full_sees(after_arrays(strike), r"leaf 'twin/a', .*leaf 'twin/b', ")


def test_shards_that_are_permuted_are_seen(after_arrays):
    def strike(leaves):
        array = leaves[POSITION["embed/table"]]
        parts = [np.asarray(shard.data) for shard in array.addressable_shards]
        devices = [shard.device for shard in array.addressable_shards]
        turned = [jax.device_put(x, d) for x, d in zip(parts[1:] + parts[:1], devices, strict=True)]
        leaves[POSITION["embed/table"]] = jax.make_array_from_single_device_arrays(
            array.shape, array.sharding, turned
        )

    assert_only_full_sees(after_arrays(strike), r"leaf 'embed/table', box \[0:16, 0:32\];")


def test_bytes_that_land_elsewhere_are_seen(monkeypatch):
    begin = Fetcher.begin

    def strike(addresses):
        one, other = addresses[0], addresses[1]
        addresses[:2] = other, one

    fault = Fault(strike)

    def begun(self, version, sink_addresses):
        addresses = sink_addresses.copy()
        fault(addresses)
        begin(self, version, addresses)

    monkeypatch.setattr(Fetcher, "begin", begun)
    assert_only_full_sees(fault, r"leaf 'block/bias', box \[0:12\];")


def test_plan_that_mistakes_one_leaf_for_another_is_seen(monkeypatch):
    make_plan = planner.make_plan
    twins = {POSITION["twin/a"], POSITION["twin/b"]}

    def mistaken(source, sink, pairs, **options):
        one, other = (i for i, pair in enumerate(pairs) if pair.sink_leaf in twins)
        wrong = list(pairs)
        wrong[one] = dataclasses.replace(pairs[one], source_leaf=pairs[other].source_leaf)
        wrong[other] = dataclasses.replace(pairs[other], source_leaf=pairs[one].source_leaf)
        plan = make_plan(source, sink, wrong, **options)
        return dataclasses.replace(plan, pairs=tuple(pairs))

    monkeypatch.setattr(planner, "make_plan", mistaken)
    with tsr.connect_trainer(timeout=20) as trainer, connect_sampler(trainer, "full") as sampler:
        given = params(1)
        handle = tsr.sync_weights(given, to=trainer, version=1, wait=None)
        with pytest.raises(tsr.CorruptionError, match=r"leaf 'twin/a', .*leaf 'twin/b', "):
            sampler.sync_weights()
        assert not handle.done()
