"""Which NICs carry data, and what the kernel says that they are made for."""

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
