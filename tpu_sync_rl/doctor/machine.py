"""What there is to say about this machine, whatever job it is to take part in."""

import os
import resource
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from tpu_sync_rl import _native, same_host, software
from tpu_sync_rl.doctor.findings import Finding
from tpu_sync_rl.nics import Nic, find_nics
from tpu_sync_rl.report import shown_nbytes
from tpu_sync_rl.same_host import NotSharedError

_MIN_JAX = (0, 10)
_SPARE_FDS = 256  # what a JAX program has open besides, and handshakes under way
_ENOUGH_BUFFER_NBYTES = 4 << 20
_JUMBO_NBYTES = 9000
_FAST_GBITS_PER_S = 25  # from here on the size of frames is felt

MEMORY_ADVICE = (
    "TCP takes its place, and more CPU: let containers of one host share their network and user "
    "namespace, see /proc/sys/kernel/random/boot_id, and call memfd_create, F_ADD_SEALS and Unix "
    'sockets; or pass same_host="tcp"'
)

_PROC = Path("/proc")
_SYS = Path("/sys")


def examine(
    *,
    nics: Sequence[str] | None,
    num_streams: int,
    nbytes: int | None,
    num_generations: int,
) -> Iterator[Finding]:
    """Looks at everything that needs nobody else.

    Args:
        nics: names or addresses of those to use; None finds them.
        num_streams: connections that a process will have on each NIC.
        nbytes: that a process of a sampler holds of one version; None if it is not known.
        num_generations: that it holds of them.
    """
    yield _software()
    yield from _kernels()
    try:
        found = find_nics(nics)
    except ValueError as error:
        found = []
        yield Finding(
            "NICs",
            "note",
            str(error),
            "there is loopback alone: programs of other hosts are not reached",
        )
    names = [*dict.fromkeys(nic.name for nic in found)]
    for name in names:
        yield _nic([nic for nic in found if nic.name == name])
    if any(nic.shares_subnet and ":" not in nic.host for nic in found):
        yield _shared_subnet()
    yield from _nics_that_are_down()
    yield _open_files(num_streams * max(1, len(names)))
    yield _memory(nbytes, num_generations)
    yield _shared_memory()
    yield _huge_pages()
    yield _buffers()
    yield _congestion()
    yield _ports()


def _software() -> Finding:
    versions = software.versions()
    seen = software.shown(versions)
    jax = versions.get("jax")
    if jax is None or tuple(int(part) for part in jax.split(".")[:2]) < _MIN_JAX:
        wanted = ".".join(map(str, _MIN_JAX))
        return Finding("software", "broken", seen, f"install JAX {wanted} or newer")
    return Finding("software", "ok", seen)


def _kernels() -> Iterator[Finding]:
    """What copies, converts and sums bytes: the instructions that are used, of those there are."""
    levels = _native.cpu_levels()
    try:
        level = _native.cpu_level()
    except ValueError as error:
        yield Finding("CPU", "broken", str(error), "unset TSR_CPU, or name one of these")
        return
    seen = f"kernels for {level}"
    if level == levels[0]:
        yield Finding("CPU", "ok", seen)
    else:
        yield Finding("CPU", "note", f"{seen}, as TSR_CPU asks", f"unset it: there is {levels[0]}")
    name = _native.crc32c_implementation()
    if name == "table":
        advice = "without instructions for CRC32C, checksums are what limits a sync"
        yield Finding("checksums", "note", name, advice)
    else:
        yield Finding("checksums", "ok", f"CRC32C by {name}")


def _nic(faces: Sequence[Nic]) -> Finding:
    nic = faces[0]
    mtu_nbytes, gbits_per_s = nic.line.mtu_nbytes, 8 * (nic.line.gbytes_per_s or 0)
    speed = f"{gbits_per_s:g} Gbit/s" if gbits_per_s else "speed unknown"
    seen = f"{' and '.join(face.host for face in faces)}, MTU {mtu_nbytes or 'unknown'}, {speed}"
    if gbits_per_s >= _FAST_GBITS_PER_S and mtu_nbytes and mtu_nbytes < _JUMBO_NBYTES:
        advice = f"with an MTU of {_JUMBO_NBYTES}, at both ends and in between, it costs less CPU"
        return Finding(f"NIC {nic.name}", "note", seen, advice)
    return Finding(f"NIC {nic.name}", "ok", seen)


def _shared_subnet() -> Finding:
    folder = _PROC / "sys/net/ipv4/conf/all"
    wanted = {"arp_ignore": ("1",), "arp_announce": ("2",), "rp_filter": ("0", "2")}
    found = {name: _read(folder / name) for name in wanted}
    seen = ", ".join(f"{name}={value or 'unknown'}" for name, value in found.items())
    wrong = [name for name, values in wanted.items() if found[name] not in values]
    if wrong:
        commands = [f"sysctl -w net.ipv4.conf.all.{name}={wanted[name][-1]}" for name in wrong]
        advice = f"else all may go by one of them: {'; '.join(commands)}"
        return Finding("NICs in one subnet", "note", seen, advice)
    return Finding("NICs in one subnet", "ok", seen)


def _nics_that_are_down() -> Iterator[Finding]:
    for _, name in socket.if_nameindex():
        folder = _SYS / "class/net" / name
        if os.path.exists(folder / "device") and _read(folder / "operstate") == "down":
            advice = f"ip link set {name} up, and give it an address, if it is to carry data"
            yield Finding(f"NIC {name}", "note", "down", advice)


def _open_files(num_streams: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = num_streams + _SPARE_FDS
    seen = f"limit {soft} (at most {hard}); {num_streams} connections and some hundred others"
    if soft < need:
        how = "ulimit -n" if need <= hard else "LimitNOFILE= or limits.conf: nofile"
        return Finding("open files", "broken", seen, f"raise the limit to {need} or more: {how}")
    return Finding("open files", "ok", seen)


def _memory(nbytes: int | None, num_generations: int) -> Finding:
    available = available_nbytes()
    if available is None:
        advice = "a sampler needs room for two generations of its params"
        return Finding("memory", "note", "/proc/meminfo can't be read here", advice)
    seen = f"{shown_nbytes(available)} available"
    if nbytes is None:
        return Finding(
            "memory",
            "ok",
            f"{seen}; compared with --nbytes, or with a version of the job at --coordinator",
        )
    need = nbytes * num_generations
    seen += f", {shown_nbytes(need)} for {num_generations} generations of {shown_nbytes(nbytes)}"
    if need > available:
        advice = "spread the replica over more hosts, or make room: a sampler holds two generations"
        return Finding("memory", "broken", seen, advice)
    return Finding("memory", "ok", seen)


def available_nbytes() -> int | None:
    """Host memory that a new process may take: the machine's, within what its cgroups allow.

    None where the machine does not say.
    """
    lines = _read(_PROC / "meminfo").splitlines()
    fields = dict(line.split(":") for line in lines)
    if "MemAvailable" not in fields:
        return None
    available = int(fields["MemAvailable"].split()[0]) << 10
    for line in _read(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, root = ("memory.max", "memory.current"), _SYS / "fs/cgroup"
        elif controllers == "memory":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            root = _SYS / "fs/cgroup/memory"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):  # every one above limits it, too
            most, used = (_read(folder / name) for name in names)
            if most.isdecimal() and used.isdecimal():
                left = int(most) - int(used) + _reclaimable_nbytes(folder)
                available = min(available, max(0, left))
            if folder == root:
                break
    return available


def _reclaimable_nbytes(group: Path) -> int:
    """What a cgroup counts as used and gives away when asked: files that were read or written."""
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    return int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))


def _shared_memory() -> Finding:
    """Whether this process can share memory with others of this host."""
    try:
        same_host.check_usable()
    except NotSharedError as error:
        return Finding("shared memory", "note", str(error), MEMORY_ADVICE)
    return Finding("shared memory", "ok", "to be had between processes of this host and user")


def _huge_pages() -> Finding:
    seen = _read(_SYS / "kernel/mm/transparent_hugepage/enabled")
    if "[never]" in seen:
        advice = (
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: less time in page faults"
        )
        return Finding("huge pages", "note", seen, advice)
    return Finding("huge pages", "ok", seen or "unknown")


def _buffers() -> Finding:
    seen, small = [], []
    for name in ("tcp_rmem", "tcp_wmem"):
        limits = _read(_PROC / "sys/net/ipv4" / name)
        if not limits:
            seen.append(f"{name} unknown")
            continue
        most = int(limits.split()[-1])
        seen.append(f"{name} up to {shown_nbytes(most)}")
        if most < _ENOUGH_BUFFER_NBYTES:
            small.append(f'sysctl -w net.ipv4.{name}="4096 131072 {_ENOUGH_BUFFER_NBYTES}"')
    return Finding("TCP buffers", "note" if small else "ok", ", ".join(seen), "; ".join(small))


def _congestion() -> Finding:
    used = _read(_PROC / "sys/net/ipv4/tcp_congestion_control")
    allowed = _read(_PROC / "sys/net/ipv4/tcp_allowed_congestion_control").split()
    choices = " or ".join(allowed) or "what this kernel allows, which can't be read here"
    return Finding("congestion", "ok", f"{used or 'unknown'}; congestion= may be {choices}")


def _ports() -> Finding:
    allowed = " to ".join(_read(_PROC / "sys/net/ipv4/ip_local_port_range").split())
    seen = f"data connections go to free ports of the trainer's hosts, {allowed or 'unknown'} here"
    return Finding("ports", "ok", seen)


def _read(path: Path) -> str:
    """What a file of the kernel says; "" where it is not there, or not for us."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
