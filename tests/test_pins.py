"""Pins against an exporter and aliases that only write down what happens to them."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tpu_sync_rl.pins import PinnedVersions
from tpu_sync_rl.trainer_messages import Pins, PinsKept


class RecordingExporter:
    def __init__(self) -> None:
        self.finished: list[int] = []
        self.published: set[int] = set()
        self.dropped: list[tuple[int, list[int]]] = []

    def publish(self, version, addresses, strides, coming, layouts):
        self.published.add(version)

    def withdraw(self, version):
        self.published.discard(version)

    def finished_leaves(self, version, sinks):
        return self.finished

    def drop_leaves(self, version, leaves):
        self.dropped.append((version, leaves))


class RecordingAliases:
    def __init__(self, leaves: int = 3) -> None:
        self.addresses = np.zeros(leaves, np.uint64)
        self.strides = np.zeros(0, np.int64)
        self.layouts = {}
        self.held = set(range(leaves))
        self.alive = True
        self.landed = None

    def holds(self, leaf):
        return leaf in self.held

    def drop(self, leaves):
        self.held -= set(leaves)

    def drop_all(self):
        self.held.clear()

    def retake(self):
        if self.alive:
            self.held = set(range(len(self.addresses)))
        return self.alive


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


@pytest.fixture
def answers() -> list[PinsKept]:
    return []


@pytest.fixture
def exporter() -> RecordingExporter:
    return RecordingExporter()


@pytest.fixture
def pins(exporter, answers) -> Iterator[PinnedVersions]:
    pins = PinnedVersions(exporter, answers.append)
    yield pins
    pins.close()


def test_version_is_readable_until_nobody_may_read_it(pins, exporter):
    aliases = RecordingAliases()
    pins.pin(1, aliases)
    pins.on_pins(Pins(1, [7], 0))
    assert exporter.published == {1} and pins.versions == [1]
    pins.on_pins(Pins(1, [], 0))
    until(lambda: not pins.versions)
    assert not exporter.published and not aliases.held


def test_leaves_go_one_by_one_as_sinks_have_them(pins, exporter):
    aliases = RecordingAliases()
    pins.pin(1, aliases)
    exporter.finished = [0, 2]
    pins.on_pins(Pins(1, [7], 0))
    until(lambda: aliases.held == {1})
    assert exporter.dropped == [(1, [0, 2])] and pins.versions == [1]


def test_third_version_finds_room_when_one_is_let_go(pins):
    pins.pin(1, RecordingAliases())
    pins.pin(2, RecordingAliases())
    assert not pins.wait_for_room(0.0)
    pins.on_pins(Pins(1, [], 0))
    assert pins.wait_for_room(time.monotonic() + 20)
    assert pins.versions == [2]


def test_version_that_was_let_go_is_taken_again_while_its_arrays_live(pins, exporter, answers):
    aliases = RecordingAliases()
    pins.pin(1, aliases)
    pins.on_pins(Pins(1, [], 0))
    pins.on_pins(Pins(1, [9], 4))
    until(lambda: bool(answers))
    assert answers == [PinsKept(1, 4, True)]
    assert exporter.published == {1} and pins.versions == [1]


def test_newest_version_is_taken_again_though_an_older_one_was_let_go_later(
    pins, exporter, answers
):
    for version in (1, 2):
        pins.pin(version, RecordingAliases())
    for version in (2, 1):
        pins.let_go(version)
    pins.on_pins(Pins(version=2, sinks=[7], ask=3))
    until(lambda: answers == [PinsKept(2, 3, True)])
    assert exporter.published == {2}


def test_version_whose_arrays_are_gone_is_not_taken_again(pins, exporter, answers):
    aliases = RecordingAliases()
    pins.pin(1, aliases)
    pins.on_pins(Pins(1, [], 0))
    aliases.alive = False
    pins.on_pins(Pins(1, [9], 4))
    pins.on_pins(Pins(0, [9], 5))
    until(lambda: len(answers) == 2)
    assert answers == [PinsKept(1, 4, False), PinsKept(0, 5, False)]
    assert not exporter.published and not pins.versions


def test_failed_retake_leaves_what_others_still_read(pins, exporter, answers):
    aliases = RecordingAliases()
    pins.pin(1, aliases)
    exporter.finished = [0]
    pins.on_pins(Pins(1, [7], 0))
    until(lambda: aliases.held == {1, 2})
    aliases.alive = False
    pins.on_pins(Pins(1, [7, 9], 4))
    until(lambda: bool(answers))
    assert answers == [PinsKept(1, 4, False)]
    assert exporter.published == {1} and aliases.held == {1, 2}
