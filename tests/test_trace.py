import errno
import json
import os
import time

import jax.numpy as jnp
import pytest

import tpu_sync_rl as tsr
from tpu_sync_rl.trace import ChunkEvent, Trace


def written(path):
    return [event for event in json.loads(path.read_text()) if event["ph"] != "M"]


def test_stages_follow_one_another(tmp_path):
    path = tmp_path / "trace.json"
    trace = Trace(path, name="sampler", process=0)
    trace.stages(7, time.monotonic(), [("wire", 0.5), ("arrays", 0.25)])
    trace.close()
    trace.close()
    name, _, wire, arrays = json.loads(path.read_text())
    assert name["args"] == {"name": "sampler, process 0"}
    assert (wire["name"], wire["dur"], wire["args"]) == ("wire", 5e5, {"version": 7})
    assert abs(arrays["ts"] - (wire["ts"] + wire["dur"])) < 1
    assert wire["pid"] == os.getpid()


def test_times_are_of_the_wall_clock(tmp_path):
    trace = Trace(tmp_path / "t", name="sampler", process=0)
    before = time.time()
    trace.stages(1, time.monotonic(), [("wire", 0.0)])
    after = time.time()
    trace.close()
    (wire,) = written(tmp_path / "t")
    assert before - 1 <= wire["ts"] / 1e6 <= after + 1


def test_chunks_stand_one_after_another_on_the_track_of_their_stream(tmp_path):
    trace = Trace(tmp_path / "t", name="sampler", process=0)
    trace.chunks(
        "source",
        [
            ChunkEvent("a-a", 1, 3, 7, 0, 100, 0, 10.0, 11.0),
            ChunkEvent("a-a", 2, 3, 7, 2, 100, 0, 10.0, 10.5),
            ChunkEvent("a-a", 1, 3, 7, 1, 100, 2, 10.0, 12.0),
            ChunkEvent("a-a", 1, 3, 8, 0, 0, 0, 13.0, 14.0),
        ],
        num_dropped=5,
    )
    trace.close()
    events = json.loads((tmp_path / "t").read_text())
    names = {x["tid"]: x["args"]["name"] for x in events if x["name"] == "thread_name"}
    assert names == {0: "stages", 1: "a-a stream 1", 2: "a-a stream 2"}
    first, other, second, lost, dropped = written(tmp_path / "t")
    assert [x["tid"] for x in (first, other, second, lost)] == [1, 2, 1, 1]
    assert second["args"] == {
        "source": 3,
        "chunk": 1,
        "version": 7,
        "nbytes": 100,
        "retries": 2,
        "waited_us": 1e6,
    }
    assert [round(x["ts"] - first["ts"]) for x in (first, second, lost)] == [0, 10**6, 3 * 10**6]
    assert [round(x["dur"]) for x in (first, second, lost)] == [10**6] * 3
    assert lost["name"] == "chunk 0, lost"
    assert dropped["name"] == "5 chunks are missing here"


def test_other_processes_write_beside(tmp_path):
    Trace(tmp_path / "t", name="trainer", process=2).close()
    assert [path.name for path in tmp_path.iterdir()] == ["t.2"]


def test_without_a_path_nothing_is_written(tmp_path):
    trace = Trace(None, name="trainer", process=0)
    trace.stages(1, 0.0, [("wire", 1.0)])
    trace.chunks("sink", [ChunkEvent("a-a", 1, 3, 7, 0, 100, 0, 10.0, 11.0)], 0)
    assert not trace.is_on and not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["write", "close"])
def test_file_that_can_not_be_written_is_told_of_once(tmp_path, monkeypatch, when):
    warnings: list[str] = []
    trace = Trace(tmp_path / "t", name="trainer", process=0, warn=warnings.append)
    trace.stages(1, time.monotonic(), [("wire", 0.5)])

    class FullDisk:
        def __init__(self, file):
            self._file = file

        def write(self, data):
            if when == "write":
                raise OSError(errno.ENOSPC, "No space left on device")
            return self._file.write(data[:7])  # as any file may

        def close(self):
            self._file.close()
            if when == "close":
                raise OSError(errno.ENOSPC, "No space left on device")

    trace._file = FullDisk(trace._file)
    trace.stages(2, time.monotonic(), [("wire", 0.5)])
    trace.chunks("source", [ChunkEvent("a-a", 1, 3, 7, 0, 100, 0, 10.0, 11.0)], 0)
    trace.close()
    assert warnings == [
        "its trace= can't be written, and ends here: [Errno 28] No space left on device"
    ]
    assert '"version": 1' in (tmp_path / "t").read_text()
    assert not trace.is_on


def test_error_of_opening_names_option_and_file(tmp_path):
    path = tmp_path / "none" / "t"
    with pytest.raises(FileNotFoundError, match=f"trace=: No such file or directory: '{path}.1'"):
        Trace(path, name="trainer", process=1)


@pytest.mark.end_to_end
def test_sync_goes_on_without_a_trace_on_a_full_disk(caplog):
    params = {"w": jnp.arange(1000.0)}
    with (
        tsr.connect_trainer(trace="/dev/full", timeout=20) as trainer,
        tsr.connect_sampler(
            coordinator=trainer.coordinator, replica="s", like=params, trace="/dev/full", timeout=20
        ) as sampler,
    ):
        for version in (1, 2):
            trainer.sync_weights(params)
            assert sampler.sync_weights().version == version
    told = [x.getMessage() for x in caplog.records if "trace=" in x.getMessage()]
    assert len(told) == 2 and all("No space left on device" in text for text in told)
