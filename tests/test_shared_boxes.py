"""Boxes that several processes hold, against a look at every box."""

from hypothesis import given, settings
from test_plan import Case, cases, layout, manifest

from tpu_sync_rl.shared_boxes import SharedBoxes

WHOLE, TOP, BOTTOM = ((0, 8),), ((0, 4),), ((4, 8),)


def test_fsdp_within_dp_shares_a_box_with_the_same_rank_of_other_groups():
    fsdp_in_dp = layout((8,), {TOP: {0, 2}, BOTTOM: {1, 3}})
    replicated = layout((8,), {WHOLE: {0, 1, 2, 3}})
    sharded = layout((8,), {((i, i + 2),): {i // 2} for i in range(0, 8, 2)})
    shared = SharedBoxes(manifest([fsdp_in_dp, replicated, sharded], num_processes=4))
    assert shared.groups == [(0, 2), (1, 3), (0, 1, 2, 3)]
    assert [shared.of_process(p) for p in range(4)] == [[0, 2], [1, 2], [0, 2], [1, 2]]
    assert [shared.leaves(group) for group in range(3)] == [[0], [0], [1]]
    assert (shared.boxes(0, 0), shared.boxes(1, 0), shared.boxes(0, 2)) == ([0], [1], [])


def test_program_of_one_process_shares_nothing():
    assert SharedBoxes(manifest([layout((8,), {WHOLE: {0}})], num_processes=1)).groups == []


@given(cases())
@settings(max_examples=60, deadline=None)
def test_every_shared_box_is_in_the_one_group_of_its_holders(case: Case):
    shared = SharedBoxes(case.source)
    found = {
        (leaf, box): shared.groups[group]
        for group in range(len(shared.groups))
        for leaf in shared.leaves(group)
        for box in shared.boxes(group, leaf)
    }
    expected = {}
    for index, leaf in enumerate(case.source.leaves):
        held = case.source.layouts[leaf.layout]
        for box in range(len(held.boxes)):
            holders = held.holders[held.holder_offsets[box] : held.holder_offsets[box + 1]]
            if len(holders) > 1:
                expected[index, box] = tuple(holders.tolist())
    assert found == expected
    assert len(set(shared.groups)) == len(shared.groups)
