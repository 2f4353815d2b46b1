"""What the doctor finds on machines that are well, and on others."""

import json
import os
import resource
import socket
import subprocess
import sys

import jax.numpy as jnp
import pytest

import tpu_sync_rl as tsr
from tpu_sync_rl import same_host, software, tcp
from tpu_sync_rl.doctor import __main__ as command
from tpu_sync_rl.doctor import job, large_packets, machine
from tpu_sync_rl.doctor.findings import Finding, exit_status, print_table, to_json
from tpu_sync_rl.messages import ConnectedProcess, JobStatus
from tpu_sync_rl.nics import Nic
from tpu_sync_rl.rails import Rail
from tpu_sync_rl.report import Line

GB = 10**9


def examine(**changes):
    """The findings about this machine, by subject."""
    arguments = {"nics": ["lo"], "num_streams": 4, "nbytes": None, "num_generations": 2} | changes
    return {finding.subject: finding for finding in machine.examine(**arguments)}


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Files that the doctor takes for the kernel's; those of a healthy machine at first."""

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    monkeypatch.setattr(machine, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "_SYS", tmp_path / "sys")
    write("proc/meminfo", "MemTotal: 100 kB\nMemAvailable: 20000000 kB")
    write("proc/self/cgroup", "0::/job/pod")
    write("proc/sys/net/ipv4/tcp_rmem", "4096 131072 33554432")
    write("proc/sys/net/ipv4/tcp_wmem", "4096 16384 4194304")
    write("proc/sys/net/ipv4/tcp_congestion_control", "cubic")
    write("proc/sys/net/ipv4/tcp_allowed_congestion_control", "reno cubic")
    write("proc/sys/net/ipv4/ip_local_port_range", "32768 60999")
    write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    return write


def test_healthy_machine_has_nothing_to_do(kernel):
    found = examine()
    assert {finding.verdict for finding in found.values()} == {"ok"}
    assert exit_status(list(found.values())) == 0
    assert found["NIC lo"].seen == "127.0.0.1, MTU 65536, speed unknown"
    assert "cubic; congestion= may be reno or cubic" in found["congestion"].seen
    assert "32768 to 60999" in found["ports"].seen
    assert software.shown(software.versions()) in found["software"].seen


def test_memory_is_held_against_what_the_generations_take(kernel):
    assert examine(nbytes=10 * GB)["memory"].verdict == "ok"
    finding = examine(nbytes=11 * GB)["memory"]
    assert finding.verdict == "broken"
    assert finding.seen == "20.480 GB available, 22.000 GB for 2 generations of 11.000 GB"
    assert "spread the replica over more hosts" in finding.advice


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/job/pod", {"job/memory.max": 8, "job/memory.current": 5}),
        ("0::/job/pod", {"job/pod/memory.max": 8, "job/pod/memory.current": 5}),
        (
            "4:memory:/job",
            {"memory/job/memory.limit_in_bytes": 8, "memory/job/memory.usage_in_bytes": 5},
        ),
    ],
)
def test_memory_of_a_container_is_what_its_cgroups_leave(kernel, cgroup, files):
    kernel("proc/self/cgroup", cgroup)
    kernel("sys/fs/cgroup/job/pod/memory.max", "max")
    for path, gbytes in files.items():
        kernel(f"sys/fs/cgroup/{path}", str(gbytes * GB))
    assert machine.available_nbytes() == 3 * GB
    folder = next(iter(files)).rpartition("/")[0]
    kernel(f"sys/fs/cgroup/{folder}/memory.stat", f"anon 1\ninactive_file {GB}")
    assert machine.available_nbytes() == 4 * GB


def test_open_files_are_held_against_the_connections(kernel, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert examine(num_streams=700)["open files"].verdict == "ok"
    finding = examine(num_streams=1000)["open files"]
    assert (finding.verdict, exit_status([finding])) == ("broken", 1)
    assert "raise the limit to 1256 or more: ulimit -n" in finding.advice
    assert "limits.conf" in examine(num_streams=10_000)["open files"].advice


def test_small_buffers_and_missing_huge_pages_are_noted(kernel):
    kernel("proc/sys/net/ipv4/tcp_wmem", "4096 16384 200000")
    kernel("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]")
    found = examine()
    assert found["TCP buffers"].advice == 'sysctl -w net.ipv4.tcp_wmem="4096 131072 4194304"'
    assert "echo madvise >" in found["huge pages"].advice
    assert exit_status(list(found.values())) == 0


def test_what_a_container_hides_is_unknown_and_breaks_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    monkeypatch.setattr(machine, "_SYS", tmp_path)
    found = examine(nbytes=GB)
    assert exit_status(list(found.values())) == 0
    assert found["memory"].seen == "/proc/meminfo can't be read here"
    assert found["TCP buffers"].seen == "tcp_rmem unknown, tcp_wmem unknown"
    assert found["TCP buffers"].advice == ""
    assert "what this kernel allows, which can't be read" in found["congestion"].seen
    assert found["ports"].seen.endswith("unknown here")
    assert found["huge pages"].seen == "unknown"


def test_memory_that_can_not_be_shared_is_noted(kernel, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    finding = examine()["shared memory"]
    assert finding.verdict == "note" and "memfd_create" in finding.seen
    assert "TCP takes its place" in finding.advice


def test_fast_nic_with_small_frames_is_noted(kernel, monkeypatch):
    lines = {"a": Line(1500, 25.0), "b": Line(9000, 25.0), "c": Line(1500, None)}
    nics = [Nic(name, "10.0.0.1", line=line) for name, line in lines.items()]
    monkeypatch.setattr(machine, "find_nics", lambda _: nics)
    found = examine()
    assert found["NIC a"].seen == "10.0.0.1, MTU 1500, 200 Gbit/s"
    assert [found[f"NIC {name}"].verdict for name in "abc"] == ["note", "ok", "ok"]


def test_nics_in_one_subnet_need_settings(kernel, monkeypatch):
    nics = [Nic(name, "10.0.0.1", shares_subnet=True) for name in "ab"]
    monkeypatch.setattr(machine, "find_nics", lambda _: nics)
    for name, value in (("arp_ignore", 0), ("arp_announce", 2), ("rp_filter", 1)):
        kernel(f"proc/sys/net/ipv4/conf/all/{name}", str(value))
    finding = examine()["NICs in one subnet"]
    assert finding.seen == "arp_ignore=0, arp_announce=2, rp_filter=1"
    assert finding.advice.endswith(
        "sysctl -w net.ipv4.conf.all.arp_ignore=1; sysctl -w net.ipv4.conf.all.rp_filter=2"
    )
    kernel("proc/sys/net/ipv4/conf/all/arp_ignore", "1")
    kernel("proc/sys/net/ipv4/conf/all/rp_filter", "2")
    assert examine()["NICs in one subnet"].verdict == "ok"


def test_nic_that_is_down_is_named(kernel, monkeypatch):
    monkeypatch.setattr(machine.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth7")])
    kernel("sys/class/net/eth7/operstate", "down")
    kernel("sys/class/net/eth7/device/vendor", "0x1d0f")
    assert "ip link set eth7 up" in examine()["NIC eth7"].advice


def test_machine_without_a_nic_is_alone(kernel):
    finding = examine(nics=["eth77"])["NICs"]
    assert (finding.verdict, finding.seen[:23]) == ("note", "nics: 'eth77' is no NIC")


def test_old_or_missing_jax_and_slow_checksums_are_found(kernel, monkeypatch):
    monkeypatch.setattr(machine.software, "versions", lambda: {"jax": "0.9.1"})
    monkeypatch.setattr(machine._native, "crc32c_implementation", lambda: "table")
    assert examine()["software"].advice == "install JAX 0.10 or newer"
    assert examine()["checksums"].verdict == "note"
    monkeypatch.setattr(machine.software, "versions", dict)
    assert examine()["software"].verdict == "broken"


def test_kernels_that_are_not_the_best_are_found(kernel, monkeypatch):
    monkeypatch.setattr(machine._native, "cpu_levels", lambda: ["avx2", "portable"])
    monkeypatch.setattr(machine._native, "cpu_level", lambda: "avx2")
    assert examine()["CPU"] == Finding("CPU", "ok", "kernels for avx2")
    monkeypatch.setattr(machine._native, "cpu_level", lambda: "portable")
    asked = Finding(
        "CPU", "note", "kernels for portable, as TSR_CPU asks", "unset it: there is avx2"
    )
    assert examine()["CPU"] == asked

    def refuse():
        raise ValueError("TSR_CPU is 'avx9'")

    monkeypatch.setattr(machine._native, "cpu_level", refuse)
    assert examine()["CPU"].verdict == "broken"


def test_findings_are_a_table_or_json(capsys):
    findings = [Finding("NIC [a]", "broken", "down", "up"), Finding("memory", "ok", "much")]
    print_table(findings)
    table = capsys.readouterr().out
    assert all(word in table for word in ("broken", "NIC [a]", "what to do", "much"))
    assert json.loads(to_json(findings))[1] == {
        "subject": "memory",
        "verdict": "ok",
        "seen": "much",
        "advice": "",
    }


def test_command_prints_and_exits(monkeypatch):
    ran = subprocess.run(
        [sys.executable, "-m", "tpu_sync_rl.doctor", "--json", "--nics=lo", "--nbytes=1e15"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = {finding["subject"]: finding for finding in json.loads(ran.stdout)}
    assert (ran.returncode, ran.stderr) == (1, "")
    assert found["memory"]["verdict"] == "broken"


def test_bad_arguments_are_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--streams_per_rail=0"])
    assert "streams_per_rail must be an int from 1 to 64, not 0" in capsys.readouterr().err


# --- with a job


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("TSR_TOKEN", "secret")


def of_job(address, *arguments):
    """The findings about a job, by subject."""
    parsed = command._parser().parse_args([f"--coordinator={address}", "--nics=lo", *arguments])
    return {finding.subject: finding for finding in command.examine(parsed)}


def test_way_to_a_job_is_gone_and_the_job_is_left_alone(token):
    params = {"w": jnp.zeros(1000)}
    with (
        tsr.connect_trainer(same_host="tcp") as trainer,
        tsr.connect_sampler(coordinator=trainer.coordinator, replica="s", like=params) as sampler,
    ):
        assert of_job(trainer.coordinator)["trainer"].verdict == "note"
        trainer.sync_weights(params)
        found = of_job(trainer.coordinator, "--same_host=tcp")
        assert exit_status(list(found.values())) == 0
        assert "answers in" in found["coordinator"].seen
        assert "accepted, and proved by the coordinator" in found["token"].seen
        assert trainer.incarnation in found["trainer"].seen
        assert found["replica s"].seen == "version 1 is prepared and not taken"
        assert "opened and proved" in found["rail lo-lo to trainer process 0"].seen
        assert found["rail lo-lo to trainer process 0"].verdict == "ok"
        assert "8.000 kB for 2 generations of 4.000 kB" in found["memory"].seen
        there = found["software there"].seen
        assert there.endswith(f": coordinator, trainer {trainer.incarnation}[0], sampler s[0]")
        report = trainer.sync_weights(params, version=2)
        assert dict(report.replicas) == {"s": 2}
        assert sampler.sync_weights().version == 2


def test_rail_of_shared_memory_is_tried(token):
    params = {"w": jnp.zeros(4)}
    with tsr.connect_trainer() as trainer:
        trainer.sync_weights(params)
        found = of_job(trainer.coordinator)
    assert found["rail shm to trainer process 0"].seen == "shared memory of one host"


@pytest.mark.parametrize("where", ["here", "there"])
def test_memory_that_can_not_be_shared_with_a_trainer_is_a_note_and_tcp_is_tried(
    token, monkeypatch, where
):
    with tsr.connect_trainer() as trainer:
        trainer.sync_weights({"w": jnp.zeros(4)})
        if where == "here":
            monkeypatch.delattr(os, "memfd_create")
        else:
            monkeypatch.setattr(same_host, "receive", lambda stream, n: (stream.recv(n), -1))
        found = of_job(trainer.coordinator)
    finding = found["rail shm to trainer process 0"]
    assert (finding.verdict, found["rail lo-lo to trainer process 0"].verdict) == ("note", "ok")
    assert "TCP takes its place" in finding.advice


def test_rail_whose_kernel_does_not_tell_of_it_is_well(token, monkeypatch):
    monkeypatch.setattr(socket, "TCP_INFO", 9999)  # which no kernel knows
    with tsr.connect_trainer(same_host="tcp") as trainer:
        trainer.sync_weights({"w": jnp.zeros(4)})
        finding = of_job(trainer.coordinator)["rail lo-lo to trainer process 0"]
    assert finding.verdict == "ok" and finding.seen.endswith("round trip and segments unknown")


def test_small_segments_are_noted_where_the_nic_allows_larger_ones():
    jumbo = Rail(Nic("a", "10.0.0.1", line=Line(mtu_nbytes=9000)), "b", "10.0.0.2", 1)
    assert job.segment_advice(jumbo, 8948) == ""
    assert job.segment_advice(jumbo, 1360) == (
        "segments carry 1360 bytes where the MTU here allows 8960: set the same MTU on the "
        "trainer's NIC and the switches between"
    )


@pytest.mark.parametrize(
    ("gbytes_per_s", "round_trip_s", "nbytes"),
    [(25.0, 0.0001, 0), (None, 0.02, 0), (25.0, 0.02, 30 << 20), (None, 0.1, 8 << 20)],
)
def test_buffers_that_are_too_small_for_the_way_are_noted(
    monkeypatch, gbytes_per_s, round_trip_s, nbytes
):
    monkeypatch.setattr(tcp, "most_flight_nbytes", lambda: 4 << 20)
    rail = Rail(Nic("a", "10.0.0.1"), "b", "10.0.0.2", 1, Line(None, gbytes_per_s))
    advice = job.distance_advice(rail, round_trip_s)
    assert bool(advice) == bool(nbytes)
    if nbytes:
        assert f'net.ipv4.tcp_wmem="4096 131072 {nbytes}"' in advice
        assert f'net.ipv4.tcp_rmem="4096 131072 {2 * nbytes}"' in advice


class ShortPipe:
    """Connections to a peer that echoes what fits into packets of a size."""

    def __init__(self, monkeypatch, passes_nbytes: int) -> None:
        self.tried: list[int] = []
        monkeypatch.setattr(large_packets, "pass_over", self.pass_over)
        self._passes_nbytes = passes_nbytes

    def dial(self, segment_nbytes: int) -> socket.socket:
        self.tried.append(segment_nbytes + 40)
        return socket.socket()

    def pass_over(self, _: socket.socket, patience_s: float = 0.0) -> bool:
        return self.tried[-1] <= self._passes_nbytes


@pytest.mark.parametrize(
    ("passes", "found"), [(1500, 1500), (576, 576), (8999, 8999), (1280, 1280), (575, None)]
)
def test_largest_packet_that_passes_is_found(monkeypatch, passes, found):
    pipe = ShortPipe(monkeypatch, passes)
    assert large_packets.most_nbytes(pipe.dial, 40, 9000) == found
    assert len(pipe.tried) <= 15


def test_echo_that_does_not_come_or_is_another_is_no_pass():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not large_packets.pass_over(ours, 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.close()
        assert not large_packets.pass_over(ours, 0.05)


def test_rail_that_is_cut_is_broken(token, monkeypatch):
    with tsr.connect_trainer(same_host="tcp") as trainer:
        trainer.sync_weights({"w": jnp.zeros(4)})
        trainer._listener.close()
        finding = of_job(trainer.coordinator)["rail lo-lo to trainer process 0"]
    assert finding.verdict == "broken"
    assert "let TCP through from 127.0.0.1 to 127.0.0.1" in finding.advice


def test_wrong_token_is_found(token, monkeypatch):
    with tsr.connect_trainer() as trainer:
        monkeypatch.setenv("TSR_TOKEN", "guess")
        found = of_job(trainer.coordinator)
    assert found["coordinator"].verdict == "ok"
    assert "the coordinator has another token" in found["token"].seen
    assert "give every program the same token" in found["token"].advice


def test_coordinator_that_is_not_there_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    finding = of_job(address)["coordinator"]
    assert finding.verdict == "broken"
    assert finding.seen == f"{address}: Connection refused"
    assert finding.advice.endswith(f": python -m tpu_sync_rl.coordinator --address={address}")


def test_other_versions_of_the_package_are_found():
    mine, other = software.versions(), software.versions() | {"tpu_sync_rl": "0.0.1"}
    processes = [
        ConnectedProcess("coordinator", "", 0, mine),
        ConnectedProcess("trainer", "A", 1, other),
    ]
    found = {x.subject: x for x in job.programs(JobStatus(0, None, None, {}, processes))}
    assert found["software of trainer A[1]"].seen == "tpu_sync_rl 0.0.1"
    assert found["software of trainer A[1]"].verdict == "broken"
