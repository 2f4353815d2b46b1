"""A NIC between two network namespaces that is far away, or swallows large packets. Needs root.

Kernels without netem can't delay packets, so a program of its own carries them between two TUN
devices. TCP at both ends sees the round trip as it would see that of a long line.
"""

import collections
import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from typing import Self

from tpu_sync_rl.bench import netns
from tpu_sync_rl.bench.netns import Namespaces, Veth

_TUNSETIFF = 0x400454CA  # from linux/if_tun.h
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MAX_PACKET_NBYTES = 65535
_PACKETS_PER_TURN = 64


class SlowLink:
    """A further rail between the trainer's and the sampler's namespace of `namespaces`.

    Args:
        namespaces: get the rail.
        rtt_s: of its packets, there and back.
        mtu_nbytes: that its NICs have.
        passes_nbytes: packets that are larger vanish.
    """

    def __init__(
        self,
        namespaces: Namespaces,
        *,
        rtt_s: float = 0.0,
        mtu_nbytes: int = 65000,
        passes_nbytes: int = _MAX_PACKET_NBYTES,
    ) -> None:
        veth = Veth(len(namespaces.rails) + 1)
        self._pump = subprocess.Popen(
            [
                *(sys.executable, __file__, veth.name, str(rtt_s / 2), str(passes_nbytes)),
                *(namespaces.trainer, namespaces.sampler),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._pump.stdout is not None
        assert self._pump.stdout.readline() == "made\n"
        for namespace, host in (
            (namespaces.trainer, veth.trainer_host),
            (namespaces.sampler, veth.sampler_host),
        ):
            ip = ("ip", "-n", namespace)
            commands = (
                (*ip, "addr", "add", f"{host}/24", "dev", veth.name),
                (*ip, "link", "set", veth.name, "mtu", str(mtu_nbytes), "txqueuelen", "20000"),
                (*ip, "link", "set", veth.name, "up"),
            )
            for command in commands:
                subprocess.run(command, check=True)
        namespaces.rails.append(veth)

    def close(self) -> None:
        """Takes the rail away."""
        self._pump.kill()
        self._pump.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tun(namespace: str, name: str) -> int:
    netns.enter(namespace)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return tun


def _pump(tuns: tuple[int, int], delay_s: float, passes_nbytes: int) -> None:
    """Carries packets for ever, in their order."""
    poll = select.poll()
    under_way: dict[int, collections.deque[tuple[float, bytes]]] = {}
    for tun, other in (tuns, tuns[::-1]):
        poll.register(tun, select.POLLIN)
        under_way[other] = collections.deque()
    other_of = dict((tuns, tuns[::-1]))
    while True:
        due = min((queue[0][0] for queue in under_way.values() if queue), default=None)
        # poll() counts in milliseconds; a short way is waited for on the CPU.
        left_s = 1.0 if due is None else due - time.monotonic()
        for tun, _ in poll.poll(max(0, int(left_s * 1000 - 0.5))):
            for _ in range(_PACKETS_PER_TURN):
                try:
                    packet = os.read(tun, _MAX_PACKET_NBYTES)
                except BlockingIOError:
                    break
                if len(packet) <= passes_nbytes:
                    under_way[other_of[tun]].append((time.monotonic() + delay_s, packet))
        now = time.monotonic()
        for tun, queue in under_way.items():
            while queue and queue[0][0] <= now:
                with contextlib.suppress(OSError):  # a NIC that is not up takes none
                    os.write(tun, queue.popleft()[1])


if __name__ == "__main__":
    _name, _delay_s, _passes_nbytes, *_namespaces = sys.argv[1:]
    _trainer, _sampler = (_tun(namespace, _name) for namespace in _namespaces)
    print("made", flush=True)
    _pump((_trainer, _sampler), float(_delay_s), int(_passes_nbytes))
