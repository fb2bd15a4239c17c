"""Checks a simulated worker's inbox: features take room in it, and a pull waits until there is room."""

from __future__ import annotations

import pytest
from simulated_requests import TABLE, run, small_cluster

from fabric.contracts import ArenaFull, FeatureTicket, TransferFailed
from loadtest.simulator.event_loop import VirtualLoop
from loadtest.simulator.faults import MemberFault
from loadtest.simulator.sim_cluster import SimCluster
from loadtest.simulator.sim_requests import SimRequest
from loadtest.simulator.sim_transport import SimInbox

FEATURE_BYTES = TABLE.kind("image").num_tokens * 2 * TABLE.worker.hidden_size


def ticket(nbytes: int, source: str = "encoder-0") -> FeatureTicket:
    return FeatureTicket(source, b"", 0, 0, nbytes, 1, (1, nbytes // 2, 1), "bfloat16", 1e9)


def new_inbox(total_bytes: int) -> tuple[VirtualLoop, SimInbox]:
    loop = VirtualLoop()  # type: ignore[abstract]  # it has what the simulated code calls
    return loop, SimInbox(total_bytes, loop, lambda source: TABLE.link("m0", "m1"))


def test_pulls_share_the_link_and_take_room_until_they_are_freed() -> None:
    loop, inbox = new_inbox(1 << 20)
    first, second = inbox.pull(ticket(400_000), 1.0), inbox.pull(ticket(400_000), 1.0)
    with pytest.raises(ArenaFull):
        inbox.pull(ticket(400_000), 1.0)
    loop.run_while(lambda: not second.done())
    link = TABLE.link("m0", "m1")
    assert first.result().seconds == pytest.approx(400_000 / link.bytes_per_s + link.latency_s)
    assert second.result().seconds == pytest.approx(800_000 / link.bytes_per_s + link.latency_s)
    assert inbox.feature_bytes == inbox.max_feature_bytes == 800_000
    for pull in (first, second, second):  # Freeing a slot a second time does nothing.
        inbox.free(pull.result().slot_id)
    assert inbox.usage().used_bytes == inbox.feature_bytes == 0


def test_a_pull_from_a_source_that_left_fails_and_gives_its_room_back() -> None:
    loop, inbox = new_inbox(1 << 20)
    lost, other = inbox.pull(ticket(1000), 1.0), inbox.pull(ticket(1000, "encoder-1"), 1.0)
    inbox.peer_dead("encoder-0")
    assert isinstance(lost.exception(), TransferFailed)
    loop.run_while(lambda: True)
    assert other.result().slot_id
    assert inbox.feature_bytes == 1000


def crowd(num_pictures: int) -> list[SimRequest]:
    """Returns requests that come at once, each with its own picture behind a long text."""
    return [
        SimRequest(n, 0.5, "image", ((1000 * n + 1, 900), ("image", f"p{n}"), (7, 24)), 8, (1 << 29) + 1000 * n)
        for n in range(num_pictures)
    ]


def test_pulls_wait_until_the_inbox_has_room() -> None:
    roomy, tight = (
        run(small_cluster(num_workers=1, inbox_bytes=size * FEATURE_BYTES + (1 << 16)), crowd(8)) for size in (20, 2)
    )
    assert roomy.max_feature_bytes > 4 * FEATURE_BYTES
    assert tight.max_feature_bytes == 2 * FEATURE_BYTES
    assert all(one.is_served for one in (*roomy.outcomes, *tight.outcomes))


def test_an_inbox_is_empty_after_the_last_request() -> None:
    cluster = SimCluster(small_cluster(num_workers=2, inbox_bytes=2 * FEATURE_BYTES + (1 << 16)))
    end_s = cluster.run(crowd(6)).end_s
    cluster.loop.run_while(lambda: cluster.loop.now() < end_s + 1.0)
    assert all(worker.inbox.usage().used_bytes == 0 for worker in cluster.workers.values())


def test_what_a_dead_encoder_announced_is_encoded_again() -> None:
    """The inbox has room for one feature, so others wait at the encoder when it dies."""
    settings = small_cluster(
        num_workers=1,
        num_encoders=2,
        inbox_bytes=FEATURE_BYTES + (1 << 16),
        worker_slowness=(4.0,),
        faults=(MemberFault("death", "encoder-0", 0.62),),
    )
    result = run(settings, crowd(8))
    assert all(one.is_served for one in result.outcomes)
    assert result.num_needed > 0
