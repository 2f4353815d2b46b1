"""What a trainer process remembers of the versions that it published."""

import pytest

from tpu_sync_rl.errors import VersionError
from tpu_sync_rl.messages import Held, Outcome
from tpu_sync_rl.publications import Publications
from tpu_sync_rl.trainer_messages import Announced, Publish, PublishOutcome


def publish(publications, call, version, error=""):
    publications.add(Publish(call, version, "d", None, "received", 0, 1.0, {}, error, ""))


def over(publications, call, version, error="", *, stays=False):
    held = None if error and not stays else Held("A", version)
    return publications.over(PublishOutcome(call, Outcome(error, "", held), {}, {}, [], {}))


def test_versions_begin_at_one_and_grow():
    publications = Publications()
    assert publications.next_version(None) == 1
    assert publications.next_version(0) == 0
    publish(publications, 0, 4)
    assert publications.next_version(None) == 5
    with pytest.raises(VersionError, match="version 4 does not grow: 4 was published before"):
        publications.next_version(4)
    with pytest.raises(ValueError, match="version must be from 0"):
        publications.next_version(-1)


def test_version_that_was_never_announced_may_be_published_again():
    publications = Publications()
    publish(publications, 0, 4)
    assert over(publications, 0, 4, "SyncTimeoutError") == 4
    assert publications.next_version(4) == 4
    publish(publications, 1, 5, error="ValueError")
    assert over(publications, 1, 5, "ValueError") is None
    assert publications.next_version(4) == 4


def test_undecided_calls_are_heard_again_in_their_order():
    publications = Publications()
    for call in (1, 0):
        publish(publications, call, call)
    assert [again.call for again in publications.undecided()] == [0, 1]


@pytest.mark.parametrize(("stays", "done"), [(True, 2), (False, 1)])
def test_version_that_is_withdrawn_is_not_told_of_again(stays, done):
    publications = Publications()
    for call, error in ((0, ""), (1, "SyncTimeoutError")):
        publish(publications, call, call + 1)
        publications.announced(Announced(call, call + 1))
        assert over(publications, call, call + 1, error, stays=stays) is None
    assert publications.newest == 2
    assert publications.newest_done == done


def test_version_above_one_that_is_undecided_waits_for_that_one():
    publications = Publications()
    for call in (0, 1):
        publish(publications, call, call + 1)
        publications.announced(Announced(call, call + 1))
    over(publications, 1, 2)
    assert publications.newest_done == -1
    over(publications, 0, 1)
    assert publications.newest_done == 2
