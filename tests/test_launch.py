"""The launcher runs the whole job, resumes it, plays one role, and fails when a child does."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import app, flags
from absl.testing import flagsaver
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from programs import free_port

import tpu_sync_rl as tsr
from tpu_sync_rl import launch
from tpu_sync_rl.examples.digest import digest_params
from tpu_sync_rl.examples.grpo import GROUP
from tpu_sync_rl.examples.policy import abstract_policy
from tpu_sync_rl.examples.rl_loop import PROMPTS_PER_REPLICA
from tpu_sync_rl.examples.rollouts import Rollouts, submit_rollouts
from tpu_sync_rl.examples.sorting_task import LENGTH

ROOT = Path(__file__).parents[1]
PREFIX = [sys.executable, "-m", "tpu_sync_rl.launch"]


def environment(**more):
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def run(folder, *arguments):
    return subprocess.run(
        [*PREFIX, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


@contextmanager
def ended(*processes):
    """Ends the processes when what runs meanwhile fails."""
    try:
        yield
    except BaseException:
        for process in processes:
            process.kill()
        raise


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def first_run(folder):
    """Two training steps of the default job, with flags from a file and from the command line."""
    (folder / "job.toml").write_text(
        'steps = 99\ncheckpoint_dir = "checkpoints"\ncheckpoint_every = 2\n'
    )
    return run(folder, "--config=job.toml", "--steps=2", "--json=run.json")


@pytest.mark.end_to_end
def test_run_proves_every_version_on_every_sampler(folder, first_run):
    assert first_run.returncode == 0, first_run.stderr
    numbers = json.loads((folder / "run.json").read_text())
    assert numbers["versions"] == 3
    assert numbers["bitwise_equal"] is True
    assert numbers["samplers"] == {"sampler-0": 2, "sampler-1": 2}
    assert numbers["reward_last"] > numbers["reward_first"]
    assert (numbers["trainer_processes"], numbers["sampler_replicas"]) == (2, 2)
    assert numbers["nbytes_per_version"] > 100_000
    assert numbers["sync_seconds_median"] > 0
    lines = first_run.stdout.splitlines()
    assert lines[0] == "starting 2 trainer processes, 2 sampler replicas on CPU devices"
    assert lines[1].startswith("coordinator at 127.0.0.1:")
    assert lines[2].startswith("per version: its training step")
    assert lines[3].startswith("step   0  reward 0.")
    assert lines[3].endswith("  sampler-0 at  0, sampler-1 at  0")
    assert lines[-1].startswith("3 versions, each proved bit-equal on 2 samplers")


@pytest.mark.slow
@pytest.mark.end_to_end
def test_resumed_run_goes_on_from_the_checkpoint_on_another_mesh(folder, first_run):
    assert first_run.returncode == 0, first_run.stderr
    resumed = run(
        folder,
        "--config=job.toml",
        "--steps=3",
        "--resume",
        "--trainer_processes=1",
        "--sampler_replicas=1",
        "--json=resumed.json",
    )
    assert resumed.returncode == 0, resumed.stderr
    _, then = resumed.stdout.split("\ntrainer-0 goes on from the checkpoint of 2\n")
    assert "\nstep   2  " in then
    before, after = (json.loads((folder / f"{n}.json").read_text()) for n in ("run", "resumed"))
    assert after["versions"] == 2
    assert after["rewards"][:2] == before["rewards"][:2]


@pytest.mark.slow
@pytest.mark.end_to_end
def test_roles_find_each_other_and_a_replica_of_two_processes_starts_from_a_checkpoint(
    folder, first_run
):
    assert first_run.returncode == 0, first_run.stderr
    flags_of_all = [
        *PREFIX,
        f"--coordinator=127.0.0.1:{free_port()}",
        f"--rollouts=127.0.0.1:{free_port()}",
        "--config=job.toml",
        "--time_limit=100",
    ]
    sampler = [*flags_of_all, "--role=sampler", "--replica=pair", "--from_checkpoint"]
    sampler.append(f"--jax_coordinator=127.0.0.1:{free_port()}")
    options = {"cwd": folder, "stdout": subprocess.PIPE, "text": True}
    one_device = "--xla_force_host_platform_device_count=1"

    def start_sampler(index):
        place = {"JOB_COMPLETION_INDEX": str(index), "PROCESSES_IN_JOB": "2"}
        return subprocess.Popen(
            sampler, env=environment(TSR_TOKEN="t", XLA_FLAGS=one_device, **place), **options
        )

    with start_sampler(0) as first, start_sampler(1) as second, ended(first, second):
        # Gloo tells of its connections on stdout, too.
        line = next(line for line in first.stdout if line.startswith("{"))
        assert json.loads(line).items() >= {"event": "checkpoint", "version": 2}.items()
        trainer = subprocess.run(
            [*flags_of_all, "--role=trainer", "--resume", "--steps=3", "--sampler_replicas=1"],
            env=environment(TSR_TOKEN="t"),
            timeout=60,
            **options,
        )
        first.communicate(timeout=60)
        second.communicate(timeout=60)
    assert (trainer.returncode, first.returncode, second.returncode) == (0, 0, 0)
    events = [json.loads(line) for line in trainer.stdout.splitlines() if line.startswith("{")]
    assert [event["event"] for event in events] == ["start", "resume", "version", "version"]
    assert events[-1]["samplers"] == {"pair": 3}
    assert events[-1]["differing"] == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--resume", "--checkpoint_dir=empty"], "FileNotFoundError: no checkpoint in"),
        (["--checkpoint_dir=checkpoints"], "FileExistsError: .*checkpoints has checkpoints"),
    ],
)
def test_failing_child_fails_the_job_and_its_error_is_shown(folder, first_run, arguments, error):
    failed = run(folder, *arguments, "--trainer_processes=1", "--json=failed.json", "--logs=failed")
    assert failed.returncode == 1
    assert "trainer-0 failed with exit status 1" in failed.stderr
    assert re.search(error, failed.stderr)
    assert failed.stderr.endswith("the programs' logs are in failed\n")
    assert json.loads((folder / "failed.json").read_text())["versions"] == 0


def test_sampler_that_ran_other_bits_fails_the_trainer(tmp_path):
    rollouts_address = f"127.0.0.1:{free_port()}"
    command = [*PREFIX, "--role=trainer", "--sampler_replicas=1"]
    command += ["--coordinator=127.0.0.1:0", f"--rollouts={rollouts_address}"]
    sharding = NamedSharding(Mesh(jax.devices()[:2], ("tp",)), PartitionSpec())
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=sharding),
        abstract_policy()[1],
    )
    digits = np.zeros((PROMPTS_PER_REPLICA * GROUP, LENGTH), np.int32)
    with (
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(TSR_TOKEN="t"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as trainer,
        ended(trainer),
    ):
        start = json.loads(trainer.stdout.readline())
        with tsr.connect_sampler(
            coordinator=start["coordinator"], replica="odd", like=like, cast=True, token="t"
        ) as session:
            update = session.sync_weights(timeout=60)
            digests = digest_params(update.params)
            digests["head/kernel/value"] ^= 1
            rollouts = Rollouts(
                replica="odd",
                incarnation=update.incarnation,
                version=update.version,
                digests=digests,
                prompts=digits.tobytes(),
                answers=digits.tobytes(),
                logprobs=digits.astype(np.float32).tobytes(),
            )
            submit_rollouts(rollouts_address, b"t", rollouts, 60)
            events, errors = trainer.communicate(timeout=60)
    assert trainer.returncode == 1
    assert json.loads(events)["differing"] == ["odd: head/kernel/value"]
    assert "version 0 is not bit-equal on odd: head/kernel/value" in errors


def test_ctrl_c_ends_the_job(folder):
    small = ["--trainer_processes=1", "--sampler_replicas=1", "--logs=logs"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        [*PREFIX, *small], cwd=folder, env=environment(), text=True, **pipes
    ) as launcher:
        assert any(line.startswith("step   0") for line in launcher.stdout)
        launcher.send_signal(signal.SIGINT)
        with ended(launcher):
            _, errors = launcher.communicate(timeout=10)
    assert launcher.returncode == 130
    assert "the programs' logs are in logs" in errors


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--resume"], "need --checkpoint_dir"),
        (["--role=trainer"], "--role needs --coordinator=host:port"),
        (["--role=sampler", "--coordinator=127.0.0.1:1"], "--role=sampler needs --replica"),
        (["--config=missing.toml"], "--config=missing.toml: .*No such file"),
        (["--json=missing/run.json"], "--json=missing/run.json: there is no folder missing"),
        (["surplus"], "unexpected argument 'surplus'"),
        (["--steps=0"], "flag --steps=0"),
    ],
)
def test_wrong_flags_are_refused(tmp_path, arguments, error):
    refused = run(tmp_path, *arguments)
    assert refused.returncode == 1
    assert re.search(error, refused.stderr)
    assert len((refused.stdout + refused.stderr).splitlines()) < 5


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_configs_name_flags_and_values_that_there_are(path):
    saved = flagsaver.save_flag_values()
    try:
        flags.FLAGS.unparse_flags()
        flags.FLAGS(["program", "--coordinator=10.0.0.2:8476"])
        launch.apply_config(path, flags.FLAGS)
        assert flags.FLAGS.tsr_coordinator == "10.0.0.2:8476"
    finally:
        flagsaver.restore_flag_values(saved)


@pytest.fixture
def values():
    values = flags.FlagValues()
    flags.DEFINE_integer("steps", 24, "", 1, flag_values=values)
    flags.DEFINE_bool("resume", False, "", flag_values=values)
    flags.DEFINE_list("tsr_nics", None, "", flag_values=values)
    values(["program"])
    return values


def test_config_sets_flags_of_every_kind(tmp_path, values):
    path = tmp_path / "job.toml"
    path.write_text('steps = 3\nresume = true\ntsr_nics = ["eth0", "eth1"]\n')
    launch.apply_config(path, values)
    assert (values.steps, values.resume, values.tsr_nics) == (3, True, ["eth0", "eth1"])


def test_config_yields_to_the_command_line(tmp_path, values):
    path = tmp_path / "job.toml"
    path.write_text("steps = 3\n")
    values(["program", "--steps=5"])
    launch.apply_config(path, values)
    assert values.steps == 5


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("steps", "job.toml: .*Expected"),
        ("stesp = 1", "stesp is not a flag of this program"),
        ("steps = 0", "flag --steps=0"),
    ],
)
def test_config_that_fits_no_flag_is_refused(tmp_path, values, text, error):
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(app.UsageError, match=error):
        launch.apply_config(path, values)


@pytest.mark.parametrize(
    ("environment", "given", "place"),
    [
        ({}, (None, None), (0, 1)),
        ({"JOB_COMPLETION_INDEX": "3", "PROCESSES_IN_JOB": "4"}, (None, None), (3, 4)),
        ({"JOB_COMPLETION_INDEX": "3", "PROCESSES_IN_JOB": "4"}, (0, 2), (0, 2)),
        ({"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b,c"}, (None, None), (1, 3)),
    ],
)
def test_place_in_the_program_comes_from_flags_or_environment(environment, given, place):
    assert launch.process_place(environment, *given) == place


def test_process_index_has_to_be_below_the_count():
    with pytest.raises(app.UsageError, match="process index 2 is not below the process count 2"):
        launch.process_place({"JOB_COMPLETION_INDEX": "2"}, None, 2)
