"""Tests what a worker counts of its pulls for each class of links."""

from __future__ import annotations

import pytest

from fabric.contracts import LinkStats, Member, MemberId
from llm_workers.features.link_meter import LinkMeter


def member(name: str, host: str, kind: str = "encoder") -> Member:
    return Member(MemberId(name), kind, f"local://{name}", host, 1, transfer_agent=f"agent-{name}")


def is_near(source: Member, target: Member) -> str:
    return "same_host" if source.host == target.host else "tcp"


MEMBERS = [member("near", "h0"), member("far", "h1"), member("w", "h0", "worker")]


def test_pulls_are_counted_by_the_class_of_their_link() -> None:
    meter = LinkMeter(MemberId("w"))
    meter.classify(is_near)
    meter.update(MEMBERS)
    meter.landed("agent-near", 100, 0.5)
    meter.landed("agent-near", 50, 0.25)
    meter.landed("agent-far", 7, 1.0)
    meter.failed("agent-far")
    assert meter.stats() == (LinkStats("same_host", 2, 150, 0.75, 0), LinkStats("tcp", 1, 7, 1.0, 1))


def test_the_rate_of_a_class_is_that_of_its_latest_reads() -> None:
    meter = LinkMeter(MemberId("w"))
    meter.classify(is_near)
    meter.update(MEMBERS)
    meter.landed("agent-near", 100, 9.0, 0.5)
    meter.landed("agent-far", 100, 9.0, 0.0)
    near, far = meter.stats()
    assert (near.bytes_per_s, far.bytes_per_s) == (200.0, 0.0)
    for _ in range(100):
        meter.landed("agent-near", 10_000, 9.0, 1.0, is_staged=True)
        meter.landed("agent-near", 1, 9.0, 1e-9)
    near, far = meter.stats()
    assert near.bytes_per_s == pytest.approx(10_000, rel=0.01), "a small unit with its luck changes little"
    assert (near.num_staged, far.num_staged) == (100, 0)


def test_an_encoder_that_has_left_or_is_not_known_yet_has_an_unknown_link() -> None:
    meter = LinkMeter(MemberId("w"))
    meter.landed("agent-near", 1, 0.0)
    meter.classify(is_near)
    meter.update([each for each in MEMBERS if each.member_id != "w"])
    meter.failed("agent-near")
    meter.update(MEMBERS)
    meter.update(MEMBERS[1:])
    meter.failed("agent-near")
    assert meter.stats() == (LinkStats("same_host"), LinkStats("tcp"), LinkStats("unknown", 1, 1, 0.0, 2))


def test_ten_thousand_encoders_make_no_more_sums_than_classes() -> None:
    meter = LinkMeter(MemberId("w"))
    meter.classify(is_near)
    for number in range(10_000):
        meter.update([member(f"e{number}", f"h{number % 2}"), MEMBERS[-1]])
        meter.landed(f"agent-e{number}", 1, 0.0)
    assert [(each.link, each.num_pulls) for each in meter.stats()] == [("same_host", 5000), ("tcp", 5000)]


def test_links_to_known_encoders_begin_with_zero() -> None:
    meter = LinkMeter(MemberId("w"))
    meter.classify(is_near)
    assert meter.stats() == ()
    meter.update(MEMBERS)
    assert meter.stats() == (LinkStats("same_host"), LinkStats("tcp"))


def test_what_was_handed_out_does_not_change() -> None:
    meter = LinkMeter(MemberId("w"))
    meter.landed("x", 1, 0.0)
    (before,) = meter.stats()
    meter.landed("x", 1, 0.0)
    assert before.num_pulls == 1
