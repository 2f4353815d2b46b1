import pytest
from bench_commands import measured, needs_namespaces

ONE = ("--model=one-big", "--rounds=1")


@pytest.mark.slow
@pytest.mark.end_to_end
def test_replay_shows_what_more_chunks_cost(tmp_path):
    sizes = ("--nbytes=1000000", "--chunk_nbytes=16384", "--large_chunk_nbytes=131072")
    figures = measured(tmp_path, "replay", "--rounds=1", *sizes)
    names = [figure["name"] for figure in figures]
    assert names == ["8 chunks", "61 chunks", "for each 10,000 more"]
    large, small, each = (figure["samples"][0] for figure in figures)
    assert each == pytest.approx((small - large) / 53 * 10_000)


@pytest.mark.slow
@pytest.mark.end_to_end
def test_memory_is_held_against_the_same_programs_without_us(tmp_path):
    figures = measured(tmp_path, "memory", *ONE, "--nbytes=50000000", "--versions=2")
    of = {figure["name"]: figure["samples"][0] for figure in figures}
    without = {figure["name"]: figure["limit"]["samples"][0] for figure in figures}
    for role in ("trainer", "sampler"):
        assert of[f"{role}, more"] == pytest.approx(of[role] - without[role])
    assert of["sampler, more"] > without["sampler, more"] / 2  # a second generation was there


@pytest.mark.slow
@needs_namespaces
@pytest.mark.end_to_end
def test_overlap_measures_the_step_beside_a_sync(tmp_path):
    sizes = (*ONE, "--nbytes=10000000", "--rate=400", "--step=0.01")
    figures = measured(tmp_path, "overlap", *sizes)
    assert [(figure["name"], len(figure["samples"])) for figure in figures] == [
        ("trainer blocked by wait=None", 2),
        ("step during a sync, not donating", 1),
        ("step during a sync, donating", 1),
    ]
