"""Runs the RL loop of `examples/rl_loop.py`: all of it on this machine, or one role on one host.

    python -m tpu_sync_rl.launch --steps=50                          # all of it, on CPU devices
    python -m tpu_sync_rl.launch --config=configs/local.toml         # the same, with a file's flags
    python -m tpu_sync_rl.launch --role=trainer --coordinator=10.0.0.2:8476      # on a cluster
    python -m tpu_sync_rl.launch --role=sampler --coordinator=10.0.0.2:8476 --replica=sampler-0
    python -m tpu_sync_rl.launch --role=controller                   # all of it in one JAX client

On this machine it exits with 0 only if every version was proved bit-equal on every sampler, all
samplers ended on the last one, and the reward rose. A trainer or controller prints its events
to stdout, each a line with a JSON object; a sampler prints none. The options of the sessions are
the --tsr_ flags, which --helpfull lists.
"""

import json
import os
import sys
import tomllib
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from tpu_sync_rl import flags as tsr_flags
from tpu_sync_rl.addresses import join_address, port_after, split_address
from tpu_sync_rl.child_programs import end_with_stdin
from tpu_sync_rl.local_job import LocalJob, run_local_job

FLAGS = flags.FLAGS

flags.DEFINE_string("config", None, "TOML file with values for these flags; flags given here win.")
flags.DEFINE_enum(
    "role",
    None,
    ["trainer", "sampler", "controller"],
    "Be one process of this role, or the one JAX client of all of it, as under Pathways; default: "
    "run all, here.",
)
flags.DEFINE_integer("steps", 24, "Training steps in all; a resumed run goes on up to this.", 1)
flags.DEFINE_integer("seed", 0, "Seed of the first params.")
flags.DEFINE_integer("sampler_replicas", 2, "Sampler replicas that take every version.", 1)
flags.DEFINE_string("checkpoint_dir", None, "Folder of Orbax checkpoints.")
flags.DEFINE_integer("checkpoint_every", 8, "Training steps from one checkpoint to the next.", 1)
flags.DEFINE_bool("resume", False, "Trainer: go on from the last checkpoint.")
flags.DEFINE_bool(
    "from_checkpoint", False, "Sampler: use the last checkpoint's params until the trainer is up."
)

# All of it on this machine.
flags.DEFINE_integer("trainer_processes", 2, "Processes of the trainer program.", 1)
flags.DEFINE_integer("trainer_devices", 2, "CPU devices of each trainer process.", 1)
flags.DEFINE_integer("sampler_devices", 2, "CPU devices of each sampler replica.", 1)
flags.DEFINE_float(
    "time_limit", 600, "Seconds that all of it may take; of a role, that one wait may take.", 1
)
flags.DEFINE_string("json", None, "File for the numbers of the run.")
flags.DEFINE_string("logs", None, "Folder for the programs' logs; default: a temporary one.")

# One role on one host.
flags.DEFINE_alias("coordinator", "tsr_coordinator")
flags.DEFINE_alias("replica", "tsr_replica")
flags.DEFINE(
    tsr_flags.AddressParser(),
    "rollouts",
    None,
    "host:port where process 0 of the trainer takes rollouts; default: the coordinator's host and "
    "the port after its own.",
    serializer=flags.ArgumentSerializer[str](),
)
flags.DEFINE_integer(
    "process_index",
    None,
    "Index of this process in its program; default: JOB_COMPLETION_INDEX, which Kubernetes sets in "
    "the pods of an Indexed Job (and so of a JobSet), or TPU_WORKER_ID, which GKE sets; else 0.",
    0,
)
flags.DEFINE_integer(
    "process_count",
    None,
    "Processes of this program; default: PROCESSES_IN_JOB, or as many as TPU_WORKER_HOSTNAMES, "
    "which GKE sets, has names; else 1.",
    1,
)
flags.DEFINE(
    tsr_flags.AddressParser(),
    "jax_coordinator",
    None,
    "host:port of jax.distributed for a program of several processes; default: what JAX finds "
    "itself, such as JAX_COORDINATOR_ADDRESS.",
    serializer=flags.ArgumentSerializer[str](),
)
flags.DEFINE_bool("end_with_stdin", False, "End when stdin closes, as children of a launcher do.")

# What children on this machine are told as well, beside the flags of `tpu_sync_rl.flags`.
_SHARED = (
    "steps",
    "seed",
    "sampler_replicas",
    "checkpoint_dir",
    "checkpoint_every",
    "resume",
    "from_checkpoint",
    "time_limit",
)

_INTERRUPTED = 130  # The exit status that shells know for Ctrl-C.


def main(argv: list[str]) -> int:
    """Runs what the flags say; returns the exit status."""
    try:
        return _run(argv)
    except app.UsageError as error:  # absl would print all of the help above it.
        print(f"error: {error}\nPass --help to see the flags.", file=sys.stderr)
        return 1


def _run(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    if FLAGS.config is not None:
        apply_config(Path(FLAGS.config), FLAGS)
    if (FLAGS.resume or FLAGS.from_checkpoint) and FLAGS.checkpoint_dir is None:
        raise app.UsageError("--resume and --from_checkpoint need --checkpoint_dir")
    if FLAGS.role == "controller":
        if FLAGS.checkpoint_dir is not None:
            raise app.UsageError("--role=controller keeps no checkpoints: leave --checkpoint_dir")
        _run_controller()
        return 0
    if FLAGS.role is not None:
        if not FLAGS.coordinator:
            raise app.UsageError("--role needs --coordinator=host:port")
        if FLAGS.role == "sampler" and not FLAGS.replica:
            raise app.UsageError("--role=sampler needs --replica=NAME, unique within the job")
        place = process_place(os.environ, FLAGS.process_index, FLAGS.process_count)
        run_role(FLAGS.role, _rollouts_address(FLAGS.role), *place)
        return 0
    if FLAGS.json is not None and not Path(FLAGS.json).parent.is_dir():
        raise app.UsageError(f"--json={FLAGS.json}: there is no folder {Path(FLAGS.json).parent}")
    return run_local_job(
        LocalJob(
            trainer_processes=FLAGS.trainer_processes,
            trainer_devices=FLAGS.trainer_devices,
            sampler_replicas=FLAGS.sampler_replicas,
            sampler_devices=FLAGS.sampler_devices,
            steps=FLAGS.steps,
            time_limit_s=FLAGS.time_limit,
            log_dir=FLAGS.logs,
            json_path=FLAGS.json,
            role_flags=shared_flags(FLAGS),
        )
    )


def apply_config(path: Path, flag_values: flags.FlagValues) -> None:
    """Sets the flags that the TOML file at `path` names, unless the command line has.

    Raises:
        app.UsageError: the file can't be read, or names what is no flag or no value of it.
    """
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise app.UsageError(f"--config={path}: {error}") from error
    for name, value in values.items():
        if name not in flag_values:
            raise app.UsageError(f"--config={path}: {name} is not a flag of this program")
        if not flag_values[name].present:
            try:
                flag_values[name].parse(value)
            except flags.Error as error:
                raise app.UsageError(f"--config={path}: {error}") from error


def shared_flags(flag_values: flags.FlagValues) -> tuple[str, ...]:
    """Command line arguments that give a child the flags that were given to this process."""
    names = [*_SHARED, *(name for name in flag_values if name.startswith("tsr_"))]
    given = [flag_values[name] for name in names if flag_values[name].value is not None]
    return tuple(flag.serialize() for flag in given)


def process_place(
    environment: Mapping[str, str], index: int | None, count: int | None
) -> tuple[int, int]:
    """Index and count of this process in its program: as given, else from `environment`."""
    if index is None:
        index = int(environment.get("JOB_COMPLETION_INDEX", environment.get("TPU_WORKER_ID", 0)))
    if count is None:
        names = environment.get("TPU_WORKER_HOSTNAMES", "localhost").split(",")
        count = int(environment.get("PROCESSES_IN_JOB", len(names)))
    if index >= count:
        raise app.UsageError(f"process index {index} is not below the process count {count}")
    return index, count


def _rollouts_address(role: str) -> str:
    """Where the trainer takes rollouts. Raises app.UsageError where an address is none."""
    try:
        host, port = split_address(FLAGS.coordinator, "--coordinator", dialled=role == "sampler")
        return FLAGS.rollouts or join_address(host, port_after(port))
    except ValueError as error:
        raise app.UsageError(str(error)) from error


def run_role(role: str, rollouts: str, index: int, count: int) -> None:
    """Is process `index` of the `count` of a trainer or of a replica, until the job has ended."""
    if FLAGS.end_with_stdin:
        end_with_stdin()
    if not FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # JAX and Orbax tell each of their steps at INFO.
    try:
        _run_role(role, rollouts, index, count)
    except BaseException as error:
        traceback.print_exc()
        # Past the exit handlers: jax.distributed's would wait for the program's other processes.
        os._exit(_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)


def _run_role(role: str, rollouts: str, index: int, count: int) -> None:
    import jax

    import tpu_sync_rl as tsr
    from tpu_sync_rl.examples import rl_loop

    if count > 1:
        jax.distributed.initialize(FLAGS.jax_coordinator, count, index)
    timeout_s = FLAGS.time_limit
    if role == "trainer":
        rl_loop.run_trainer(
            rl_loop.TrainerConfig(
                connect=tsr_flags.connect_options(tsr.connect_trainer),
                rollouts=rollouts,
                num_replicas=FLAGS.sampler_replicas,
                steps=FLAGS.steps,
                seed=FLAGS.seed,
                checkpoint_dir=FLAGS.checkpoint_dir,
                checkpoint_every=FLAGS.checkpoint_every,
                resume=FLAGS.resume,
                timeout_s=timeout_s,
            ),
            _print_event,
        )
    else:
        rl_loop.run_sampler(
            rl_loop.SamplerConfig(
                connect=tsr_flags.connect_options(tsr.connect_sampler),
                rollouts=rollouts,
                from_checkpoint=FLAGS.checkpoint_dir if FLAGS.from_checkpoint else None,
                timeout_s=timeout_s,
            ),
            _print_event,
        )


def _run_controller() -> None:
    """Is the one JAX client that sees all devices; under Pathways, the controller."""
    if "proxy" in os.environ.get("JAX_PLATFORMS", ""):
        try:
            import pathwaysutils
        except ModuleNotFoundError as error:
            raise app.UsageError("JAX_PLATFORMS=proxy needs pip install pathwaysutils") from error
        pathwaysutils.initialize()
    from tpu_sync_rl.examples.single_controller import ControllerConfig, run_controller

    config = ControllerConfig(
        num_replicas=FLAGS.sampler_replicas, steps=FLAGS.steps, seed=FLAGS.seed
    )
    try:
        run_controller(config, _print_event)
    except ValueError as error:
        raise app.UsageError(str(error)) from error


def _print_event(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


def _entry_point() -> None:
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    _entry_point()
