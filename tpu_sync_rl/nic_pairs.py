"""Which local NIC goes with which remote one."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from tpu_sync_rl.nics import Nic


class _Address(Protocol):
    @property
    def nic(self) -> str:
        """Name of the NIC."""

    @property
    def host(self) -> str:
        """One of its IP addresses."""


A = TypeVar("A", bound=_Address)


def pair_up(nics: Sequence[Nic], addresses: Sequence[A]) -> list[tuple[Nic, A]]:
    """Pairs `nics` with `addresses` so that each NIC of both sides is in a pair.

    Both ends of a pair are of one family: IPv4, or IPv6 where a NIC has no other address, or its
    IPv4 one is not reached. NICs of one subnet go together, then those with a route, others by
    their order. The first pairs are those of the NICs of `addresses`, in their order. NICs whose
    family the other side lacks are left out.
    """
    pairs: list[tuple[Nic, A]] = []
    for index, faces in enumerate(_faces(addresses)):
        pairs += _nearest([(nic, at) for at in faces for nic in nics], index)
    for index, name in enumerate(dict.fromkeys(nic.name for nic in nics)):
        if all(nic.name != name for nic, _ in pairs):
            own = [nic for nic in nics if nic.name == name]
            pairs += _nearest([(nic, at) for nic in own for at in addresses], index)
    return pairs


def _faces(addresses: Sequence[A]) -> Iterable[list[A]]:
    """Each address of IPv4 with those of IPv6 of the same NIC; then those of NICs without IPv4."""
    both = {at.nic for at in addresses if ":" not in at.host}
    for at in addresses:
        if ":" not in at.host:
            yield [at, *(x for x in addresses if x.nic == at.nic and ":" in x.host)]
        elif at.nic not in both:
            yield [at]


def _nearest(pairs: Sequence[tuple[Nic, A]], index: int) -> list[tuple[Nic, A]]:
    """The one of `pairs` whose ends are nearest, the one at `index` of several; none of two sorts.

    Among those that are equally near, the family of the first one counts.
    """
    for is_near in (Nic.is_beside, Nic.reaches, Nic.speaks_to):
        near = [(nic, at) for nic, at in pairs if is_near(nic, at.host)]
        if near:
            alike = [(nic, at) for nic, at in near if nic.speaks_to(near[0][1].host)]
            return [alike[index % len(alike)]]
    return []
