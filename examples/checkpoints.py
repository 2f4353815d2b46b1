"""Checkpoints of the training state through Orbax, readable by trainers and by samplers."""

import os
from typing import Any, NamedTuple

import orbax.checkpoint as ocp


class TrainingState(NamedTuple):
    """All that a trainer needs to go on.

    Attributes:
        version: the params' number of training steps, which is the version they go by.
        params: f32 params.
        opt_state: state of the optimizer.
        rewards: mean reward of each version before this one.
    """

    version: int
    params: Any
    opt_state: Any
    rewards: list[float]


class Checkpoints:
    """The checkpoints in one folder; every process of the program makes every call."""

    def __init__(self, folder: str) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(os.path.abspath(folder), options=options)

    @property
    def last_version(self) -> int | None:
        """The version of the last checkpoint, None where there is none."""
        version = self._manager.latest_step()
        return None if version is None else int(version)

    def save(self, state: TrainingState) -> None:
        """Writes `state` and returns when it is on disk."""
        self._manager.save(
            state.version,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                opt_state=ocp.args.StandardSave(state.opt_state),
                rewards=ocp.args.JsonSave(state.rewards),
            ),
        )

    def load_state(self, params: Any, opt_state: Any) -> TrainingState:
        """The last state, with the shapes, dtypes and shardings of the two abstract trees.

        Raises:
            FileNotFoundError: there is no checkpoint.
        """
        version = self._needed_version()
        loaded = self._manager.restore(
            version,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(params),
                opt_state=ocp.args.StandardRestore(opt_state),
                rewards=ocp.args.JsonRestore(),
            ),
        )
        return TrainingState(version, loaded.params, loaded.opt_state, list(loaded.rewards))

    def load_params(self, like: Any) -> tuple[int, Any]:
        """The last version and its params, with the shapes, dtypes and shardings of `like`.

        Raises:
            FileNotFoundError: there is no checkpoint.
        """
        version = self._needed_version()
        args = ocp.args.Composite(params=ocp.args.StandardRestore(like))
        return version, self._manager.restore(version, args=args).params

    def _needed_version(self) -> int:
        if self.last_version is None:
            raise FileNotFoundError(f"no checkpoint in {self._manager.directory}")
        return self.last_version
