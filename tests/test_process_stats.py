from tpu_sync_rl.process_stats import ProcessStats, combined, on_lines_of
from tpu_sync_rl.report import Line, RailReport

SLOW = Line(1500, 1.25)
FAST = Line(9000, 12.5)


def test_bytes_add_up_and_the_longest_stage_counts():
    parts = [
        ProcessStats(
            10,
            5,
            {"wire": 1.0, "arrays": 0.1},
            {
                "a-a": RailReport(
                    nbytes=5, seconds=1.0, num_streams=2, window_nbytes=6, round_trip_s=0.02
                )
            },
        ),
        ProcessStats(
            20,
            7,
            {"wire": 0.5, "wait": 0.2},
            {
                "a-a": RailReport(
                    nbytes=3,
                    seconds=0.5,
                    num_retries=2,
                    num_lost=1,
                    num_streams=4,
                    window_nbytes=12,
                    round_trip_s=0.01,
                    line=SLOW,
                ),
                "b-b": RailReport(nbytes=4),
            },
        ),
    ]
    assert combined(parts) == ProcessStats(
        30,
        12,
        {"wire": 1.0, "arrays": 0.1, "wait": 0.2},
        {
            "a-a": RailReport(
                nbytes=8,
                seconds=1.0,
                num_retries=2,
                num_lost=1,
                num_streams=6,
                window_nbytes=18,
                round_trip_s=0.02,
                line=SLOW,
            ),
            "b-b": RailReport(nbytes=4),
        },
    )
    assert combined([]) == ProcessStats(0, 0, {}, {})


def test_lines_come_from_the_end_that_knows_them():
    known = {"a-a": RailReport(nbytes=9, line=FAST)}
    rails = {"a-a": RailReport(nbytes=1), "b-b": RailReport(nbytes=2)}
    assert on_lines_of(known, rails) == {
        "a-a": RailReport(nbytes=1, line=FAST),
        "b-b": RailReport(nbytes=2),
    }


def test_line_of_two_nics_is_that_of_the_weaker_one():
    assert SLOW.to(FAST) == FAST.to(SLOW) == SLOW
    assert Line(1500).to(Line(None, 2.5)) == Line(1500, 2.5)
    assert Line().to(Line()) == Line()
