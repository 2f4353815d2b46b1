"""What configs/ says is what the launcher understands and Kubernetes takes."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from absl import flags
from programs import free_port

from tpu_sync_rl import launch  # noqa: F401  (defines the flags)
from tpu_sync_rl.doctor.__main__ import _parser as doctor_parser

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
SCHEMAS = ROOT.parent / "shared" / "schemas"
KINDS = {
    CONFIGS / "gke" / "jobset.yaml": "jobset_v1alpha2.json",
    CONFIGS / "pathways" / "pathwaysjob.yaml": "pathwaysjob_v1.json",
}
ON_THIS_MACHINE = ["--process_count=1", "--sampler_replicas=1", "--steps=2", "--time_limit=100"]


def load(path):
    return yaml.safe_load(path.read_text())


def containers(path):
    """Containers of each pod template in a file, by the name of what they belong to."""
    spec = load(path)["spec"]
    if "controller" in spec:
        return {"controller": spec["controller"]["template"]["spec"]["containers"][0]}
    return {
        job["name"]: job["template"]["spec"]["template"]["spec"]["containers"][0]
        for job in spec["replicatedJobs"]
    }


CONTAINERS = [
    pytest.param(container, id=f"{path.parent.name}-{name}")
    for path in KINDS
    for name, container in containers(path).items()
]


@pytest.mark.parametrize("path", KINDS, ids=lambda path: path.name)
def test_file_passes_the_strict_schema_of_its_kind(path):
    if not SCHEMAS.is_dir():
        pytest.skip("no schemas beside the checkout")
    schema = json.loads((SCHEMAS / KINDS[path]).read_text())
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(load(path))] == []
    misspelt = load(path)
    misspelt["spec"]["replicas_"] = 1
    assert list(validator.iter_errors(misspelt)) != []


@pytest.mark.parametrize("container", CONTAINERS)
def test_arguments_are_flags_of_the_launcher(container):
    assert container["command"] == ["python", "-m", "tpu_sync_rl.launch"]
    names = [re.fullmatch(r"--(\w+)=.+", argument)[1] for argument in container["args"]]
    assert [name for name in names if name not in flags.FLAGS] == []


@pytest.mark.parametrize("container", CONTAINERS)
def test_environment_is_read_by_the_library_or_by_the_command_line(container):
    sources = "".join(path.read_text() for path in (ROOT / "tpu_sync_rl").glob("*.py"))
    expanded = str(container["args"]) + str(container.get("readinessProbe"))
    for variable in container.get("env", []):
        name = variable["name"]
        assert f'"{name}"' in sources or re.search(rf"\$\(?{name}\b", expanded), name
    defined = {variable["name"] for variable in container.get("env", [])}
    assert set(re.findall(r"\$\(?([A-Z_]+)", expanded)) <= defined


def test_probe_is_a_command_of_the_doctor():
    for container in containers(CONFIGS / "gke" / "jobset.yaml").values():
        shell, dash_c, line = container["readinessProbe"]["exec"]["command"]
        assert (shell, dash_c) == ("sh", "-c")
        command, arguments = line.split()[:3], line.split()[3:]
        assert command == ["python", "-m", "tpu_sync_rl.doctor"]
        assert doctor_parser().parse_args(arguments).coordinator == "$TRAINER:8476"


def test_pods_have_the_data_nics_that_the_flags_name():
    jobs = load(CONFIGS / "gke" / "jobset.yaml")["spec"]["replicatedJobs"]
    for job in jobs:
        pod = job["template"]["spec"]["template"]
        interfaces = json.loads(pod["metadata"]["annotations"]["networking.gke.io/interfaces"])
        names = [interface["interfaceName"] for interface in interfaces]
        (nics,) = (x for x in pod["spec"]["containers"][0]["args"] if x.startswith("--tsr_nics="))
        assert nics.partition("=")[2].split(",") == names[1:]
        assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"]


@pytest.mark.parametrize("path", KINDS, ids=lambda path: path.name)
def test_three_lines_are_marked_for_the_user(path):
    marks = re.findall(r"# EDIT(.*)\n(.*)", path.read_text())
    assert sum(max(1, len(re.findall(r"data-\d", names))) for names, _ in marks) == 3
    assert all(re.search(r"[A-Z]{6}|interfaces", line) for _, line in marks)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_keys_of_a_config_are_flags_of_the_launcher(path):
    assert [name for name in tomllib.loads(path.read_text()) if name not in flags.FLAGS] == []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*/Dockerfile*")), ids=lambda path: path.name)
def test_image_installs_extras_that_there_are(path):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = re.findall(r"'\.\[(\w+)\]'", path.read_text())
    assert wanted
    assert set(wanted) <= extras["optional-dependencies"].keys()


def command_line(container, **variables):
    """What Kubernetes runs, but by this interpreter."""
    line = [*container["command"], *container["args"]]
    for name, value in variables.items():
        line = [word.replace(f"$({name})", value) for word in line]
    assert not any("$(" in word for word in line)
    return [sys.executable, *line[1:]]


def environment(num_devices, **more):
    device_flag = f"--xla_force_host_platform_device_count={num_devices}"
    more |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": device_flag, "PYTHONPATH": str(ROOT)}
    return {**os.environ, **more}


def versions(stdout):
    events = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    return [event for event in events if event["event"] == "version"]


@pytest.mark.slow
@pytest.mark.end_to_end
def test_command_lines_of_the_jobset_run_a_job_on_cpu(tmp_path):
    pods = containers(CONFIGS / "gke" / "jobset.yaml")
    port = free_port()
    here = [*ON_THIS_MACHINE, f"--coordinator=127.0.0.1:{port}", "--tsr_nics=127.0.0.1"]
    options = {"cwd": tmp_path, "text": True, "stdout": subprocess.PIPE}
    options["env"] = environment(2, TSR_TOKEN="t")
    where = {"TRAINER": "127.0.0.1", "JOB_INDEX": "0"}
    here.append(f"--rollouts=127.0.0.1:{free_port()}")
    with (
        subprocess.Popen([*command_line(pods["trainer"], **where), *here], **options) as trainer,
        subprocess.Popen([*command_line(pods["sampler"], **where), *here], **options) as sampler,
    ):
        try:
            stdout, _ = trainer.communicate(timeout=100)
            sampler.communicate(timeout=30)
        finally:
            trainer.kill()
            sampler.kill()
    assert (trainer.returncode, sampler.returncode) == (0, 0)
    assert [event["samplers"] for event in versions(stdout)] == [
        {"sampler-0": version} for version in range(3)
    ]


@pytest.mark.slow
@pytest.mark.end_to_end
def test_command_line_of_the_pathwaysjob_runs_the_loop_in_one_client_on_cpu(tmp_path):
    (controller,) = containers(CONFIGS / "pathways" / "pathwaysjob.yaml").values()
    done = subprocess.run(
        [*command_line(controller), *ON_THIS_MACHINE],
        cwd=tmp_path,
        env=environment(4),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    seen = versions(done.stdout)
    assert [event["samplers"] for event in seen] == [{"sampler-0": n} for n in range(3)]
    assert seen[-1]["reward"] > seen[0]["reward"]
