"""The manifest: its bytes and digest, what is refused of a peer's, and how two are compared."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_sync_rl.manifest import BoxLayout, Leaf, Manifest, Pair, Sides, changes, match


def _whole(shape: tuple[int, ...], holders: tuple[int, ...] = (0,)) -> BoxLayout:
    """One box, held by each of `holders`."""
    boxes = np.array([[(0, extent) for extent in shape]], np.int64).reshape(1, len(shape), 2)
    return BoxLayout(
        shape, boxes, np.array([0, len(holders)], np.uint32), np.array(holders, np.uint32)
    )


def _halves(extent: int) -> BoxLayout:
    """A vector cut in two, held by processes 0 and 1, and the second half by 2 as well."""
    boxes = np.array([[[0, extent // 2]], [[extent // 2, extent]]], np.int64)
    return BoxLayout(
        (extent,), boxes, np.array([0, 1, 3], np.uint32), np.array([0, 1, 2], np.uint32)
    )


def _manifest(*leaves: tuple[str, str, tuple[int, ...]]) -> Manifest:
    itemsizes = {"bfloat16": 2, "float16": 2, "float64": 8}
    rows = sorted(leaves)
    layouts = tuple(_whole(shape + ((2,) if "key<" in dtype else ())) for _, dtype, shape in rows)
    made = tuple(
        Leaf(key, dtype, itemsizes.get(dtype, 4), shape, index)
        for index, (key, dtype, shape) in enumerate(rows)
    )
    return Manifest(made, layouts, 1)


def test_boxes_of_a_process_are_those_that_it_holds() -> None:
    layout = _halves(8)
    assert layout.boxes_of(0).tolist() == [0]
    assert layout.boxes_of(1).tolist() == [1]
    assert layout.boxes_of(2).tolist() == [1]
    assert layout.boxes_of(3).tolist() == []


def test_nbytes_count_every_element_once() -> None:
    layouts = (_halves(8), _whole((3, 2), holders=(0, 1, 2)), _whole(()), _whole((0, 5)))
    leaves = (
        Leaf("a", "bfloat16", 2, (8,), 0),
        Leaf("k", "key<fry>", 4, (3,), 1),
        Leaf("s", "float32", 4, (), 2),
        Leaf("z", "float32", 4, (0, 5), 3),
    )
    assert Manifest(leaves, layouts, 3).nbytes == 16 + 24 + 4


def test_float_kind_is_that_of_dtypes_that_can_be_cast() -> None:
    kinds = {
        dtype: Leaf("w", dtype, 4, (), 0).float_kind
        for dtype in ("float16", "bfloat16", "float32", "float64", "int32", "float8_e4m3fn")
    }
    assert list(kinds.values()) == [1, 2, 3, 4, 0, 0]


_EXTENTS = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.tuples(st.sampled_from(["float32", "bool", "key<fry>"]), _EXTENTS),
        max_size=5,
    )
)
def test_a_decoded_manifest_is_the_one_encoded(leaves: dict[str, Any]) -> None:
    manifest = _manifest(*((key, *rest) for key, rest in leaves.items()))
    decoded = Manifest.decode(manifest.encoded)
    assert decoded.leaves == manifest.leaves
    assert [x.identity() for x in decoded.layouts] == [x.identity() for x in manifest.layouts]
    assert decoded.num_processes == manifest.num_processes
    assert decoded.digest == manifest.digest
    assert match(manifest, decoded)[1] == []


def test_digest_tells_manifests_apart() -> None:
    shapes = [("w", "float32", (4,)), ("w", "float32", (5,)), ("w", "int32", (4,))]
    digests = {_manifest(leaf).digest for leaf in [*shapes, ("v", "float32", (4,))]}
    leaves = (Leaf("w", "float32", 4, (4,), 0),)
    digests |= {
        Manifest(leaves, (_halves(4),), 3).digest,
        Manifest(leaves, (_whole((4,), holders=(1,)),), 3).digest,
    }
    assert len(digests) == 6


def _decoded_with(change: Callable[[list[Any]], None]) -> Manifest:
    """Decodes a good manifest of a 2 x 4 leaf after `change` of its message."""
    layout = BoxLayout(
        (2, 4),
        np.array([[[0, 2], [0, 2]], [[0, 2], [2, 4]]], np.int64),
        np.array([0, 1, 2], np.uint32),
        np.array([0, 1], np.uint32),
    )
    leaves = (Leaf("a", "float32", 4, (2, 4), 0), Leaf("b", "float32", 4, (2, 4), 0))
    message = msgspec.msgpack.decode(Manifest(leaves, (layout,), 2).encoded)
    change(message)
    return Manifest.decode(msgspec.msgpack.encode(message))


def _set(*path_and_value: Any) -> Callable[[list[Any]], None]:
    *path, last, value = path_and_value

    def change(message: list[Any]) -> None:
        for step in path:
            message = message[step]
        message[last] = value

    return change


def _boxes(*ranges: int) -> bytes:
    return np.array(ranges, "<i8").tobytes()


def _counts(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


def test_the_manifest_that_the_refusals_change_is_good() -> None:
    assert len(_decoded_with(lambda message: None).leaves) == 2


# A message is [format, num_processes, [[shape, boxes, offsets, holders]], [[key, dtype, …]]].
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set(0, 2), "manifest of format 2, expected 1"),
        (_set(1, 0), "manifest of 0 processes"),
        (_set(1, "two"), "not a manifest: .*int"),
        (_set(2, 0, 0, 0, -2), r"layout of shape \[-2, 4\]"),
        (_set(2, 0, 0, [1] * 33), r"layout of shape \[1, 1"),
        (_set(2, 0, 0, [2**40, 2**40]), "layout of shape"),
        (_set(2, 0, 0, [2**63, 0]), "layout of shape"),
        (_set(2, 0, 1, b"1234567"), "broken layout"),
        (_set(2, 0, 1, _boxes(0, 2, 0, 4)), "broken layout"),
        (_set(2, 0, 2, b""), "wrong holders"),
        (_set(2, 0, 2, _counts(1, 2, 2)), "wrong holders"),
        (_set(2, 0, 2, _counts(0, 0, 2)), "wrong holders"),
        (_set(2, 0, 2, _counts(0, 2**32 - 1, 2)), "wrong holders"),
        (_set(2, 0, 3, _counts(0)), "wrong holders"),
        (_set(2, 0, 3, _counts(0, 2)), "wrong holders"),
        (_set(2, 0, 1, _boxes(0, 2, 0, 2, 0, 2, 2, 5)), r"box outside of shape \[2, 4\]"),
        (_set(2, 0, 1, _boxes(-1, 2, 0, 2, 0, 2, 2, 4)), r"box outside of shape \[2, 4\]"),
        (_set(2, 0, 1, _boxes(2, 0, 0, 2, 0, 2, 2, 4)), r"box outside of shape \[2, 4\]"),
        (_set(3, 1, 0, "a"), "leaf 'a' behind 'a'"),
        (_set(3, 0, 0, "c"), "leaf 'b' behind 'c'"),
        (_set(3, 1, 2, 0), "wrong about leaf 'b'"),
        (_set(3, 1, 2, 17), "wrong about leaf 'b'"),
        (_set(3, 1, 4, 1), "wrong about leaf 'b'"),
        (_set(3, 1, 4, -1), "wrong about leaf 'b'"),
        (_set(3, 1, 3, [2, 3]), "another layout than shape for leaf 'b'"),
        (_set(3, 1, 3, [2]), "another layout than shape for leaf 'b'"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    change: Callable[[list[Any]], None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _decoded_with(change)


@given(st.binary(max_size=64))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a manifest"):
        Manifest.decode(data)


@given(st.data())
def test_a_damaged_manifest_is_decoded_or_refused(data: st.DataObject) -> None:
    good = _manifest(("w", "float32", (4, 2)), ("x", "key<fry>", ())).encoded
    at = data.draw(st.integers(0, len(good) - 1))
    bad = good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :]
    try:
        decoded = Manifest.decode(bad)
    except ValueError:
        return
    assert decoded.encoded == bad or Manifest.decode(decoded.encoded).digest == decoded.digest


def test_leaves_are_matched_by_key_in_the_order_of_the_sink() -> None:
    source = _manifest(("a", "float32", (2,)), ("b", "int32", ()))
    pairs, differences = match(source, source)
    assert differences == []
    assert pairs == [Pair(0, 0, 0), Pair(1, 1, 0)]


def test_every_difference_is_listed_with_both_sides() -> None:
    source = _manifest(
        ("gone", "float32", (2,)),
        ("s", "float32", (2, 3)),
        ("t", "float32", (4,)),
        ("u", "int32", ()),
    )
    sink = _manifest(
        ("new", "bool", ()), ("s", "float32", (3, 2)), ("t", "bfloat16", (4,)), ("u", "uint32", ())
    )
    assert sorted(match(source, sink)[1]) == [
        "'gone': the trainer has float32[2], the sampler has no such leaf",
        "'new': the sampler wants bool[], the trainer has no such leaf",
        "'s': shape [2, 3] on the trainer, [3, 2] on the sampler",
        "'t': dtype float32 on the trainer, bfloat16 on the sampler (cast=True would convert it)",
        "'u': dtype int32 on the trainer, uint32 on the sampler",
    ]


def test_differences_call_the_sides_what_the_caller_does() -> None:
    source = _manifest(("gone", "float32", (2,)), ("s", "float32", (2,)))
    sink = _manifest(("new", "bool", ()), ("s", "int32", (3,)))
    _, differences = match(source, sink, rename={"odd": "x"}, sides=Sides("params", "to", "in"))
    assert differences == [
        "'odd': renamed, but params has no such leaf",
        "'new': to wants bool[], params has no such leaf",
        "'s': shape [2] in params, [3] in to",
        "'s': dtype float32 in params, int32 in to",
        "'gone': params has float32[2], to has no such leaf",
    ]


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("sink", ["float16", "bfloat16", "float32", "float64"])
def test_cast_turns_one_float_into_another(source: str, sink: str) -> None:
    kinds = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}
    pairs, differences = match(
        _manifest(("w", source, (2,))), _manifest(("w", sink, (2,))), cast=True
    )
    assert differences == []
    assert pairs == [Pair(0, 0, 0 if source == sink else kinds[source] << 4 | kinds[sink])]


@pytest.mark.parametrize(
    "dtypes", [("float32", "int32"), ("bool", "float32"), ("key<fry>", "key<rbg>")]
)
def test_cast_converts_floats_alone(dtypes: tuple[str, str]) -> None:
    source, sink = (_manifest(("w", dtype, (2,))) for dtype in dtypes)
    _, differences = match(source, sink, cast=True)
    assert differences == [
        f"'w': dtype {dtypes[0]} on the trainer, {dtypes[1]} on the sampler "
        "(cast=True converts only between float16, bfloat16, float32, float64)"
    ]


@pytest.mark.parametrize("rename", [{"old": "new"}, lambda key: key.replace("old", "new")])
def test_rename_leads_from_the_source_to_the_sink(rename: Any) -> None:
    source = _manifest(("a", "int32", ()), ("old", "float32", (2,)))
    sink = _manifest(("a", "int32", ()), ("new", "float32", (2,)))
    assert match(source, sink, rename=rename) == ([Pair(0, 0, 0), Pair(1, 1, 0)], [])


def test_rename_may_swap_two_leaves() -> None:
    manifest = _manifest(("a", "int32", ()), ("b", "int32", ()))
    pairs, differences = match(manifest, manifest, rename={"a": "b", "b": "a"})
    assert (pairs, differences) == ([Pair(1, 0, 0), Pair(0, 1, 0)], [])


def test_a_rename_of_two_leaves_to_one_is_a_difference() -> None:
    source = _manifest(("a", "int32", ()), ("b", "int32", ()))
    _, differences = match(source, _manifest(("a", "int32", ())), rename={"b": "a"})
    assert differences == ["'a': both 'a' and 'b' are renamed to it"]


def test_a_rename_of_an_unknown_leaf_is_a_difference() -> None:
    manifest = _manifest(("a", "int32", ()))
    _, differences = match(manifest, manifest, rename={"b": "c"})
    assert differences == ["'b': renamed, but the trainer has no such leaf"]


def test_a_rename_to_something_else_than_a_key_is_refused() -> None:
    manifest = _manifest(("a", "int32", ()))
    with pytest.raises(TypeError, match="rename makes None of 'a', expected a str"):
        match(manifest, manifest, rename=lambda key: None)  # type: ignore[arg-type,return-value]


def test_changes_name_leaves_that_are_not_alike() -> None:
    one = _manifest(("a", "float32", (4,)), ("b", "int8", ()), ("c", "int8", (2,)))
    other = _manifest(("a", "float32", (8,)), ("c", "int8", (2,)), ("d", "bool", (3,)))
    assert changes(one, one) == []
    assert changes(one, other) == [
        "'a': float32[4] against float32[8]",
        "'b': int8[] against no such leaf",
        "'d': no such leaf against bool[3]",
    ]
    halves = Manifest((Leaf("a", "float32", 4, (4,), 0),), (_halves(4),), 2)
    whole = Manifest((Leaf("a", "float32", 4, (4,), 0),), (_whole((4,)),), 2)
    assert changes(halves, whole) == ["'a': float32[4] against the same over other devices"]
