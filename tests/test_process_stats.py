from tpu_sync_rl.process_stats import ProcessStats, combined


def test_bytes_add_up_and_the_longest_stage_counts():
    parts = [
        ProcessStats(10, 5, {"wire": 1.0, "arrays": 0.1}, {"eth0-eth0": 5}),
        ProcessStats(20, 7, {"wire": 0.5, "wait": 0.2}, {"eth0-eth0": 3, "eth1-eth1": 4}),
    ]
    assert combined(parts) == ProcessStats(
        30,
        12,
        {"wire": 1.0, "arrays": 0.1, "wait": 0.2},
        {"eth0-eth0": 8, "eth1-eth1": 4},
    )
    assert combined([]) == ProcessStats(0, 0, {}, {})
