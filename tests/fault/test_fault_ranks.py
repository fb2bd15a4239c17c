"""Checks a worker of two ranks in a real cluster: Ray places the ranks together, and the loss of one is the loss of the
worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from chat_media import image_part, user
from cluster_process import ClusterProcess, eventually, start_cluster
from reference_model import Comparison, ReferenceModel

from deploy.demo.build import demo_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.nixl, pytest.mark.torch]

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterProcess]:
    workers = {"replicas": 1, "tensor_parallel": 2, "num_blocks": 512, "max_step_tokens": 64}
    with start_cluster(workers=workers) as running:
        yield running


def ask(cluster: ClusterProcess, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": cluster.model, "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS}
    with cluster.client() as client:
        response = client.post("/v1/chat/completions", json={**body, "return_token_ids": True})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def rank_processes(cluster: ClusterProcess) -> list[psutil.Process]:
    """Returns the rank processes; Ray names an actor's process after its class."""
    tree = psutil.Process(cluster.process.pid).children(recursive=True)
    return [process for process in tree if "RankActor" in " ".join(process.cmdline())]


def workers(cluster: ClusterProcess) -> list[str]:
    """Returns the names of the live workers; a replacement has another name than the replica that it replaces."""
    with cluster.client() as client:
        members = client.get("/weft/members").json()["members"]
    return [member["member_id"] for member in members if member["kind"] == "worker"]


def test_answers_equal_transformers_and_a_lost_worker_group_is_replaced(cluster: ClusterProcess) -> None:
    reference, comparison = ReferenceModel(demo_checkpoint()), Comparison()
    prompts = [user("Hello there!"), user("What is in this picture?", image_part(21))]

    def compare() -> None:
        for messages in prompts:
            found = ask(cluster, messages)
            tokens = found["choices"][0]["token_ids"]
            expected = reference.answer(messages, NUM_TOKENS)
            comparison.check(expected, found["prompt_token_ids"], tokens, "two ranks")

    compare()
    (before,), (lost,) = rank_processes(cluster), workers(cluster)
    before.kill()

    eventually(lambda: set(workers(cluster)) - {lost} != set(), 300.0)
    compare()
    (after,) = rank_processes(cluster)
    assert after.pid != before.pid
    comparison.finish()
