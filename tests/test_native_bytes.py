"""The core's checksums, casts and memory against slow Python and against JAX."""

import os
import subprocess
import sys
from itertools import permutations

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_sync_rl import _native
from tpu_sync_rl.errors import SyncError

# Values of FloatKind in csrc/cast.h.
KINDS = {
    "float16": 1,
    "bfloat16": 2,
    "float32": 3,
    "float64": 4,
    "float8_e4m3fn": 5,
    "float8_e5m2": 6,
}
SMALL = [name for name in KINDS if name not in ("float32", "float64")]


def one_box(shape) -> _native.BoxLayout:
    box = np.array([[0, extent] for extent in shape], np.int64)
    return _native.BoxLayout(
        np.array(shape, np.int64), box, np.array([0, 1], np.uint32), np.zeros(1, np.uint32)
    )


def copied(source: np.ndarray, dtype=None, num_threads: int = 2) -> np.ndarray:
    """`source` as `LocalCopy` moves it into dense memory of `dtype` (its own where None)."""
    dtype = source.dtype if dtype is None else jnp.dtype(dtype)
    from_kind = KINDS.get(source.dtype.name, 0)
    op = 0 if dtype == source.dtype else from_kind << 4 | KINDS[dtype.name]
    layouts = [one_box(source.shape), one_box(source.shape)]
    pair = [0, 0, 0, 1, source.itemsize, dtype.itemsize, op]
    plan = _native.make_plan(layouts, np.array([pair], np.uint32), 0, 1 << 16)
    zero = np.zeros(1, np.uint32)
    directory = _native.ShardDirectory(
        zero,
        zero,
        np.array([source.itemsize], np.uint32),
        np.array([from_kind], np.uint8),
        np.array([source.ndim], np.uint32),
        np.array([[0, extent] for extent in source.shape], np.int64),
        1,
    )
    sink = np.zeros(source.shape, dtype)
    addresses = np.array([source.ctypes.data], np.uint64)
    strides = np.array(source.strides, np.int64)
    sink_addresses = np.array([sink.ctypes.data], np.uint64)
    copy = _native.LocalCopy(plan, directory, addresses, strides, sink_addresses, num_threads)
    copy.set_pinned(1)
    copy.finish()
    return sink


def every_pattern(name: str) -> np.ndarray:
    dtype = jnp.dtype(name)
    return np.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype)


def edges(dtype) -> np.ndarray:
    """Random bits, and numbers around the steps of every small kind, of both signs."""
    rng = np.random.default_rng(5)
    itemsize = np.dtype(dtype).itemsize
    random = rng.integers(0, 1 << 64, 100_000, np.uint64).astype(f"u{itemsize}").view(dtype)
    with np.errstate(all="ignore"):
        steps = np.concatenate([every_pattern(name).astype(dtype) for name in SMALL])
        steps = np.unique(steps[np.isfinite(steps)])
        middles = (steps[:-1] + steps[1:]) / 2
        around = [
            np.nextafter(x, dtype(way)) for x in (steps, middles) for way in (-np.inf, np.inf)
        ]
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], dtype)
    return np.concatenate([random, steps, middles, *around, special])


def assert_same_floats(actual: np.ndarray, expected: np.ndarray) -> None:
    """Bit for bit, but for the payload of a NaN."""
    assert actual.dtype == expected.dtype
    bits = f"u{actual.itemsize}"
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual.view(bits)[~nan], expected.view(bits)[~nan])


@pytest.mark.parametrize(("source", "to"), list(permutations([*SMALL, "float32"], 2)))
def test_casts_agree_with_jax(source, to):
    values = every_pattern(source) if source in SMALL else edges(np.float32)
    expected = np.asarray(jnp.asarray(values).astype(to))
    assert_same_floats(copied(values, to), expected)
    assert_same_floats(copied(values[::3], to), expected[::3])


@pytest.mark.parametrize(
    ("source", "to"),
    [
        ("float64", "float32"),
        ("float64", "float16"),
        ("float32", "float64"),
        ("float16", "float64"),
        ("bfloat16", "float64"),
    ],
)
def test_casts_of_float64_agree_with_numpy(source, to):
    # Not with JAX: on CPU, XLA turns subnormal float32 numbers into zero here and goes through
    # float32 on its way from float64 to the small kinds, so it rounds twice.
    values = every_pattern(source) if source in SMALL else edges(getattr(np, source))
    with np.errstate(all="ignore"):
        expected = values.astype(to)
    assert_same_floats(copied(values, to), expected)
    assert_same_floats(copied(values[::3], to), expected[::3])


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "complex64", "complex128"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_copies_any_order_of_dimensions(dtype, num_threads):
    rng = np.random.default_rng(1)
    shape = (5, 33, 2, 70)
    nbytes = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    dense = rng.integers(0, 256, nbytes, np.uint8).view(jnp.dtype(dtype)).reshape(shape)
    for axes in [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1), (1, 3, 0, 2)]:
        for view in (dense.transpose(axes), dense[:, 1::2].transpose(axes)):
            assert copied(view, num_threads=num_threads).tobytes() == view.tobytes()


def test_a_local_copy_refuses_arrays_that_do_not_fit():
    plan = _native.make_plan(
        [one_box((4,))], np.array([[0, 0, 0, 0, 4, 4, 0]], np.uint32), 0, 1 << 16
    )
    zero = np.zeros(1, np.uint32)
    four, kind, ranges = zero + 4, np.zeros(1, np.uint8), np.array([0, 4], np.int64)
    directory = _native.ShardDirectory(zero, zero, four, kind, zero + 1, ranges, 1)
    addresses = np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="2 addresses for 1 shards"):
        _native.LocalCopy(plan, directory, addresses, np.zeros(1, np.int64), addresses[:1], 1)
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        _native.LocalCopy(plan, directory, [0], np.zeros(1, np.int64), addresses[:1], 1)


def slow_crc32c(data: bytes, crc: int = 0) -> int:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def test_crc32c_agrees_with_a_table():
    data = np.random.default_rng(3).integers(0, 256, 30_000, np.uint8)
    assert _native.crc32c(b"123456789") == 0xE3069283
    for nbytes in (0, 1, 7, 64, 575, 576, 577, 3071, 3072, 30_000):
        assert _native.crc32c(data[:nbytes]) == slow_crc32c(data[:nbytes].tobytes())
    half = _native.crc32c(memoryview(data)[:12_345])
    assert _native.crc32c(data[12_345:], half) == slow_crc32c(data.tobytes())
    assert _native.crc32c(data.view("<f4")) == _native.crc32c(data)


def test_crc32c_takes_contiguous_buffers_alone():
    with pytest.raises(ValueError, match="contiguous"):
        _native.crc32c(np.zeros(8, np.uint8)[::2])
    with pytest.raises(TypeError, match="bytes-like"):
        _native.crc32c("text")


def told_to_use(level: str) -> str:
    """What a process says of its kernels where TSR_CPU is `level`, or how it refuses."""
    program = (
        "from tpu_sync_rl import _native as n\n"
        "print(n.cpu_level(), n.crc32c_implementation(), n.crc32c(b'123456789'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TSR_CPU": level},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout if done.returncode == 0 else done.stderr


@pytest.mark.parametrize("level", _native.cpu_levels())
def test_every_level_that_the_cpu_has_can_be_asked_for(level):
    used, implementation, crc = told_to_use(level).split()
    assert used == level
    assert (implementation == "table") == (level == "portable")
    assert int(crc) == 0xE3069283


@pytest.mark.parametrize("level", ["avx9", ""])
def test_level_that_the_cpu_lacks_is_refused(level):
    has = ", ".join(_native.cpu_levels())
    assert f"ValueError: TSR_CPU is '{level}', expected a level that this CPU has: {has}" in (
        told_to_use(level)
    )


def test_host_memory_is_a_writable_buffer_that_outlives_its_owner():
    memory = _native.HostMemory(5_000_000, 2)
    view = np.frombuffer(memory, np.uint8)
    assert memory.nbytes == view.nbytes == 5_000_000
    assert memory.address == view.ctypes.data
    assert memory.address % (2 << 20) == 0
    assert not view.any()
    del memory
    view[:] = 7
    assert int(view.sum()) == 7 * view.size


def test_host_memory_says_what_it_was_refused():
    with pytest.raises(SyncError, match=r"mmap of .* bytes of host memory: Cannot allocate memory"):
        _native.HostMemory(1 << 55, 1)
    with pytest.raises(ValueError, match="num_threads is 0"):
        _native.HostMemory(1, 0)
