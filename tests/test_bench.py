import json
import shutil
import socket
import sys

import jax
import numpy as np
import pytest
from bench_commands import add_to_path, measured, needs_namespaces, run_bench
from jax.sharding import AxisType

from tpu_sync_rl import _native
from tpu_sync_rl.bench import _limits, models, plan, tiles
from tpu_sync_rl.bench.__main__ import main
from tpu_sync_rl.bench.cases import Layout
from tpu_sync_rl.bench.figures import Figure
from tpu_sync_rl.bench.limit import Limit
from tpu_sync_rl.bench.memcpy_limit import WAYS, MemcpyLimit
from tpu_sync_rl.bench.raw_sockets import ALL, WRITE_NBYTES, Connections, RawSockets
from tpu_sync_rl.manifest import Manifest


def mesh(fsdp, tp):
    return jax.make_mesh((fsdp, tp), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    ("name", "num_leaves", "nbytes"),
    [
        ("list", 288, 1_073_721_600),
        ("gemma2-2b", 262, 5_229_153_792),
        ("many-small", 10_000, 41_600_000),
        ("one-big", 1, 1 << 30),
    ],
)
def test_models_have_their_published_sizes(name, num_leaves, nbytes):
    leaves = models.model(name)
    assert (len(leaves), models.model_nbytes(leaves)) == (num_leaves, nbytes)


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_scaled_model_is_about_as_large_as_asked_and_divisible(name):
    leaves = models.model(name, 8_000_000)
    assert 0.7 < models.model_nbytes(leaves) / 8e6 < 1.5
    assert not any(n % 16 for shape, _ in leaves.values() for n in shape)


def test_contents_do_not_depend_on_mesh_or_order_of_leaves():
    leaves = models.model("list", 1_000_000)
    params = models.make_params(models.structs(leaves, mesh(1, 4)), 3)
    target = models.structs(leaves, mesh(2, 2))
    moved = {key: jax.device_put(params[key], target[key].sharding) for key in sorted(leaves)}
    assert models.wrong_leaves(moved, 3) == []
    assert models.wrong_leaves(moved, 4) == sorted(leaves)


def test_version_is_made_in_the_memory_of_the_one_before():
    like = models.structs(models.model("one-big", 1_000_000), mesh(1, 1))
    first = models.make_params(like, 1)
    address = first["leaf"].unsafe_buffer_pointer()
    second = models.make_params(like, 2, first)
    assert first["leaf"].is_deleted()
    assert second["leaf"].unsafe_buffer_pointer() == address


@pytest.mark.parametrize("change", ["one bit", "two elements swapped", "two leaves swapped"])
def test_wrong_bytes_are_found(change):
    leaves = models.model("one-big", 100_000)
    shape, spec = leaves["leaf"]
    like = models.structs({"leaf": (shape, spec), "other": (shape, spec)}, mesh(2, 2))
    params = models.make_params(like, 1)
    bits = {key: np.array(leaf).view(np.uint16) for key, leaf in params.items()}
    if change == "one bit":
        bits["leaf"][7, 9] ^= 1
    elif change == "two elements swapped":
        bits["leaf"][[7, 8], 9] = bits["leaf"][[8, 7], 9]
    else:
        bits["leaf"] = bits["other"]
    changed = {
        key: jax.device_put(rows.view(models.DTYPE), like[key].sharding)
        for key, rows in bits.items()
    }
    assert models.wrong_leaves(changed, 1) == ["leaf"]


def test_layout_counts_the_devices_of_all_processes():
    layout = Layout.parse("2x4", 4)
    assert (layout.num_devices, layout.num_processes, str(layout)) == (8, 4, "2x4")


@pytest.mark.parametrize(
    ("text", "num_processes", "message"),
    [
        ("4", 1, "a mesh is FSDPxTP, such as 1x4, not '4'"),
        ("0x4", 1, "a mesh is FSDPxTP"),
        ("1xa", 1, "a mesh is FSDPxTP"),
        ("1x4", 3, "3 processes can't share the 4 devices of 1x4"),
        ("1x4", 0, "0 processes can't share"),
    ],
)
def test_unfit_layout_is_refused(text, num_processes, message):
    with pytest.raises(ValueError, match=message):
        Layout.parse(text, num_processes)


def test_figure_compares_within_rounds():
    ours, limit = Figure("ours", [1.0, 8.0, 3.0]), Figure("limit", [2.0, 8.0, 4.0])
    assert ours.median == 3.0
    assert ours.over(limit) == 0.75
    assert ours.to_dict()["max"] == 8.0


def test_raw_sockets_are_sampled_by_each_kind_of_connections():
    with RawSockets(9 * WRITE_NBYTES, "reno") as raw:
        assert raw.way in ALL
        assert raw.nbytes == 8 * WRITE_NBYTES
        for raw.way in (*ALL, *ALL):
            assert raw.gbytes_per_s() > 0
            assert raw.cpu_s_per_gbyte > 0


def test_raw_sockets_use_what_they_are_told_alone():
    with RawSockets(WRITE_NBYTES, None, ways=[Connections(1, fresh=True)]) as raw:
        assert str(raw.way) == "1 fresh connection"
        assert raw.nbytes == WRITE_NBYTES
        assert raw.gbytes_per_s() > 0


def test_memcpy_is_sampled_in_each_way():
    with MemcpyLimit(WRITE_NBYTES + 77, 3) as limit:
        assert limit.way in WAYS
        assert all(limit.gbytes_per_s() > 0 for limit.way in (*WAYS, *WAYS))


def test_limit_takes_the_way_with_the_best_median():
    speeds = {"lucky once": iter([1, 9, 1, 1]), "best": iter([0, 2, 3, 2])}

    class Tried(Limit[str]):
        def gbytes_per_s(self):
            return next(speeds[self.way])

    with Tried() as limit:
        limit.choose(list(speeds))
        assert limit.way == "best"


@pytest.mark.parametrize(
    "limit", [lambda: RawSockets(WRITE_NBYTES, None), lambda: MemcpyLimit(WRITE_NBYTES, 1)]
)
def test_other_bytes_than_were_sent_end_a_limit(tmp_path, monkeypatch, limit):
    (tmp_path / "sitecustomize.py").write_text(ANOTHER_STAMP)
    add_to_path(tmp_path, monkeypatch)
    with pytest.raises(RuntimeError, match="has other bytes"):
        limit()


ANOTHER_STAMP = """
from tpu_sync_rl.bench import limit
stamp = limit.stamp
limit.stamp = lambda memory, number: stamp(memory, number) ^ 1
"""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _limits.send([], b"1", 1), "the number of fds is 0"),
        (lambda: _limits.receive([0], bytearray(1), 0), "read_nbytes is 0"),
        (lambda: _limits.copy(bytearray(2), b"1", 1, 0), "differs in size"),
        (lambda: _limits.copy(bytearray(1), b"1", 0, 0), "num_threads is 0"),
    ],
)
def test_native_limits_refuse_what_they_cannot_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_native_limits_say_why_they_failed():
    with pytest.raises(BrokenPipeError):
        one, other = socket.socketpair()
        with one, other:
            other.close()
            _limits.send([one.fileno()], bytes(1), 1)
    with pytest.raises(ProcessLookupError):
        _limits.read_process(2**22 + 1, 0, bytearray(1), 1)


@pytest.mark.end_to_end
def test_wire_measures_and_writes_every_sample(tmp_path):
    result = tmp_path / "wire.json"
    done = run_bench(
        *("wire", "--model=one-big", "--nbytes=2000000", "--rounds=2", f"--json={result}"),
        *("--trainer_mesh=1x4", "--trainer_processes=2", "--sampler_mesh=2x2", "--replicas=2"),
    )
    assert done.returncode == 0, done.stderr
    assert "whole call" in done.stdout and "every byte of 2 versions verified" in done.stdout
    written = json.loads(result.read_text())
    assert {figure["name"]: len(figure["samples"]) for figure in written["figures"]} == {
        "whole call": 2,
        "wire phase": 2,
        "CPU of both ends": 2,
        "raw sockets": 2,
        "memcpy": 2,
        "pause of a sampler": 2,
    }
    (cpu,) = (figure for figure in written["figures"] if figure["name"] == "CPU of both ends")
    assert (cpu["unit"], cpu["limit"]["name"]) == ("s per GB", "CPU of raw sockets")
    assert min(*cpu["samples"], *cpu["limit"]["samples"]) > 0
    assert written["limits"]["raw sockets"] in map(str, ALL)
    assert [len(reports) for reports in written["sampler_reports"]] == [2, 2]
    moved = written["trainer_reports"][0][0]["wire_nbytes"]
    assert moved == 2 * written["nbytes"]
    assert written["settings"]["trainer_mesh"] == "1x4"


@pytest.mark.slow
@pytest.mark.end_to_end
def test_wire_tells_how_long_the_copies_of_staged_versions_took(tmp_path):
    figures = measured(
        tmp_path,
        *("wire", "--model=one-big", "--nbytes=2000000", "--rounds=1", "--staging=pinned_host"),
    )
    by_name = {figure["name"].strip(): figure for figure in figures}
    stages = [by_name[stage]["median"] for stage in ("d2h", "wire", "h2d")]
    whole = by_name["whole call, in seconds"]
    assert all(0 < stage_s < whole["median"] for stage_s in stages)
    assert whole["of_limit"] == whole["median"] / max(stages)


WRONG = """
from tpu_sync_rl.bench import models
make = models.make_params

def make_params(like, version, old=None):
    params = make(like, version, old)
    if version == 2:
        params["leaf"] = params["leaf"].at[0, 0].multiply(-1)
    return params

models.make_params = make_params
"""


@pytest.mark.end_to_end
def test_wrong_bytes_end_a_command(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(WRONG)
    add_to_path(tmp_path, monkeypatch)
    done = run_bench("wire", "--model=one-big", "--nbytes=100000", "--rounds=1")
    assert done.returncode == 1
    assert "wire: version 2 on a sampler is wrong in leaf" in done.stderr


@pytest.mark.slow
@pytest.mark.end_to_end
def test_reshard_compares_every_move_with_none(tmp_path):
    few = ("--model=one-big", "--nbytes=500000", "--rounds=1", "--dtypes=float32")
    figures = measured(tmp_path, "reshard", *few, "--moves", "axis 1 to 0")
    assert [(figure["name"], figure["limit"]["name"]) for figure in figures] == [
        ("axis 1 to 0, float32", "unsharded"),
        ("float32 to bfloat16 in flight", "bfloat16 alone"),
    ]


@pytest.mark.slow
@pytest.mark.end_to_end
def test_leaves_shows_python_per_leaf_on_both_sides(tmp_path):
    figures = measured(tmp_path, "leaves", "--nbytes=500000", "--leaves=8", "--rounds=2")
    units = {figure["name"]: figure["unit"] for figure in figures}
    assert units == {
        **dict.fromkeys(("list", "one-big", "many-small"), "GB/s"),
        **dict.fromkeys(
            ("trainer, until pinned", "sampler, arrays", "sampler, its call"), "µs a leaf"
        ),
    }
    assert all(len(figure["samples"]) == 2 for figure in figures)


def test_plan_measures_time_tables_and_memory_of_every_layout(tmp_path):
    figures = measured(tmp_path, "plan", "--leaves=96", "--rounds=1")
    assert len(figures) == 3 * 5


def test_level_of_the_kernels_is_named(tmp_path, monkeypatch):
    level = _native.cpu_levels()[-1]
    monkeypatch.setenv("TSR_CPU", level)
    result = tmp_path / "tiles.json"
    done = run_bench("tiles", "--nbytes=70000", "--rounds=1", f"--json={result}")
    assert f"kernels: {level}" in done.stdout
    assert json.loads(result.read_text())["machine"]["kernels"] == level
    monkeypatch.setenv("TSR_CPU", "fast")
    done = run_bench("tiles")
    assert (done.returncode, done.stdout) == (1, "")
    assert "TSR_CPU" in done.stderr


@pytest.mark.parametrize("layout", sorted(plan.LAYOUTS))
def test_planned_layouts_cover_every_leaf(layout):
    for grid, num_hosts in zip(
        plan.LAYOUTS[layout], (plan.NUM_TRAINER_HOSTS, plan.NUM_SAMPLER_HOSTS), strict=True
    ):
        manifest = plan.manifest(6, grid, num_hosts)
        assert Manifest.decode(manifest.encoded).digest == manifest.digest
        held = np.concatenate([lying.holders for lying in manifest.layouts])
        assert set(held) == set(range(num_hosts))


@pytest.mark.end_to_end
def test_local_is_held_against_memcpy_and_device_put(tmp_path):
    figures = measured(tmp_path, "local", "--model=one-big", "--nbytes=500000", "--rounds=1")
    assert [(figure["name"], figure["limit"]["name"]) for figure in figures] == [
        (move, limit)
        for move in ("same sharding", "1x4 to 2x2", "axis 0 to 1")
        for limit in ("memcpy", "jax.device_put")
    ]


def test_tiles_are_held_against_rows(tmp_path):
    figures = measured(tmp_path, "tiles", "--nbytes=700000", "--rounds=1")
    assert [(figure["name"], figure["limit"]["name"]) for figure in figures] == [
        (f"{tiling}: {move}", "rows to rows") for tiling in tiles.TILINGS for move in tiles.MOVES
    ]


@pytest.mark.slow
@needs_namespaces
@pytest.mark.end_to_end
def test_rails_are_held_against_what_they_carry(tmp_path):
    figures = measured(
        tmp_path,
        *("rails", "--netns", "--model=one-big", "--nbytes=10000000", "--rounds=1"),
        *("--rates", "200,100", "--lose=200,200"),
    )
    assert [(figure["name"], figure["limit"]["name"]) for figure in figures] == [
        ("2 rails of 200, 100 Mbit/s", "iperf3" if shutil.which("iperf3") else "raw sockets"),
        ("a rail is lost: done after", "at most"),
        ("it returns: used after", "at most"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "pass --netns"),
        (["--netns", "--rates", "fast"], "rates of rails are MBIT,MBIT,… such as 2500,500"),
        (["--netns", "--lose=100"], "--lose needs two rails or more, not '100'"),
    ],
)
def test_rails_refuses_what_does_not_fit(arguments, message):
    done = run_bench("rails", *arguments)
    assert done.returncode == 1
    assert message in done.stderr


def test_cast_params_are_held_against_the_cast_of_jax():
    leaves = models.model("one-big", 100_000)
    trainer = models.structs(leaves, mesh(1, 4), "float32")
    params = models.make_params(trainer, 2)
    cast = {key: jax.device_put(leaf.astype("bfloat16")) for key, leaf in params.items()}
    assert models.wrong_leaves(cast, 2, "float32") == []
    cut = {key: leaf * 0 for key, leaf in cast.items()}
    assert models.wrong_leaves(cut, 2, "float32") == ["leaf"]


def test_unknown_congestion_control_is_refused():
    with pytest.raises(ValueError, match="congestion='nothing' can't be used here"):
        RawSockets(WRITE_NBYTES, "nothing")


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["wire", "--nbytes=-1"], "argument --nbytes: it has to be 1 or more, not -1"),
        (["plan", "--rounds=0"], "argument --rounds: it has to be 1 or more, not 0"),
        (["plan", "--json=/nowhere/x"], "argument --json: there is no folder /nowhere"),
        (["plan", "--process=32"], "argument --process: invalid choice: 32"),
    ],
)
def test_argument_out_of_range_is_named(monkeypatch, capsys, arguments, text):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # that of the tests stays
    with pytest.raises(SystemExit, match="2"):
        main()
    assert text in capsys.readouterr().err


def test_wire_refuses_what_does_not_fit():
    done = run_bench("wire", "--trainer_mesh=1x3", "--trainer_processes=2")
    assert done.returncode == 1
    assert "wire: 2 processes can't share the 3 devices of 1x3" in done.stderr
