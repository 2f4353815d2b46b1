import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from bench_commands import measured, run_bench

from tpu_sync_rl.bench import programs, two_hosts
from tpu_sync_rl.bench.cases import Place, Settings
from tpu_sync_rl.bench.two_hosts import SamplerHost
from tpu_sync_rl.errors import AuthError, SyncTimeoutError


@pytest.mark.end_to_end
def test_each_side_of_wire_runs_on_a_host_of_its_own(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    both = (
        "wire",
        f"--coordinator={address}",
        "--model=one-big",
        "--nbytes=500000",
        "--sampler_mesh=2x2",
    )
    with ThreadPoolExecutor() as threads:
        sampler = threads.submit(run_bench, *both, "--role=sampler")
        figures = measured(tmp_path, *both, "--role=trainer", "--rounds=1")
        assert sampler.result().returncode == 0
    assert [figure["name"] for figure in figures[:3]] == ["whole call", "wire phase", "raw sockets"]


def hosts(trainer_token, sampler_token, monkeypatch):
    """Both hosts of a benchmark, in threads of this process; returns what each raised."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        coordinator = f"127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setattr(programs, "TIMEOUT_S", 1.0)

    def settings(token):
        return Settings(cases={}, options={}, trainer=Place(coordinator=coordinator), token=token)

    with ThreadPoolExecutor() as threads:
        calls = [
            threads.submit(SamplerHost, settings(trainer_token)),
            threads.submit(two_hosts.serve, settings(sampler_token)),
        ]
        return [call.exception() for call in calls]


def test_host_with_another_token_is_not_let_in(monkeypatch):
    here, there = hosts(b"secret", b"guess", monkeypatch)
    assert isinstance(here, SyncTimeoutError) and "no sampler's host dialled" in str(here)
    assert isinstance(there, AuthError) and "another token" in str(there)


def test_hosts_that_do_not_come_are_given_up(monkeypatch):
    monkeypatch.setattr(programs, "TIMEOUT_S", 0.0)
    settings = Settings(cases={}, options={}, trainer=Place(coordinator="127.0.0.1:1"))
    with pytest.raises(SyncTimeoutError, match="no trainer's host answered at"):
        two_hosts.serve(settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--role=trainer"], "--role needs --coordinator=HOST:PORT"),
        (["--role=trainer", "--coordinator=10.0.0.2:1", "--replicas=2"], "one trainer process"),
        (["--role=sampler", "--coordinator=10.0.0.2:1"], "give every program of the job a token"),
    ],
)
def test_role_refuses_what_does_not_fit(arguments, message):
    done = run_bench("wire", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
