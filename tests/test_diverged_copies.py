"""Arrays that differ between the trainer's processes where their sharding says that they do not."""

import time
from functools import partial

import jax
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import Program, wait_for_file
from trainer_program import TrainerProgram

import tpu_sync_rl as tsr
from tpu_sync_rl import program as programs
from tpu_sync_rl import verification
from tpu_sync_rl.buffers import Aliases, AliasResolver
from tpu_sync_rl.copy_digests import CopyDigests, combined
from tpu_sync_rl.shared_boxes import SharedBoxes
from tpu_sync_rl.snapshot import Snapshot

DEVICES = np.array(jax.devices()[:4]).reshape(2, 2)
PROCESSES = DEVICES.tolist()  # two of two devices each
MESH = Mesh(DEVICES, ("dp", "fsdp"))  # each process is a whole replica, cut by fsdp
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[4])
# JAX gives one shard of what is fully replicated over a client's devices: that can't differ here.
SPECS = {"columns": P(None, "fsdp"), "count": P(), "kernel": P("fsdp"), "rows": P(("dp", "fsdp"))}


def array(key: str, spec: P, *, differs_on: int | None = None) -> jax.Array:
    """A leaf that is another one on a device, though its box is held elsewhere as well."""
    sharding = NamedSharding(MESH, spec)
    shape = () if key == "count" else (64, 8)
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    parts = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        part = np.array(value[index])
        if differs_on is not None and device == jax.devices()[differs_on]:
            part.reshape(-1)[-1] += 1
        parts.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def params(**differs_on: int) -> dict[str, jax.Array]:
    return {key: array(key, of, differs_on=differs_on.get(key)) for key, of in SPECS.items()}


def connect(program: TrainerProgram, like, **options) -> tsr.SamplerSession:
    like = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=HERE) for k, x in like.items()}
    options = {"coordinator": program.coordinator, "replica": "s", "timeout": 20, **options}
    return tsr.connect_sampler(like=like, **options)


def assert_whole(update: tsr.Update) -> None:
    for key, expected in params().items():
        np.testing.assert_array_equal(update.params[key], expected)


@pytest.mark.end_to_end
@pytest.mark.parametrize("staging", ["direct", "pinned_host"])
@pytest.mark.parametrize("wait", ["received", None])
def test_first_version_with_different_copies_is_refused_everywhere(staging, wait):
    given = params(kernel=3, columns=2)
    with TrainerProgram(PROCESSES, staging=staging) as program, connect(program, given) as sampler:
        if wait is None:
            handles = program.sync(given, wait=None)
            failures = []
            for handle in handles:
                with pytest.raises(tsr.CorruptionError) as failure:
                    handle.result()
                failures.append(failure.value)
        else:
            failures = program.failures(given)
        assert {type(failure) for failure in failures} == {tsr.CorruptionError}
        [text] = {str(failure) for failure in failures}
        assert "leaf 'columns': process 0 against process 1; leaf 'kernel': process 0" in text
        assert "'count'" not in text and "'rows'" not in text
        assert sampler.sync_weights(wait=False) is None
        reports = program.sync(params())  # the same version, by equal copies
        assert [report.version for report in reports] == [1, 1]
        assert all(report.seconds["compare"] > 0 for report in reports)
        assert_whole(sampler.sync_weights())


@pytest.mark.end_to_end
@pytest.mark.slow
def test_whole_copies_that_differ_between_programs_are_refused(tmp_path):
    address_file = str(tmp_path / "address")
    with Program("diverged_trainer", processes=2, devices=1, address_file=address_file) as trainer:
        like = {"w": jax.ShapeDtypeStruct((64, 8), np.float32, sharding=HERE)}
        coordinator = wait_for_file(tmp_path / "address")
        with tsr.connect_sampler(
            coordinator=coordinator, replica="s", like=like, timeout=60
        ) as sampler:
            update = sampler.sync_weights()
        texts = trainer.results()
        assert texts[0] == texts[1] and "leaf 'w': process 0 against process 1" in texts[0]
        np.testing.assert_array_equal(update.params["w"], np.zeros((64, 8), np.float32))


@pytest.mark.end_to_end
@pytest.mark.parametrize("verify", ["wire", "full"])
def test_later_versions_are_compared_on_demand(verify):
    with TrainerProgram(PROCESSES, verify=verify) as program, connect(program, params()) as sampler:
        program.sync(params())
        assert_whole(sampler.sync_weights())
        if verify == "wire":
            reports = program.sync(params(columns=0))
            assert "compare" not in reports[0].seconds
            return
        [text] = {str(failure) for failure in program.failures(params(columns=0))}
        assert "version 2 was not announced" in text and "leaf 'columns'" in text
        assert sampler.sync_weights(wait=False) is None
        program.sync(params())
        with connect(program, params(), replica="late") as late:
            assert_whole(late.sync_weights())


@pytest.mark.end_to_end
def test_copies_of_one_process_are_its_own_affair():
    split = [[device] for device in DEVICES[0]]  # two processes, each half of "kernel"
    mesh = Mesh(DEVICES[0], ("fsdp",))
    value = np.ones((64, 8), np.float32)
    given = {"w": jax.device_put(value, NamedSharding(mesh, P("fsdp")))}
    with TrainerProgram(split) as program:
        reports = program.sync(given)
        assert "compare" not in reports[0].seconds
        assert program.sessions[0]._source._copy_digests.is_empty
    with tsr.connect_trainer(timeout=20) as trainer:
        assert "compare" not in tsr.sync_weights(params(columns=0), to=trainer).seconds


GRID = Mesh(DEVICES, ("fsdp", "tp"))


def digests_of(tree, process: int, *, staged: bool = False, deadline_s: float = 20.0):
    """Of what a process shares in `tree`: the digests, and the keys of the leaves, per group."""
    of_device = {device: p for p, held in enumerate(PROCESSES) for device in held}
    snapshot = partial(Snapshot, window_nbytes=1 << 20)
    resolver = AliasResolver(
        programs.Program(process, 2, of_device), snapshot if staged else Aliases
    )
    aliases, arrays = resolver.resolve(tree)
    if isinstance(aliases, Snapshot):
        aliases.stage(arrays, lambda _: None)
    else:
        aliases.pin(arrays)
    copies = CopyDigests(aliases.manifest, aliases.shards, process)
    shared = SharedBoxes(aliases.manifest)
    keys = {
        group: [aliases.manifest.leaves[leaf].key for leaf in shared.leaves(group)]
        for group in shared.of_process(process)
    }
    return copies.of(aliases, time.monotonic() + deadline_s), keys


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("piece_nbytes", [60, 4 << 20])
def test_equal_copies_of_any_kind_have_equal_digests(monkeypatch, staged, piece_nbytes):
    monkeypatch.setattr(verification, "_PIECE_NBYTES", piece_nbytes)
    specs = oracle.ODD_LEAVES
    columns = oracle.params(specs, GRID, 1, ("embed/table", "block/kernel"))
    (one, keys), (other, _) = (digests_of(columns, p, staged=staged) for p in range(2))
    assert one == other
    shared = [key for key, spec in specs.items() if "fsdp" not in str(spec.trainer)]
    assert sorted(key for of_group in keys.values() for key in of_group) == sorted(shared)
    changed, _ = digests_of(oracle.params(specs, GRID, 2), 0, staged=staged)
    for group, of_group in keys.items():
        for index, key in enumerate(of_group):
            at = slice(8 * index, 8 * index + 8)
            assert (changed[group][at] == one[group][at]) == (0 in specs[key].shape), key


def test_digest_of_a_group_is_short_however_many_leaves_it_has():
    digests, _ = digests_of(params(), 0)
    assert [len(digest) for digest in combined(digests).values()] == [16] * len(digests)
    assert combined({0: bytes(8)}) != combined({0: bytes(16)})


def test_deadline_ends_a_comparison():
    with pytest.raises(tsr.SyncTimeoutError, match="copies on the trainer's processes were being"):
        digests_of(params(), 0, deadline_s=0.0)
