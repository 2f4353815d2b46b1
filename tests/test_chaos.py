"""A hundred faults: no wrong byte, no late call, and everybody comes back."""

import pytest
from chaos.run import Run

from tpu_sync_rl.bench import netns


@pytest.mark.parametrize("seed, kind, num_faults", [(101, "shm", 30), (102, "tcp", 30)])
def test_faults_on_one_host_break_no_promise(seed: int, kind: str, num_faults: int) -> None:
    assert not Run(seed, num_faults, kind).go().violations


def test_faults_and_lost_links_break_no_promise() -> None:
    try:
        netns.check_rights()
    except RuntimeError as error:
        pytest.skip(str(error))
    assert not Run(103, 40, "netns").go().violations
