import json
from dataclasses import FrozenInstanceError, replace

import pytest

from tpu_sync_rl.report import Line, RailReport, Report, shown_nbytes

RAIL = RailReport(
    nbytes=2_000_000,
    seconds=0.25,
    num_retries=3,
    num_lost=2,
    num_streams=4,
    window_nbytes=12_000_000,
    round_trip_s=0.0203,
    line=Line(9000, 1.25),
)
OWN = Report(
    version=3,
    incarnation="ab12",
    epoch=2,
    nbytes=1_000_000,
    wire_nbytes=500_000,
    seconds={"wire": 0.2},
    rails={"lo-lo": RailReport(nbytes=500_000)},
    replicas={},
)
REPORT = replace(
    OWN,
    wire_nbytes=2_000_000,
    seconds={"total": 0.5, "wire": 0.25},
    rails={"lo-lo": RAIL, "shm": RailReport()},
    replicas={"a": 3, "b": None},
    lost=("c",),
    refused={"d": "'w': shape [1] on the trainer, [2] on the sampler"},
    local=OWN,
)


def test_is_plain_json():
    assert json.loads(json.dumps(REPORT.to_dict())) == REPORT.to_dict()
    assert REPORT.to_dict()["local"]["wire_nbytes"] == 500_000
    assert (REPORT.to_dict()["epoch"], REPORT.to_dict()["version"]) == (2, 3)
    assert REPORT.to_dict()["rails"]["lo-lo"] == {
        "nbytes": 2_000_000,
        "seconds": 0.25,
        "gbytes_per_s": 0.008,
        "num_retries": 3,
        "num_lost": 2,
        "num_streams": 4,
        "window_nbytes": 12_000_000,
        "round_trip_s": 0.0203,
        "line": {"mtu_nbytes": 9000, "gbytes_per_s": 1.25},
    }
    assert REPORT.to_dict()["gbytes_per_s"] == REPORT.gbytes_per_s == 0.004


def test_processes_of_a_program_have_equal_reports():
    assert replace(REPORT, local=replace(OWN, wire_nbytes=7)) == REPORT
    assert replace(REPORT, lost=()) != REPORT


def test_is_frozen_and_speed_needs_time():
    with pytest.raises(FrozenInstanceError):
        REPORT.version = 4
    assert OWN.gbytes_per_s == 0.0


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (12_000, "12.000 kB"),
        (1.5e6, "1.500 MB"),
        (2e12, "2,000.000 GB"),
    ],
)
def test_bytes_are_shown_in_the_unit_that_fits(nbytes, text):
    assert shown_nbytes(nbytes) == text


def test_prints_a_table_without_empty_rows():
    lines = str(REPORT).splitlines()
    assert lines[0] == "version      3 of incarnation ab12, epoch 2"
    assert "2.000 MB at 4.000 MB/s" in lines[2]
    assert "program      wire 0.2500 s, total 0.5000 s" in lines
    assert "this process wire 0.2000 s" in lines
    assert (
        "rail         lo-lo: 2.000 MB at 8.000 MB/s, made for 1.250 GB/s, MTU 9000 B, "
        "4 streams with 12.000 MB ahead, round trip 20.30 ms, 3 retries, 2 lost streams"
    ) in lines
    assert "rail         shm: 0 B at 0 B/s" in lines
    assert any(line.startswith("lost") and line.endswith("c") for line in lines)
    alone = str(replace(OWN, wire_nbytes=0, staging="copied")).splitlines()
    assert not any(line.startswith(("lost", "wire")) for line in alone)
    assert alone[-1] == "path         staging copied, agent process"
    assert not any(line.startswith("path") for line in lines)
