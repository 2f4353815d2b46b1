"""A hundred faults: no wrong byte, no late call, and everybody comes back."""

import pytest
from bench_commands import needs_namespaces
from chaos.run import Run


@pytest.mark.slow
@pytest.mark.parametrize("seed, kind, num_faults", [(101, "shm", 30), (102, "tcp", 30)])
def test_faults_on_one_host_break_no_promise(seed: int, kind: str, num_faults: int) -> None:
    assert not Run(seed, num_faults, kind).go().violations


@pytest.mark.slow
@needs_namespaces
def test_faults_and_lost_links_break_no_promise() -> None:
    assert not Run(103, 40, "netns").go().violations
