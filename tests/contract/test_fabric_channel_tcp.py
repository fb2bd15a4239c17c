"""Checks NIXL over TCP alone: here a peer's own process sends the bytes, so a process that is stopped in the middle of
a transfer sends the rest when it wakes up. Dropping the connection did not stop that with NIXL 1.5.1."""

from __future__ import annotations

import multiprocessing
import time

import numpy as np
import pytest
from fabric_peers import ProcessPeer, payload

from fabric.contracts import TransferFailed

PATIENCE_S = 30.0
SHAPE = (1, 16_384, 64)
NBYTES = 4 << 20


def wake_up_late() -> None:
    """Runs in a process of its own, with a sink for two features and a small one."""
    from fabric.transport import NixlFeatureSink

    peer, other = ProcessPeer(), ProcessPeer()
    sink = NixlFeatureSink("worker", 2 * NBYTES + 4096)
    try:
        small = (1, 1, 1)
        sink.free(sink.pull(peer.offer(1, small), PATIENCE_S).result(PATIENCE_S).slot_id)
        beat = other.offer(2, small)
        ticket, other_ticket = peer.offer(3, SHAPE), other.offer(4, (1, 16_384, 60))
        sink.pull(beat, PATIENCE_S).add_done_callback(lambda done: sink.free(done.result().slot_id))
        peer.freeze()
        stuck = sink.pull(ticket, PATIENCE_S)
        sink.peer_dead(peer.name)
        with pytest.raises(TransferFailed):
            stuck.result(PATIENCE_S)
        landed = sink.pull(other_ticket, PATIENCE_S).result(PATIENCE_S)
        assert sink.usage().num_quarantined == 1
        peer.thaw()
        give_up_s = time.monotonic() + PATIENCE_S
        while sink.usage().num_quarantined:
            assert time.monotonic() < give_up_s, "the quarantine did not end"
            sink.free(sink.pull(beat, PATIENCE_S).result(PATIENCE_S).slot_id)
        assert np.array_equal(landed.buffer, payload(4, landed.ticket.nbytes))
    finally:
        sink.close()
        peer.close()
        other.close()


@pytest.mark.nixl
def test_a_connected_peer_that_wakes_up_late_writes_into_nobodys_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    process = multiprocessing.get_context("spawn").Process(target=wake_up_late)
    process.start()
    process.join(3 * PATIENCE_S)
    process.kill()
    process.join()
    assert process.exitcode == 0
