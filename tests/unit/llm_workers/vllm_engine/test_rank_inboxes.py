"""Tests that a feature has landed only when every rank has it, and that all ranks free what one of them could not
pull."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from fabric.contracts import ArenaFull, LeaseLost, ProtocolError, TransferFailed
from fabric.transport import LocalChannelHub, LocalFeatureSink, LocalFeatureSource
from llm_workers.vllm_engine.rank_inboxes import RankedSink, RankInbox

INBOX_BYTES = 4096
SHAPE, NBYTES = (1, 4, 64), 1024
PATIENCE_S = 20.0


class Ranks:
    def __init__(self, num_ranks: int = 2) -> None:
        self.hub = LocalChannelHub()
        self.source = LocalFeatureSource(self.hub, "encoder", 1 << 16)
        self.sink = RankedSink(INBOX_BYTES, num_ranks)
        self.sinks = [LocalFeatureSink(self.hub, f"rank-{rank}", INBOX_BYTES) for rank in range(num_ranks)]
        self.inboxes = [RankInbox(self.sink.address, rank, sink) for rank, sink in enumerate(self.sinks)]
        assert self.sink.wait_for_ranks(PATIENCE_S)

    def ticket(self, value: int) -> tuple[object, object]:
        slot = self.source.allocate(NBYTES)
        slot.buffer[:] = value
        return slot, self.source.ticket(slot, SHAPE, "float32", 60.0)

    def close(self) -> None:
        for inbox in self.inboxes:
            inbox.close()
        self.sink.close()
        self.source.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def until_empty(ranks: Ranks) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(sink.usage().used_bytes for sink in (*ranks.sinks, ranks.sink)):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_every_rank_has_the_bytes_until_the_slot_is_free(ranks: Ranks) -> None:
    _, ticket = ranks.ticket(7)
    landed = ranks.sink.pull(ticket, 5.0).result(PATIENCE_S)
    for inbox in ranks.inboxes:
        assert np.array_equal(inbox.feature(landed.slot_id).buffer, np.full(NBYTES, 7, np.uint8))
    assert landed.view.nbytes == 0
    reads = []
    ranks.inboxes[0].note_read(landed.slot_id, lambda: reads.append("read"))
    ranks.sink.free(landed.slot_id)
    ranks.sink.free(landed.slot_id)
    until_empty(ranks)
    assert reads == ["read"]


def test_a_lost_lease_frees_the_memory_of_all_ranks(ranks: Ranks) -> None:
    slot, ticket = ranks.ticket(1)
    ranks.source.free(slot)
    with pytest.raises(LeaseLost):
        ranks.sink.pull(ticket, 5.0).result(PATIENCE_S)
    until_empty(ranks)


def test_a_rank_without_room_fails_the_pull_for_all(ranks: Ranks) -> None:
    _, filling = ranks.ticket(1)
    beside = [ranks.sinks[1].pull(filling, 5.0).result(PATIENCE_S) for _ in range(3)]
    _, ticket = ranks.ticket(2)
    with pytest.raises(TransferFailed):
        ranks.sink.pull(ticket, 5.0).result(PATIENCE_S)
    for landed in beside:
        ranks.sinks[1].free(landed.slot_id)
    until_empty(ranks)
    assert ranks.sink.pull(ticket, 5.0).result(PATIENCE_S).ticket == ticket


def test_the_book_of_the_sink_says_when_there_is_no_room(ranks: Ranks) -> None:
    tickets = [ranks.ticket(value)[1] for value in range(4)]
    landed = [ranks.sink.pull(ticket, 5.0).result(PATIENCE_S) for ticket in tickets[:3]]
    with pytest.raises(ArenaFull):
        ranks.sink.pull(tickets[3], 5.0)
    ranks.sink.free(landed[0].slot_id)
    assert ranks.sink.pull(tickets[3], 5.0).result(PATIENCE_S).slot_id not in {each.slot_id for each in landed}


def test_a_cancelled_pull_leaves_nothing(ranks: Ranks) -> None:
    _, ticket = ranks.ticket(1)
    pull = ranks.sink.pull(ticket, 5.0)
    if not pull.cancel():
        ranks.sink.free(pull.result(PATIENCE_S).slot_id)
    until_empty(ranks)
    assert ranks.sink.usage().num_slots == 0


def test_what_can_not_be_pulled_is_refused() -> None:
    lonely = RankedSink(INBOX_BYTES, 1)
    try:
        hub = LocalChannelHub()
        source = LocalFeatureSource(hub, "encoder", 1 << 16)
        ticket = source.ticket(source.allocate(NBYTES), SHAPE, "float32", 1.0)
        with pytest.raises(TransferFailed, match="no inboxes"):
            lonely.pull(ticket, 1.0)
        wrong = type(ticket)(**{**{name: getattr(ticket, name) for name in ticket.__struct_fields__}, "nbytes": 3})
        with pytest.raises(ProtocolError):
            lonely.pull(wrong, 1.0)
        assert not lonely.wait_for_ranks(0.01)
        source.close()
    finally:
        lonely.close()
    assert not lonely.folder.exists()
