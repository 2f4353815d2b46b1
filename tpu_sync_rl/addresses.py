"""Addresses "host:port": one rule for what a user writes, in every option and command line."""

import re
from ipaddress import IPv4Address, IPv6Address, ip_address

MAX_PORT = 65535

_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_.])?")  # of a host, in lower case
_NUMERIC = re.compile(r"(.*\.)?[0-9]+\.?")  # as a whole or at its end: no name is so


def split_address(
    address: str | None, option: str = "coordinator", *, dialled: bool = False
) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port"; the last colon parts them without brackets, too.

    The host comes back as it is compared and shown: in lower case, an address in its short form,
    an IPv4 one without the clothes of IPv6.

    Args:
        address: as a user gave it.
        option: that has it, for the message.
        dialled: whether somebody listens there already, so that port 0 is none.

    Raises:
        ValueError: it is none; shows the form that it must have.
    """
    wrong = f"{option} must be 'host:port', such as '10.0.0.2:8476' or '[fd00::2]:8476'"
    if not isinstance(address, str):
        raise ValueError(f"{wrong}, not {address!r}")
    try:
        host, port = _split(address)
        host = _checked_host(host)
        number = _checked_port(port, dialled=dialled)
    except ValueError as error:
        raise ValueError(f"{wrong}, not {address!r}: {error}") from None
    return host, number


def join_address(host: str, port: int) -> str:
    """The address that `split_address` takes apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def port_after(port: int) -> int:
    """The port that lies beside `port` by default: the next one, and a free one beside a free one.

    Raises:
        ValueError: `port` is the last one.
    """
    if port == MAX_PORT:
        raise ValueError(f"there is no port after {port}: take a lower one")
    return port + 1 if port else 0


def is_loopback(host: str) -> bool:
    """True where `host` can't be reached from other machines."""
    if host.lower().removesuffix(".") == "localhost":
        return True
    address = parse_ip(host)
    return address is not None and address.is_loopback


def parse_ip(host: str) -> IPv4Address | IPv6Address | None:
    """The IP address that `host` is, an IPv4 one also where IPv6 wraps it; None for a name."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_link_local(host: str) -> bool:
    """Whether `host` is an IPv6 address that means something on one link alone."""
    address = parse_ip(host)
    return isinstance(address, IPv6Address) and address.is_link_local


def check_exposure(host: str, *, token: bytes, insecure: bool) -> None:
    """Sees to it that whoever can reach `host` needs a token.

    Raises:
        ValueError: other machines can, there is no token, and `insecure` does not allow that.
    """
    if not token and not insecure and not is_loopback(host):
        raise ValueError(
            f"{host} can be reached from other machines: give every program of the job a token "
            "(token=, TSR_TOKEN or TSR_TOKEN_FILE), or pass insecure=True"
        )


def _split(address: str) -> tuple[str, str]:
    """What stands before and behind the colon of the port, whatever that is."""
    if any(character.isspace() for character in address):
        raise ValueError("it has white space in it")
    scheme, is_url, _ = address.partition("://")
    if is_url:
        raise ValueError(f"leave '{scheme}://' out")
    if address.startswith("["):
        host, closed, port = address[1:].partition("]")
        if not closed or ":" not in host or parse_ip(host) is None:
            raise ValueError("brackets are for an IPv6 address")
        if not port.startswith(":") or port == ":":
            raise ValueError("it lacks the port")
        return host, port[1:]
    host, colon, port = address.rpartition(":")
    if not colon or not port:
        raise ValueError("it lacks the port")
    if ":" in host and parse_ip(host) is None:
        if parse_ip(address) is not None:
            raise ValueError(f"it lacks the port, as in '[{address}]:8476'")
        raise ValueError(f"{host!r} is no IPv6 address")
    return host, port


def _checked_host(host: str) -> str:
    host = host.lower()
    if is_link_local(host):
        raise ValueError("a link-local address is known on one link alone: take a global one")
    if "%" in host:
        raise ValueError(f"leave '%{host.partition('%')[2]}' out")
    address = parse_ip(host)
    if address is not None:
        return str(address)
    if not host:
        raise ValueError("it lacks the host")
    if not _NAME.fullmatch(host) or _NUMERIC.fullmatch(host):
        raise ValueError(f"{host!r} is neither an address nor a name of a host")
    return host


def _checked_port(port: str, *, dialled: bool) -> int:
    if not (port.isascii() and port.isdecimal()):
        raise ValueError(f"{port!r} is no port")
    number = int(port[:6])  # of more digits none is in range, and int() refuses very many
    if number > MAX_PORT or len(port) > 5:
        raise ValueError(f"port {port[:12]} is out of range, {MAX_PORT} is the last")
    if dialled and number == 0:
        raise ValueError("port 0 is a free one for who listens: dial the one that was taken")
    return number
