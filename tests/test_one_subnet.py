"""Two NICs in one subnet, in namespaces: what is sent over a rail leaves by the rail's own NIC."""

import contextlib
import dataclasses
import json
import os
import queue
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from test_rails import LOG, OPTIONS, WAIT_S, receive

from tpu_sync_rl import authentication, nics, rails
from tpu_sync_rl.bench import netns
from tpu_sync_rl.listener import Listener
from tpu_sync_rl.nics import Nic
from tpu_sync_rl.rails import Connection, Rail

TRAINER, SAMPLER = (f"tsr-test-{os.getpid()}-{side}" for side in ("trainer", "sampler"))
NICS = ("nic0", "nic1")
T = TypeVar("T")


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def within(namespace: str, call: Callable[[], T]) -> T:
    """What `call` returns on a thread in a namespace, where its sockets and threads stay."""
    results: list[T] = []

    def run() -> None:
        netns.enter(namespace)
        results.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


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
        for index, name in enumerate(NICS):
            ip(*f"link add {name} netns {TRAINER} type veth peer {name} netns {SAMPLER}".split())
            for namespace, host in ((TRAINER, 1 + index), (SAMPLER, 11 + index)):
                ip("-n", namespace, "addr", "add", f"10.98.0.{host}/24", "dev", name)
                ip("-n", namespace, "link", "set", name, "up")
        for namespace in (TRAINER, SAMPLER):
            for name in ("all", *NICS):
                setting = f"/proc/sys/net/ipv4/conf/{name}/rp_filter"
                ip("netns", "exec", namespace, "sh", "-c", f"echo 0 > {setting}")
        yield


def dial(rail: Rail, listener: Listener) -> Connection:
    ticket = authentication.ticket(listener.ticket_secret, 1)
    return rails.dial(rail, OPTIONS, incarnation="life", sink=1, ticket=ticket)


def sent_nbytes(namespace: str, name: str) -> int:
    (link,) = json.loads(ip("-n", namespace, "-s", "-j", "link", "show", name))
    nbytes: int = link["stats64"]["tx"]["bytes"]
    return nbytes


def test_each_rail_sends_by_its_own_nic(namespaces):
    accepted: queue.Queue[tuple[int, str]] = queue.Queue()
    listener = within(
        TRAINER,
        lambda: Listener(
            OPTIONS,
            coordinator="10.98.0.1:1",
            incarnation="life",
            on_stream=lambda stream, _, rail: accepted.put((stream.fd, rail)),
            log=LOG,
        ),
    )
    pairs = within(SAMPLER, lambda: rails.pair(OPTIONS, listener.addresses))
    assert [rail.name for rail in pairs] == ["nic0-nic0", "nic1-nic1"]
    for index, rail in enumerate(pairs):
        dialled = within(SAMPLER, lambda rail=rail: dial(rail, listener))
        source_fd, name = accepted.get(timeout=WAIT_S)
        assert name == rail.name
        with socket.socket(fileno=dialled.fd) as sink, socket.socket(fileno=source_fd) as source:
            source.setblocking(True)
            before = [
                [sent_nbytes(namespace, nic) for nic in NICS] for namespace in (TRAINER, SAMPLER)
            ]
            nbytes = 100_000
            for sender, receiver in ((source, sink), (sink, source)):
                sender.sendall(bytes(nbytes))
                assert len(receive(receiver, nbytes)) == nbytes
        for namespace, sent_before in zip((TRAINER, SAMPLER), before, strict=True):
            sent = [
                sent_nbytes(namespace, nic) - nbytes_before
                for nic, nbytes_before in zip(NICS, sent_before, strict=True)
            ]
            assert sent[index] >= nbytes and sent[1 - index] < nbytes / 10, (namespace, sent)
    listener.close()


def test_nics_of_one_subnet_know_of_each_other(namespaces):
    found = within(TRAINER, nics.find_nics)
    assert [(nic.name, nic.shares_subnet) for nic in found] == [("nic0", True), ("nic1", True)]


def test_rail_that_can_not_be_bound_to_its_nic_is_used_without():
    accepted: queue.Queue[int] = queue.Queue()
    listener = Listener(
        dataclasses.replace(OPTIONS, nics=("lo",)),
        coordinator="127.0.0.1:1",
        incarnation="life",
        on_stream=lambda stream, *_: accepted.put(stream.fd),
        log=LOG,
    )
    (at,) = listener.addresses
    nowhere = Nic("nowhere", at.host, nics.LOOPBACK.network, shares_subnet=True)
    os.close(dial(Rail.between(nowhere, at), listener).fd)
    os.close(accepted.get(timeout=WAIT_S))
    listener.close()
