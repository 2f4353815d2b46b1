import json
import time

from tpu_sync_rl.trace import Trace


def test_stages_follow_one_another(tmp_path):
    path = tmp_path / "trace.json"
    trace = Trace(path, name="sampler", process=0)
    trace.stages(7, time.monotonic(), [("wire", 0.5), ("arrays", 0.25)])
    trace.close()
    trace.close()
    name, wire, arrays = json.loads(path.read_text())
    assert name["args"] == {"name": "sampler, process 0"}
    assert (wire["name"], wire["dur"], wire["args"]) == ("wire", 5e5, {"version": 7})
    assert abs(arrays["ts"] - (wire["ts"] + wire["dur"])) < 1


def test_other_processes_write_beside(tmp_path):
    Trace(tmp_path / "t", name="trainer", process=2).close()
    assert [path.name for path in tmp_path.iterdir()] == ["t.2"]


def test_without_a_path_nothing_is_written(tmp_path):
    Trace(None, name="trainer", process=0).stages(1, 0.0, [("wire", 1.0)])
    assert not list(tmp_path.iterdir())
