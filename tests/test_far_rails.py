"""Rails that are long: how much is under way on them follows the time that it takes."""

import pytest
from slow_link import SlowLink

from tpu_sync_rl.bench import models, netns, rails
from tpu_sync_rl.bench.cases import Case, Layout
from tpu_sync_rl.bench.netns import Namespaces
from tpu_sync_rl.options import LEAST_STREAMS, MOST_STREAMS

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]
RTT_S = 0.1
NBYTES = 100_000_000


@pytest.fixture
def namespaces():
    try:
        netns.check_rights()
    except RuntimeError as error:
        pytest.skip(str(error))
    with Namespaces([]) as namespaces, SlowLink(namespaces, rtt_s=RTT_S):
        yield namespaces


def test_long_rail_has_more_under_way_and_more_streams(namespaces):
    one = Layout(fsdp=1, tp=1)
    case = Case(leaves=models.model("list", NBYTES), trainer=one, sampler=one)
    with rails.programs_over(namespaces, case, {"same_host": "tcp"}) as programs:
        found = []
        for version in range(1, 6):  # every byte is checked
            report = programs.sync(rails.CASE, version).samplers[0].report
            found.append(report["rails"]["rail0-rail0"])
    assert all(rail["round_trip_s"] >= RTT_S for rail in found)
    assert found[-1]["num_streams"] > LEAST_STREAMS
    assert max(rail["num_streams"] for rail in found) <= MOST_STREAMS
    # 2 streams of 3 requests of 1 MiB are what a short rail has.
    assert max(rail["window_nbytes"] for rail in found) > 3 * (6 << 20)
