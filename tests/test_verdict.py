"""What the processes of a replica think of a manifest."""

from tpu_sync_rl.verdict import Verdict


def refused(*texts):
    verdict = Verdict()
    for process, text in enumerate(texts):
        verdict.refuse(process, "d", text, now=10.0)
    return verdict


def test_each_difference_is_named_once():
    assert refused("w: 2 here, 3 there", "b is missing", "w: 2 here, 3 there").text == (
        "w: 2 here, 3 there\nb is missing"
    )


def test_refusal_is_known_when_everybody_who_is_there_says_so():
    verdict = refused("no")
    assert not verdict.is_refusal_known([0, 1], 10.0, lease_s=5.0)
    verdict.acknowledge(0)
    assert not verdict.is_refusal_known([0, 1], 10.0, lease_s=5.0)
    assert verdict.is_refusal_known([0], 10.0, lease_s=5.0)
    verdict.acknowledge(1)
    assert verdict.is_refusal_known([0, 1], 10.0, lease_s=5.0)


def test_refusal_is_known_after_a_lease_from_the_first_one():
    verdict = refused("no")
    verdict.refuse(1, "d", "no", now=12.0)
    assert not verdict.is_refusal_known([0, 1], 14.9, lease_s=5.0)
    assert verdict.is_refusal_known([0, 1], 15.0, lease_s=5.0)


def test_new_manifest_is_neither_admitted_nor_refused():
    verdict = refused("no")
    verdict.admit(1)
    verdict.acknowledge(0)
    verdict.forget()
    assert not verdict.is_refused
    assert verdict.num_admitted == 0
    assert not verdict.is_refusal_known([], 100.0, lease_s=5.0)
