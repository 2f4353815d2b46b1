"""Rollouts reach the trainer once proved, and only the newest of each replica is kept."""

import threading

import grpc
import numpy as np
import pytest

from tpu_sync_rl.examples.rollouts import Rollouts, RolloutServer, submit_rollouts
from tpu_sync_rl.examples.sorting_task import LENGTH


def rollouts(replica, version, incarnation="now"):
    digits = np.full((2, LENGTH), version, np.int32)
    return Rollouts(
        replica=replica,
        incarnation=incarnation,
        version=version,
        digests={"kernel": 2**64 - 1},
        prompts=digits.tobytes(),
        answers=digits.tobytes(),
        logprobs=np.zeros((2, LENGTH), np.float32).tobytes(),
    )


@pytest.fixture
def server():
    with RolloutServer("127.0.0.1:0", b"secret") as server:
        yield server


def test_collect_returns_one_version_of_all_replicas_in_order(server):
    for replica, version in [("b", 0), ("b", 1), ("a", 1)]:
        submit_rollouts(server.address, b"secret", rollouts(replica, version), 10)
    collected = server.collect("now", 1, 2, 10)
    assert [r.replica for r in collected] == ["a", "b"]
    assert collected == [rollouts("a", 1), rollouts("b", 1)]
    prompts, answers, logprobs = collected[0].arrays()
    assert prompts.shape == answers.shape == logprobs.shape == (2, LENGTH)
    assert (answers == 1).all()


def test_collect_waits_for_what_comes_later(server):
    sender = threading.Thread(
        target=submit_rollouts, args=(server.address, b"secret", rollouts("a", 5), 10)
    )
    sender.start()
    assert server.collect("now", 5, 1, 10) == [rollouts("a", 5)]
    sender.join()


def test_collect_says_who_has_come_when_time_is_up(server):
    submit_rollouts(server.address, b"secret", rollouts("a", 3), 10)
    with pytest.raises(TimeoutError, match="version 3: expected 2 replicas, got a"):
        server.collect("now", 3, 2, 0)


def test_rollouts_of_an_earlier_trainer_do_not_count(server):
    submit_rollouts(server.address, b"secret", rollouts("a", 3, incarnation="before"), 10)
    with pytest.raises(TimeoutError, match="got none"):
        server.collect("now", 3, 1, 0)


def test_stranger_is_refused(server):
    with pytest.raises(grpc.RpcError, match="the token differs"):
        submit_rollouts(server.address, b"guess", rollouts("a", 0), 10)
    with pytest.raises(TimeoutError, match="got none"):
        server.collect("now", 0, 1, 0)


def test_other_machines_need_a_token():
    with pytest.raises(ValueError, match=r"0\.0\.0\.0:0 needs a token"):
        RolloutServer("0.0.0.0:0", b"")


def test_address_in_use_is_refused(server):
    with pytest.raises(RuntimeError, match="address"):
        RolloutServer(server.address, b"secret")
