"""Which NICs go together where one side, or one NIC, has IPv4, IPv6 or both."""

from ipaddress import ip_network
from typing import NamedTuple

import pytest

from tpu_sync_rl import rails
from tpu_sync_rl.nic_pairs import pair_up
from tpu_sync_rl.nics import LOOPBACK_6, Nic


class At(NamedTuple):
    nic: str
    host: str


ANYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))
A4 = Nic("a", "10.0.0.1", ip_network("10.0.0.0/24"))
A6 = Nic("a", "fd00::1", ip_network("fd00::/64"))
B4 = Nic("b", "10.0.1.1", ip_network("10.0.1.0/24"))
B6 = Nic("b", "fd00:1::1", ip_network("fd00:1::/64"))
ROUTED4 = Nic("r", "10.0.9.1", ip_network("10.0.9.0/24"), ANYWHERE)
ROUTED6 = Nic("r", "fd00:9::1", ip_network("fd00:9::/64"), ANYWHERE)
AT_A4, AT_A6 = At("x", "10.0.0.2"), At("x", "fd00::2")
AT_B4, AT_B6 = At("y", "10.0.1.2"), At("y", "fd00:1::2")
FAR4, FAR6 = At("z", "10.7.0.2"), At("z", "fd00:7::2")


@pytest.mark.parametrize(
    ("nics", "addresses", "pairs"),
    [
        # IPv6 alone, on one side or on both.
        ([A6, B6], [AT_A6, AT_B6], [(A6, AT_A6), (B6, AT_B6)]),
        ([A6, B6], [AT_B6, AT_A6], [(B6, AT_B6), (A6, AT_A6)]),
        ([A4, A6], [AT_A6], [(A6, AT_A6)]),
        ([A6], [AT_A4, AT_A6], [(A6, AT_A6)]),
        # Both on both sides: IPv4, and one rail for a pair of NICs.
        ([A4, A6, B4, B6], [AT_A4, AT_A6, AT_B4, AT_B6], [(A4, AT_A4), (B4, AT_B4)]),
        # A NIC of either side that has one family alone.
        ([A4, A6, B6], [AT_A4, AT_A6, AT_B6], [(A4, AT_A4), (B6, AT_B6)]),
        ([A4, B6], [AT_A4, AT_A6], [(A4, AT_A4), (B6, AT_A6)]),
        ([A4, A6], [AT_A4, AT_B6], [(A4, AT_A4), (A6, AT_B6)]),
        # What is reached counts more than the family.
        ([A4, ROUTED6], [FAR4, FAR6], [(ROUTED6, FAR6), (A4, FAR4)]),
        ([ROUTED4, ROUTED6], [FAR4, FAR6], [(ROUTED4, FAR4)]),
        # Nothing in common.
        ([A4], [AT_A6], []),
        ([A6, B6], [AT_A4, AT_B4], []),
        ([A4, B6], [AT_A4], [(A4, AT_A4)]),
    ],
)
def test_ends_of_a_pair_are_of_one_family(nics, addresses, pairs):
    assert pair_up(nics, addresses) == pairs


def test_sides_without_a_family_in_common_are_told(monkeypatch):
    monkeypatch.setattr(rails, "find_nics", lambda _: [A4])
    with pytest.raises(
        ValueError, match=r"it listens at fd00::2, which no address here goes with \(10\.0\.0\.1\)"
    ):
        rails.pair_nics(None, [AT_A6])


def test_loopback_of_ipv6_is_reached_over_itself():
    ((nic, _),) = pair_up([rails.LOOPBACK, LOOPBACK_6], [At("lo", "::1")])
    assert nic == LOOPBACK_6
