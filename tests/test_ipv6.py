"""Hosts with IPv6 alone, in namespaces: NICs are found, listened on, paired and told of."""

import contextlib
import dataclasses
import os
import queue
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from test_one_subnet import ip, within
from test_rails import LOG, OPTIONS, WAIT_S, receive

from tpu_sync_rl import authentication, nics, rails
from tpu_sync_rl.bench import netns
from tpu_sync_rl.doctor import machine
from tpu_sync_rl.listener import Listener
from tpu_sync_rl.rails import Connection

TRAINER, SAMPLER = (f"tsr-test6-{os.getpid()}-{side}" for side in ("trainer", "sampler"))
# A unique local network, and a global one.
PREFIXES = {"v0": "fd98:0:0:1", "v1": "2001:db8:0:2"}


@pytest.fixture
def namespaces() -> Iterator[None]:
    try:
        netns.check_rights()
    except RuntimeError as error:
        pytest.skip(str(error))
    with contextlib.ExitStack() as stack:
        for namespace in (TRAINER, SAMPLER):
            ip("netns", "add", namespace)
            stack.callback(ip, "netns", "del", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        for name, prefix in PREFIXES.items():
            ip(*f"link add {name} netns {TRAINER} type veth peer {name} netns {SAMPLER}".split())
            for namespace, host in ((TRAINER, 1), (SAMPLER, 2)):
                address = f"{prefix}::{host}/64"
                ip("-n", namespace, "addr", "add", address, "dev", name, "nodad")
                ip("-n", namespace, "link", "set", name, "up")
        yield


@pytest.mark.parametrize("named", [None, ("v0", "v1")])
def test_data_goes_over_every_nic(namespaces, named):
    accepted: queue.Queue[Connection] = queue.Queue()
    options = dataclasses.replace(OPTIONS, nics=named)
    listening = within(
        TRAINER,
        lambda: Listener(
            options,
            coordinator=f"[{PREFIXES['v0']}::1]:1",
            incarnation="life",
            on_stream=lambda stream, *_: accepted.put(stream),
            log=LOG,
        ),
    )
    ticket = authentication.ticket(listening.ticket_secret, 1)
    pairs = within(SAMPLER, lambda: rails.pair(options, listening.addresses))
    assert [rail.name for rail in pairs] == ["v0-v0", "v1-v1"]
    assert [rail.place.partition("]")[0] for rail in pairs] == [
        f"at [{prefix}::1" for prefix in PREFIXES.values()
    ]
    for rail in pairs:
        dialled = within(
            SAMPLER,
            lambda rail=rail: rails.dial(rail, options, incarnation="life", sink=1, ticket=ticket),
        )
        source = accepted.get(timeout=WAIT_S)
        with socket.socket(fileno=dialled.fd) as near, socket.socket(fileno=source.fd) as far:
            near.sendall(b"hello")
            far.setblocking(True)
            assert receive(far, 5) == b"hello"
            assert near.getsockname()[0] == rail.local.host
    listening.close()


def test_doctor_tells_of_them(namespaces):
    def examine(named: tuple[str, ...] | None):
        found = machine.examine(nics=named, num_streams=4, nbytes=None, num_generations=2)
        return {finding.subject: finding for finding in found}

    found = within(SAMPLER, lambda: examine(None))
    assert found["NIC v0"].seen.startswith(f"{PREFIXES['v0']}::2, MTU 1500")
    assert found["NIC v1"].seen.startswith(f"{PREFIXES['v1']}::2, MTU 1500")
    ip("-n", SAMPLER, "addr", "flush", "dev", "v1", "scope", "global")
    finding = within(SAMPLER, lambda: examine(("v1",)))["NICs"]
    assert "'v1' has no IPv4 address, and no IPv6 one beyond its link" in finding.seen
    assert f"those that have are lo (127.0.0.1), v0 ({PREFIXES['v0']}::2)" in finding.seen


def test_a_side_with_both_meets_one_with_ipv6_alone(namespaces):
    ip("-n", TRAINER, "addr", "add", "10.98.0.1/24", "dev", "v0")
    listening = within(
        TRAINER,
        lambda: Listener(
            OPTIONS,
            coordinator="10.98.0.1:1",
            incarnation="life",
            on_stream=lambda *_: None,
            log=LOG,
        ),
    )
    assert [at.host for at in listening.addresses] == [
        "10.98.0.1",
        f"{PREFIXES['v0']}::1",
        f"{PREFIXES['v1']}::1",
    ]
    pairs = within(SAMPLER, lambda: rails.pair(OPTIONS, listening.addresses))
    assert [(rail.name, rail.host) for rail in pairs] == [
        ("v0-v0", f"{PREFIXES['v0']}::1"),
        ("v1-v1", f"{PREFIXES['v1']}::1"),
    ]
    listening.close()


def test_loopback_of_ipv6_is_taken_where_there_is_no_other(namespaces):
    assert within(TRAINER, nics.loopback) == nics.LOOPBACK
    ip("-n", TRAINER, "addr", "del", "127.0.0.1/8", "dev", "lo")
    assert within(TRAINER, nics.loopback) == nics.LOOPBACK_6


TRAINER_PROGRAM = """
import jax.numpy as jnp, sys, tpu_sync_rl as tsr
with tsr.connect_trainer(
    coordinator=sys.argv[1], token="secret", min_replicas=1, timeout=60, same_host="tcp"
) as session:
    report = session.sync_weights({"w": jnp.arange(1000.0)}, wait="committed")
"""
SAMPLER_PROGRAM = """
import jax.numpy as jnp, sys, tpu_sync_rl as tsr
with tsr.connect_sampler(
    coordinator=sys.argv[1], token="secret", replica="s", like={"w": jnp.zeros(1000)}, timeout=60,
    same_host="tcp"
) as session:
    update = session.sync_weights()
    assert jnp.array_equal(update.params["w"], jnp.arange(1000.0))
    print(*sorted(update.report.rails))
"""


@pytest.mark.end_to_end
def test_a_job_between_hosts_of_ipv6_alone(namespaces):
    address = f"[{PREFIXES['v0']}::1]:8476"
    with contextlib.ExitStack() as exits:
        programs = []
        for namespace, program in ((TRAINER, TRAINER_PROGRAM), (SAMPLER, SAMPLER_PROGRAM)):
            command = ["ip", "netns", "exec", namespace, sys.executable, "-c", program, address]
            side = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            exits.callback(side.kill)
            programs.append(exits.enter_context(side))
        for side in programs:
            out, errors = side.communicate(timeout=100)
            assert side.returncode == 0, errors
    assert set(out.split()) <= {"v0-v0", "v1-v1"} and out.strip()
