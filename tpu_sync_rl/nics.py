"""The NICs of this machine that carry data, their addresses, and what they reach."""

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from pathlib import Path

from tpu_sync_rl.addresses import is_link_local
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
_ROUTES_6 = Path("/proc/thread-self/net/ipv6_route")
_ADDRESSES_6 = Path("/proc/thread-self/net/if_inet6")
# From linux/if_addr.h: what an address there is flagged with, and what makes it one to listen at.
_IFA_F_TEMPORARY = 0x01
_IFA_F_DADFAILED = 0x08
_IFA_F_DEPRECATED = 0x20
_IFA_F_TENTATIVE = 0x40
_GLOBAL_SCOPE = 0x00  # unique local addresses have it, too
# From linux/ipv6_route.h and linux/route.h: routes that lead nowhere, or here.
_RTF_LOCAL = 0x80000000
_RTF_REJECT = 0x0200

Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class Nic:
    """One address of a NIC, which may have one of IPv4 and one of IPv6.

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
    network: Network | None = None
    routes: tuple[Network, ...] = ()
    line: Line = UNKNOWN_LINE
    shares_subnet: bool = False

    def speaks_to(self, host: str) -> bool:
        """Whether `host` is of the same family: both of IPv4, or both of IPv6."""
        return (":" in self.host) == (":" in host)

    def is_beside(self, host: str) -> bool:
        """Whether `host` is in the same subnet."""
        return self.network is not None and ip_address(host) in self.network

    def reaches(self, host: str) -> bool:
        """Whether `host` is in the same subnet, or the kernel has a route to it over this NIC."""
        if not self.speaks_to(host):
            return False
        return self.is_beside(host) or any(ip_address(host) in route for route in self.routes)


LOOPBACK = Nic("lo", "127.0.0.1", IPv4Network("127.0.0.0/8"), line=Line(65536))
LOOPBACK_6 = Nic("lo", "::1", IPv6Network("::1/128"), line=Line(65536))


def find_nics(wanted: Sequence[str] | None = None) -> list[Nic]:
    """Finds the NICs that are up and have an address, and are no mere face of others.

    A NIC with addresses of IPv4 and of IPv6 stands there twice, IPv4 first. Of IPv6, global and
    unique local addresses count. Loopback, dummies, tunnels, bridges and what is part of one or of
    a bond are left out.

    Args:
        wanted: names or addresses of the NICs to take instead, in this order. An address that no
            NIC is known to have is taken as it is.

    Raises:
        ValueError: one of `wanted` is neither a NIC with an address nor an address, or there is
            no NIC at all.
    """
    nics = _all()
    if wanted is not None:
        return [nic for name in wanted for nic in _named(name, nics)]
    found = [nic for nic in nics if _is_data_nic(nic.name)]
    if not found:
        raise ValueError(
            "no NIC is up and has an IPv4 address, or an IPv6 one beyond its link, besides "
            "loopback, bridges and tunnels; name those to use with nics="
        )
    return found


def loopback() -> Nic:
    """Loopback, by IPv4 where that is to be had."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((LOOPBACK.host, 0))
    except OSError:
        return LOOPBACK_6
    return LOOPBACK


def numa_nodes(wanted: Sequence[str] | None = None) -> tuple[int, ...]:
    """The NUMA nodes that the NICs of `find_nics` are at.

    Empty where memory is alike: the machine has one node, or none is known of any NIC.

    Raises:
        ValueError: one of `wanted` is no NIC.
    """
    if sum(name.removeprefix("node").isdecimal() for name in _listed(_NODES)) < 2:
        return ()
    try:
        found = find_nics(wanted)
    except ValueError:
        if wanted is not None:
            raise
        return ()
    nodes = {_attribute(nic.name, "device/numa_node") for nic in found}
    return tuple(sorted(int(node) for node in nodes if node.isdecimal()))  # -1 is not known


def _all() -> list[Nic]:
    """The addresses of all NICs."""
    routes, addresses_6 = _routes(), _addresses_6()
    nics = []
    for name in _names():
        own_routes = tuple(routes.get(name, ()))
        if (nic := _ipv4(name, own_routes)) is not None:
            nics.append(nic)
        if name in addresses_6:
            host, network = addresses_6[name]
            nics.append(Nic(name, host, network, own_routes, _line(name)))
    return [replace(nic, shares_subnet=_shares_subnet(nic, nics)) for nic in nics]


def _names() -> list[str]:
    try:
        return [name for _, name in socket.if_nameindex()]
    except OSError:  # a sandbox without netlink: addresses can be named, NICs can't
        return []


def _shares_subnet(nic: Nic, nics: list[Nic]) -> bool:
    return any(nic.is_beside(other.host) for other in nics if other.name != nic.name)


def _named(name: str, nics: list[Nic]) -> list[Nic]:
    found = [nic for nic in nics if name in (nic.name, nic.host)]
    if found:
        return found
    known = ", ".join(f"{nic.name} ({nic.host})" for nic in nics) or "none"
    if name in _names():
        raise ValueError(
            f"nics: {name!r} has no IPv4 address, and no IPv6 one beyond its link: give it one, "
            f"as by ip addr add fd00::1/64 dev {name}; those that have are {known}"
        )
    try:
        address = ip_address(name)
    except ValueError:
        raise ValueError(
            f"nics: {name!r} is no NIC with an address, and no address; there are {known}"
        ) from None
    if is_link_local(name):
        raise ValueError(
            f"nics: {name!r} is known on its link alone: name a global or unique local address"
        )
    same = [nic for nic in nics if ip_address(nic.host) == address]
    return same or [Nic(name, str(address))]


def _routes() -> dict[str, list[Network]]:
    """What the kernel's main tables send over each NIC."""
    routes: dict[str, list[Network]] = {}
    for line in _lines(_ROUTES)[1:]:
        name, network, *_, mask = line.split()[:8]
        # Addresses stand there as the CPU holds them in memory, which is network order.
        host, netmask = (socket.inet_ntoa(struct.pack("=I", int(x, 16))) for x in (network, mask))
        routes.setdefault(name, []).append(IPv4Network(f"{host}/{netmask}"))
    for line in _lines(_ROUTES_6):
        digits, width, *_, flags, name = line.split()
        if not int(flags, 16) & (_RTF_LOCAL | _RTF_REJECT):
            network_6 = IPv6Network((int(digits, 16), int(width, 16)))
            routes.setdefault(name, []).append(network_6)
    return routes


def _addresses_6() -> dict[str, tuple[str, IPv6Network]]:
    """The IPv6 address of each NIC that others reach best, and what it reaches without a router."""
    found: dict[str, list[tuple[int, str, str]]] = {}
    for line in _lines(_ADDRESSES_6):
        digits, _, width, scope, flag_digits, name = line.split()
        flags = int(flag_digits, 16)
        if int(scope, 16) == _GLOBAL_SCOPE and not flags & (_IFA_F_TENTATIVE | _IFA_F_DADFAILED):
            host = str(IPv6Address(int(digits, 16)))
            passing = flags & (_IFA_F_TEMPORARY | _IFA_F_DEPRECATED)
            found.setdefault(name, []).append((passing, host, f"{host}/{int(width, 16)}"))
    best = {name: min(addresses, key=lambda x: x[0]) for name, addresses in found.items()}
    return {
        name: (host, IPv6Network(network, strict=False))
        for name, (_, host, network) in best.items()
    }


def _lines(path: Path) -> list[str]:
    """The lines of a file of the kernel's; none where it is not there, or not for us."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _ipv4(name: str, routes: tuple[Network, ...]) -> Nic | None:
    try:
        host = socket.inet_ntoa(_ioctl(name, _SIOCGIFADDR)[20:24])
        mask = socket.inet_ntoa(_ioctl(name, _SIOCGIFNETMASK)[20:24])
    except OSError:  # it has none
        return None
    return Nic(name, host, IPv4Network(f"{host}/{mask}", strict=False), routes, _line(name))


def _line(name: str) -> Line:
    try:
        (mtu_nbytes,) = struct.unpack_from("i", _ioctl(name, _SIOCGIFMTU), 16)
    except OSError:  # it is gone again, or does not say
        return UNKNOWN_LINE
    mbit_per_s = _attribute(name, "speed")
    known = mbit_per_s.isdecimal() and int(mbit_per_s) > 0
    return Line(mtu_nbytes, int(mbit_per_s) / 8000 if known else None)


def _is_data_nic(name: str) -> bool:
    try:
        (flags,) = struct.unpack_from("<H", _ioctl(name, _SIOCGIFFLAGS), 16)
    except OSError:  # it is gone again
        return False
    if not flags & _IFF_UP or flags & _IFF_NO_DATA:
        return False
    hardware_type = _attribute(name, "type")
    if not hardware_type:  # no sysfs here: take it for what its flags say
        return True
    signs = ("bridge", "brport", "tun_flags")
    is_virtual = any(os.path.exists(_SYSFS / name / sign) for sign in signs)
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
