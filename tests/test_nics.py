"""Which NICs carry data, and what the kernel says that they are made for."""

import errno
import socket
from pathlib import Path

import pytest

from tpu_sync_rl import nics
from tpu_sync_rl.report import Line

LO_MTU_NBYTES = int(Path("/sys/class/net/lo/mtu").read_text())
IFF_UP, IFF_BROADCAST = 0x1, 0x2


class Nic:
    """What sysfs and the flags say of one; it has the address, MTU and index of loopback."""

    def __init__(self, sysfs: Path) -> None:
        self.sysfs = sysfs
        self.flags = IFF_UP | IFF_BROADCAST
        self.folder = sysfs / "lo"
        self.folder.mkdir()
        self.says(type="1", ifindex=str(socket.if_nametoindex("lo")))

    def says(self, **attributes: str) -> None:
        for attribute, text in attributes.items():
            (self.folder / attribute).write_text(f"{text}\n")


@pytest.fixture
def nic(tmp_path, monkeypatch):
    nic = Nic(tmp_path)
    ioctl = nics._ioctl

    def answered(name: str, request: int) -> bytes:
        answer = ioctl(name, request)
        if request == nics._SIOCGIFFLAGS:
            answer = answer[:16] + nic.flags.to_bytes(2, "little") + answer[18:]
        return answer

    monkeypatch.setattr(nics, "_SYSFS", tmp_path)
    monkeypatch.setattr(nics, "_ioctl", answered)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    return nic


def found() -> list[str]:
    try:
        return [nic.name for nic in nics.find_nics()]
    except ValueError as error:
        assert "no NIC is up" in str(error)
        return []


def test_nic_that_is_up_is_found(nic):
    assert found() == ["lo"]


@pytest.mark.parametrize("flag", [0x8, 0x10, 0x80, 0x800])
def test_loopback_tunnel_dummy_and_part_of_a_bond_are_no_nics(nic, flag):
    nic.flags |= flag
    assert found() == []


def test_nic_that_is_down_is_not_found(nic):
    nic.flags = IFF_BROADCAST
    assert found() == []


@pytest.mark.parametrize("sign", ["bridge", "brport", "tun_flags"])
def test_bridge_its_ports_and_a_tap_are_no_nics(nic, sign):
    (nic.folder / sign).mkdir()
    assert found() == []


@pytest.mark.parametrize(
    ("says", "names"),
    [
        ({"uevent": "DEVTYPE=vxlan\nINTERFACE=lo"}, []),
        ({"uevent": "DEVTYPE=vlan\nINTERFACE=lo"}, ["lo"]),
        ({"type": "32"}, ["lo"]),  # InfiniBand
        ({"type": "768"}, []),  # IP in IP
    ],
)
def test_kind_of_the_hardware_counts(nic, says, names):
    nic.says(**says)
    assert found() == names


def test_sysfs_of_another_namespace_is_not_believed(nic):
    (nic.folder / "bridge").mkdir()
    nic.says(ifindex="12345", type="768", speed="100")
    (here,) = nics.find_nics()
    assert here.line == Line(LO_MTU_NBYTES)


@pytest.mark.parametrize(
    ("speed", "gbytes_per_s"), [("10000", 1.25), ("-1", None), ("0", None), (None, None)]
)
def test_mtu_and_speed_are_those_that_the_kernel_knows(nic, speed, gbytes_per_s):
    if speed is not None:
        nic.says(speed=speed)
    (here,) = nics.find_nics()
    assert here.line == Line(LO_MTU_NBYTES, gbytes_per_s)


# What /proc/net/if_inet6 says: address, index, prefix length, scope, flags, NIC.
GLOBAL = "20010db8000000000000000000000002 01 40 00 80 lo"
UNIQUE_LOCAL = "fd000000000000000000000000000002 01 70 00 80 lo"
TEMPORARY = "20010db8000000000000000000000003 01 40 00 01 lo"
DEPRECATED = "20010db8000000000000000000000004 01 40 00 a0 lo"
TENTATIVE = "20010db8000000000000000000000005 01 40 00 c0 lo"
LINK_LOCAL = "fe800000000000000000000000000002 01 40 20 80 lo"


@pytest.fixture
def ipv6(nic, tmp_path, monkeypatch):
    """A NIC without an IPv4 address."""
    ioctl = nics._ioctl

    def without_ipv4(name: str, request: int) -> bytes:
        if request == nics._SIOCGIFADDR:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return ioctl(name, request)

    monkeypatch.setattr(nics, "_ioctl", without_ipv4)
    monkeypatch.setattr(nics, "_ADDRESSES_6", tmp_path / "if_inet6")
    return tmp_path / "if_inet6"


@pytest.mark.parametrize(
    ("lines", "host"),
    [
        ([GLOBAL], "2001:db8::2"),
        ([UNIQUE_LOCAL], "fd00::2"),
        ([LINK_LOCAL, TEMPORARY, DEPRECATED, GLOBAL], "2001:db8::2"),
        ([LINK_LOCAL, TEMPORARY], "2001:db8::3"),
    ],
)
def test_nic_with_ipv6_alone_is_found_at_its_best_address(ipv6, lines, host):
    ipv6.write_text("\n".join(lines))
    (found,) = nics.find_nics()
    assert (found.name, found.host, found.line) == ("lo", host, Line(LO_MTU_NBYTES))
    assert nics.find_nics(["lo"]) == nics.find_nics([host]) == [found]
    assert nics.find_nics([host.upper()]) == [found]
    assert found.is_beside(f"{host[:-1]}99") and not found.is_beside("10.0.0.1")


@pytest.mark.parametrize("lines", [[], [LINK_LOCAL], [TENTATIVE]])
def test_nic_without_an_address_for_others_is_told_of(ipv6, lines):
    ipv6.write_text("\n".join(lines))
    assert found() == []
    with pytest.raises(ValueError, match="'lo' has no IPv4 address, and no IPv6 one beyond its li"):
        nics.find_nics(["lo"])


def test_link_local_address_is_refused():
    for name in ("fe80::2", "fe80::2%lo"):
        with pytest.raises(ValueError, match="is known on its link alone: name a global or uni"):
            nics.find_nics([name])


def test_nic_with_both_has_both_and_ipv4_first(nic, tmp_path, monkeypatch):
    monkeypatch.setattr(nics, "_ADDRESSES_6", tmp_path / "if_inet6")
    (tmp_path / "if_inet6").write_text(GLOBAL)
    assert [x.host for x in nics.find_nics()] == ["127.0.0.1", "2001:db8::2"]
    assert [x.host for x in nics.find_nics(["2001:db8::2"])] == ["2001:db8::2"]


def test_routes_of_ipv6_count_and_those_that_lead_nowhere_do_not(ipv6, tmp_path, monkeypatch):
    none = "0" * 32
    ipv6.write_text(UNIQUE_LOCAL)
    monkeypatch.setattr(nics, "_ROUTES_6", tmp_path / "ipv6_route")
    lines = [
        f"20010db8{'0' * 24} 20 {none} 00 {none} 00000400 1 0 00000001 lo",
        f"fd00{'0' * 28} 10 {none} 00 {none} 00000400 1 0 00000201 lo",
        f"{none} 00 {none} 00 {none} ffffffff 1 0 00200200 lo",
    ]
    (tmp_path / "ipv6_route").write_text("\n".join(lines))
    (found,) = nics.find_nics()
    assert found.reaches("2001:db8:9::1")
    assert not found.reaches("fd00:1:1:1::1") and not found.reaches("2002::1")


def test_what_a_sandbox_hides_is_not_known(nic, monkeypatch):
    for path in ("_ROUTES", "_ROUTES_6", "_ADDRESSES_6", "_SYSFS", "_NODES"):
        monkeypatch.setattr(nics, path, Path("/nowhere"))
    assert [x.host for x in nics.find_nics()] == ["127.0.0.1"]
    assert nics.numa_nodes() == ()
    monkeypatch.setattr(socket, "if_nameindex", deny)
    assert found() == []
    assert [x.host for x in nics.find_nics(["10.0.0.7"])] == ["10.0.0.7"]


def deny() -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """How many NUMA nodes the machine has."""

    def have(num: int) -> None:
        for node in range(num):
            (tmp_path / "nodes" / f"node{node}").mkdir(parents=True)
        monkeypatch.setattr(nics, "_NODES", tmp_path / "nodes")

    return have


def test_machine_with_one_node_needs_no_choice(nic, nodes):
    nodes(1)
    (nic.folder / "device").mkdir()
    nic.says(**{"device/numa_node": "0"})
    assert nics.numa_nodes() == ()


@pytest.mark.parametrize(("node", "expected"), [("1", (1,)), ("-1", ()), (None, ())])
def test_memory_belongs_to_the_node_of_the_nic(nic, nodes, node, expected):
    nodes(2)
    (nic.folder / "device").mkdir()
    if node is not None:
        nic.says(**{"device/numa_node": node})
    assert nics.numa_nodes() == nics.numa_nodes(["lo"]) == expected


def test_nics_of_several_nodes_share_the_memory(monkeypatch, nodes):
    nodes(4)
    at = {"a": "3", "b": "0", "c": "3", "d": "-1"}
    monkeypatch.setattr(nics, "find_nics", lambda _: [nics.Nic(name, "10.0.0.1") for name in at])
    monkeypatch.setattr(nics, "_attribute", lambda name, _: at[name])
    assert nics.numa_nodes() == (0, 3)


def test_without_a_nic_memory_may_be_anywhere(nic, nodes):
    nodes(2)
    nic.flags = 0
    assert nics.numa_nodes() == ()
    with pytest.raises(ValueError, match="'eth77' is no NIC"):
        nics.numa_nodes(["eth77"])
