"""Tests what the scenarios of a load test send, and when."""

from __future__ import annotations

import itertools
import statistics

import pytest

from loadtest.load import DOCUMENT_MIXES, SCENARIOS, scenario_requests
from loadtest.simulator import SimRequest
from loadtest.simulator.document_figures import MIX_TO_FIGURES


def some(name: str, num: int, rate: float = 10.0, num_senders: int = 1, sender: str = "0") -> list[SimRequest]:
    return list(itertools.islice(scenario_requests(SCENARIOS[name].spec(rate), 1, num_senders, sender), num))


@pytest.mark.parametrize("name", SCENARIOS)
def test_kinds_have_their_shares_and_requests_their_rate(name: str) -> None:
    requests = some(name, 4000)
    first_turns = list({one.session: one for one in reversed(requests)}.values())
    for kind, share in SCENARIOS[name].kind_to_share.items():
        found = sum(one.kind == kind for one in first_turns) / len(first_turns)
        assert found == pytest.approx(share, abs=0.06)
    if name != "multi-turn":  # Its later turns come after the requests that were taken here.
        assert len(requests) / requests[-1].arrival_s == pytest.approx(10.0, rel=0.25)


def test_senders_share_the_rate_and_send_different_requests() -> None:
    senders = [some("image", 1000, num_senders=4, sender=name) for name in "abcd"]
    for requests in senders:
        assert len(requests) / requests[-1].arrival_s == pytest.approx(2.5, rel=0.15)
    contents = [{one.parts[1] for one in requests} for requests in senders]
    assert len(set.union(*contents)) == 4000
    assert some("image", 5, num_senders=4, sender="a") == senders[0][:5]


def test_bursts_vary_more_than_random_arrivals() -> None:
    def variation(name: str) -> float:
        gaps = [after.arrival_s - before.arrival_s for before, after in itertools.pairwise(some(name, 4000))]
        return statistics.stdev(gaps) / statistics.mean(gaps)

    assert variation("text") == pytest.approx(1.0, abs=0.1)
    assert variation("bursts") > 3.0


def test_pictures_are_shared_only_where_the_scenario_says_so() -> None:
    def num_contents(name: str) -> int:
        return len({one.parts[1] for one in some(name, 1000)})

    assert num_contents("image") == 1000
    assert num_contents("shared-pictures") < 300


def test_conversations_repeat_what_was_said() -> None:
    sessions: dict[int, list[SimRequest]] = {}
    for one in some("multi-turn", 2000):
        sessions.setdefault(one.session, []).append(one)
    longest = max(sessions.values(), key=len)
    assert len(longest) >= 4
    for before, after in itertools.pairwise(longest):
        assert after.parts[: len(before.parts)] == before.parts


def test_the_mixes_are_those_of_the_simulated_table() -> None:
    assert list(DOCUMENT_MIXES.values()) == [mix for mix, *_ in MIX_TO_FIGURES.values()]
