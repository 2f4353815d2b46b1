"""The NICs of this machine that carry data, their addresses, and what they reach."""

import fcntl
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Network, ip_address
from pathlib import Path

from tpu_sync_rl.report import UNKNOWN_LINE, Line

# From linux/sockios.h and linux/if.h.
_SIOCGIFFLAGS = 0x8913
_SIOCGIFADDR = 0x8915
_SIOCGIFNETMASK = 0x891B
_SIOCGIFMTU = 0x8921
_IFF_UP = 0x1
_IFF_LOOPBACK = 0x8
_IFF_POINTOPOINT = 0x10  # tunnels
_IFF_NOARP = 0x80  # dummies
_IFF_SLAVE = 0x800  # parts of a bond
_IFF_NO_DATA = _IFF_LOOPBACK | _IFF_POINTOPOINT | _IFF_NOARP | _IFF_SLAVE
# From linux/if_arp.h: Ethernet (veth and VLANs are, too) and InfiniBand.
_HARDWARE_TYPES = {"1", "32"}
_VIRTUAL_TYPES = {"DEVTYPE=bridge", "DEVTYPE=vxlan", "DEVTYPE=geneve"}

_SYSFS = Path("/sys/class/net")
_NODES = Path("/sys/devices/system/node")
_ROUTES = Path("/proc/thread-self/net/route")


@dataclass(frozen=True, slots=True)
class Nic:
    """One address of a NIC.

    Attributes:
        name: of the NIC.
        host: the address.
        network: what it reaches without a router, if known.
        routes: what the kernel sends over it, with a router or without, as far as known.
        line: what it is made for.
        shares_subnet: whether another NIC is in its subnet. The kernel sends by whichever has the
            first route there, unless a socket is bound to one.
    """

    name: str
    host: str
    network: IPv4Network | None = None
    routes: tuple[IPv4Network, ...] = ()
    line: Line = UNKNOWN_LINE
    shares_subnet: bool = False

    def is_beside(self, host: str) -> bool:
        """Whether `host` is in the same subnet."""
        return self.network is not None and ip_address(host) in self.network

    def reaches(self, host: str) -> bool:
        """Whether `host` is in the same subnet, or the kernel has a route to it over this NIC."""
        return self.is_beside(host) or any(ip_address(host) in route for route in self.routes)


LOOPBACK = Nic("lo", "127.0.0.1", IPv4Network("127.0.0.0/8"), line=Line(65536))


def find_nics(wanted: Sequence[str] | None = None) -> list[Nic]:
    """Finds the NICs that are up and have an IPv4 address, and are no mere face of others.

    Loopback, dummies, tunnels, bridges and what is part of one or of a bond are left out.

    Args:
        wanted: names or addresses of the NICs to take instead, in this order. An address that no
            NIC is known to have (of IPv6, say) is taken as it is.

    Raises:
        ValueError: one of `wanted` is neither a NIC with an address nor an address, or there is
            no NIC at all.
    """
    routes = _routes()
    names = [name for _, name in socket.if_nameindex()]
    nics = [nic for name in names if (nic := _ipv4(name, routes.get(name, ()))) is not None]
    nics = [replace(nic, shares_subnet=_shares_subnet(nic, nics)) for nic in nics]
    if wanted is not None:
        return [_named(name, nics) for name in wanted]
    found = [nic for nic in nics if _is_data_nic(nic.name)]
    if not found:
        raise ValueError(
            "no NIC is up and has an IPv4 address, besides loopback, bridges and tunnels; "
            "name those to use with nics="
        )
    return found


def numa_nodes(wanted: Sequence[str] | None = None) -> tuple[int, ...]:
    """The NUMA nodes that the NICs of `find_nics` are at.

    Empty where memory is alike: the machine has one node, or none is known of any NIC.

    Raises:
        ValueError: one of `wanted` is no NIC.
    """
    if len([*_NODES.glob("node[0-9]*")]) < 2:
        return ()
    try:
        found = find_nics(wanted)
    except ValueError:
        if wanted is not None:
            raise
        return ()
    nodes = {_attribute(nic.name, "device/numa_node") for nic in found}
    return tuple(sorted(int(node) for node in nodes if node.isdecimal()))  # -1 is not known


def _shares_subnet(nic: Nic, nics: list[Nic]) -> bool:
    return any(nic.is_beside(other.host) for other in nics if other.name != nic.name)


def _named(name: str, nics: list[Nic]) -> Nic:
    for nic in nics:
        if name in (nic.name, nic.host):
            return nic
    try:
        return Nic(name, str(ip_address(name)))
    except ValueError:
        known = ", ".join(f"{nic.name} ({nic.host})" for nic in nics)
        raise ValueError(
            f"nics: {name!r} is no NIC with an IPv4 address; there are {known}"
        ) from None


def _routes() -> dict[str, tuple[IPv4Network, ...]]:
    """What the kernel's main table sends over each NIC."""
    routes: dict[str, tuple[IPv4Network, ...]] = {}
    try:
        lines = _ROUTES.read_text().splitlines()[1:]
    except OSError:  # no procfs here: nothing is known
        return routes
    for line in lines:
        name, network, *_, mask = line.split()[:8]
        # Addresses stand there as the CPU holds them in memory, which is network order.
        host, netmask = (socket.inet_ntoa(struct.pack("=I", int(x, 16))) for x in (network, mask))
        routes[name] = (*routes.get(name, ()), IPv4Network(f"{host}/{netmask}"))
    return routes


def _ipv4(name: str, routes: tuple[IPv4Network, ...]) -> Nic | None:
    try:
        host = socket.inet_ntoa(_ioctl(name, _SIOCGIFADDR)[20:24])
        mask = socket.inet_ntoa(_ioctl(name, _SIOCGIFNETMASK)[20:24])
    except OSError:  # it has none
        return None
    return Nic(name, host, IPv4Network(f"{host}/{mask}", strict=False), routes, _line(name))


def _line(name: str) -> Line:
    (mtu_nbytes,) = struct.unpack_from("i", _ioctl(name, _SIOCGIFMTU), 16)
    mbit_per_s = _attribute(name, "speed")
    known = mbit_per_s.isdecimal() and int(mbit_per_s) > 0
    return Line(mtu_nbytes, int(mbit_per_s) / 8000 if known else None)


def _is_data_nic(name: str) -> bool:
    (flags,) = struct.unpack_from("<H", _ioctl(name, _SIOCGIFFLAGS), 16)
    if not flags & _IFF_UP or flags & _IFF_NO_DATA:
        return False
    hardware_type = _attribute(name, "type")
    if not hardware_type:  # no sysfs here: take it for what its flags say
        return True
    is_virtual = any((_SYSFS / name / sign).exists() for sign in ("bridge", "brport", "tun_flags"))
    is_virtual |= not _VIRTUAL_TYPES.isdisjoint(_attribute(name, "uevent").split())
    return hardware_type in _HARDWARE_TYPES and not is_virtual


def _attribute(name: str, attribute: str) -> str:
    """What sysfs says of a NIC; "" where it says nothing, or is that of another namespace."""
    try:
        if int((_SYSFS / name / "ifindex").read_text()) != socket.if_nametoindex(name):
            return ""
        return (_SYSFS / name / attribute).read_text().strip()
    except OSError:
        return ""


def _ioctl(name: str, request: int) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return fcntl.ioctl(any_socket, request, struct.pack("256s", name.encode()))
