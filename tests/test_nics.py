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
