"""Kills replicas while they serve: accepted requests are answered, and the answers are the same as without the kill."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from chat_media import image_part, user
from cluster_process import ClusterProcess, eventually, pids
from mixed_requests import assert_all_right, kill_at_work, questions, run_mixed

pytestmark = [pytest.mark.ray, pytest.mark.nixl]


NUM_TOKENS = 2000
"""This many tokens keep the stream in progress for long after its first token, even on a busy machine."""
NUM_MIXED = 150
ENCODER_LOST = 'weft_router_dispatch_errors_total{code="encoder_lost",kind="encode"}'
WAITED = 'weft_router_capacity_wait_seconds_count{outcome="served"}'
LOST = 'weft_router_attempts_total{outcome="worker_lost"}'


def serving_worker(cluster: ClusterProcess, completion_id: str) -> str:
    """Returns the worker that the request was planned onto."""
    with cluster.client() as client:
        plans = client.get(f"/weft/requests/{completion_id}").json()["plans"]
    return str(plans[-1]["plan"]["worker_id"])


def body(cluster: ClusterProcess, messages: list[dict[str, Any]], max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": cluster.model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **fields,
    }


def ask(cluster: ClusterProcess, messages: list[dict[str, Any]], max_tokens: int) -> str:
    with cluster.client() as client:
        response = client.post("/v1/chat/completions", json=body(cluster, messages, max_tokens))
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def text_of(line: str) -> str:
    payload = line.removeprefix("data: ")
    if not line.startswith("data: ") or payload == "[DONE]":
        return ""
    chunk = json.loads(payload)
    assert "error" not in chunk, chunk
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_worker_lost_in_mid_stream_does_not_change_the_stream(
    cluster: ClusterProcess, number: signal.Signals
) -> None:
    """The open call detects a killed worker; the directory detects a frozen one, which no longer reports to it."""
    messages = user("Tell me about this picture at length", image_part(90 + number))
    expected = ask(cluster, messages, NUM_TOKENS)
    lost, name_to_pid = cluster.metrics().get(LOST, 0), pids(cluster, "worker")
    text = line = ""
    request = body(cluster, messages, NUM_TOKENS, stream=True)
    with cluster.client() as client, client.stream("POST", "/v1/chat/completions", json=request) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        while not text or not line:
            line = next(lines)
            text += text_of(line)
        victim = name_to_pid[serving_worker(cluster, json.loads(line.removeprefix("data: "))["id"])]
        os.kill(victim, number)
        text += "".join(text_of(line) for line in lines)
    assert text == expected
    assert cluster.metrics()[LOST] == lost + 1
    if number == signal.SIGSTOP:
        os.kill(victim, signal.SIGCONT)
    eventually(lambda: len(pids(cluster, "worker")) == 2, timeout_s=300)


def test_an_encoder_killed_at_work_hands_its_items_to_the_other_and_is_replaced(cluster: ClusterProcess) -> None:
    """No request waits: the other encoder takes the items that the killed one held, and the answers are right."""
    killed: list[str] = []
    lost, waits = (cluster.metrics().get(name, 0) for name in (ENCODER_LOST, WAITED))

    def disturb() -> None:
        killed.append(kill_at_work(cluster, "encoder"))

    outcome = run_mixed(cluster, list(questions(NUM_MIXED, 3)), 12, disturb)
    metrics = cluster.metrics()
    assert metrics[ENCODER_LOST] >= lost + 1, "no item was in its hands: it was not at work"
    assert metrics.get(WAITED, 0) == waits
    eventually(lambda: killed[0] not in pids(cluster, "encoder") and len(pids(cluster, "encoder")) == 2, timeout_s=300)
    assert_all_right(cluster, outcome)


def test_everything_is_free_afterwards(cluster: ClusterProcess) -> None:
    for name in ("kv_used_blocks", "inbox_used_bytes", "num_running", "num_waiting", "num_quarantined"):
        eventually(lambda name=name: cluster.total(f"weft_worker_{name}") == 0)
    eventually(lambda: cluster.total("weft_encoder_num_leases") == 0)
    assert cluster.total("weft_router_requests_in_flight") == 0
