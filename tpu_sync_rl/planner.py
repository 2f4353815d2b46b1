"""What a sampler process wants, and how it reads that from programs with manifests of their own."""

from tpu_sync_rl.manifest import Manifest, Rename, Sides, match, rounded
from tpu_sync_rl.messages import Holder
from tpu_sync_rl.plan import Plan, make_plan


class Planner:
    """Makes the plans of one sampler process. One thread at a time.

    Args:
        wanted: manifest of its program.
        process: its index there.
        rename: from the trainer's keys to its own.
        cast: allow one float dtype to become another.
        chunk_nbytes: most bytes of a chunk on the wire.
    """

    def __init__(
        self, wanted: Manifest, *, process: int, rename: Rename, cast: bool, chunk_nbytes: int
    ) -> None:
        self._wanted = wanted
        self._process = process
        self._rename = rename
        self._cast = cast
        self._chunk_nbytes = chunk_nbytes

    def of_trainer(self, manifest: bytes) -> tuple[Plan | None, str]:
        """The plan to read from the trainer; or None, and every difference."""
        return self._plan(manifest, None, Sides("the trainer", "the sampler", "on"))

    def of_holder(self, holder: Holder, trainer: Manifest) -> tuple[Plan | None, str]:
        """The plan to read from a replica what it read from the trainer, bit for bit."""
        sides = Sides(f"replica {holder.replica!r}", "the sampler", "on")
        return self._plan(holder.manifest, trainer, sides)

    def _plan(
        self, manifest: bytes, original: Manifest | None, sides: Sides
    ) -> tuple[Plan | None, str]:
        try:
            source = Manifest.decode(manifest)
            pairs, differences = match(
                source, self._wanted, rename=self._rename, cast=self._cast, sides=sides
            )
            if original is not None:
                differences = rounded(original, source, self._wanted, pairs) or differences
            if differences:
                return None, "\n".join(differences)
            plan = make_plan(
                source, self._wanted, pairs, process=self._process, chunk_nbytes=self._chunk_nbytes
            )
        except Exception as error:  # a rename that the application wrote may raise anything
            return None, f"{type(error).__name__}: {error}"
        return plan, ""
