"""Checks an encoder that has more work than time, in a real cluster: it says so in time, and no member is blamed for
it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from chat_media import image_part, user
from cluster_process import eventually, start_cluster

pytestmark = [pytest.mark.ray, pytest.mark.nixl]

NUM_PICTURES = 24
DELAY_S = 1.0
"""Delays each forward pass, which is of one picture: all together take four times as long as one request may take."""
TIMEOUT_MS = 6_000


def test_what_comes_too_late_may_come_again_and_what_comes_in_time_is_shown_whole() -> None:
    encoders = {"replicas": 1, "encode_delay_s": DELAY_S, "max_batch_cost": 1}
    media = {"encode_timeout_ms": {"image": TIMEOUT_MS}, "on_encode_failure": "text_only"}
    with start_cluster(encoders=encoders, media=media, workers={"replicas": 1}) as cluster, cluster.client() as client:

        def ask(seed: int) -> httpx.Response:
            body = {"model": cluster.model, "messages": user("?", image_part(seed)), "max_tokens": 1}
            return client.post("/v1/chat/completions", json=body)

        with ThreadPoolExecutor(NUM_PICTURES) as threads:
            answers = list(threads.map(ask, range(NUM_PICTURES)))
        late = [answer for answer in answers if answer.status_code == 503]
        shown = [answer for answer in answers if answer.status_code == 200]
        assert len(late) + len(shown) == NUM_PICTURES, [answer.status_code for answer in answers]
        assert late
        assert shown
        for answer in late:
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("machine_busy", "messages.0.content.1")
            assert int(answer.headers["retry-after"]) >= 1
        for answer in shown:
            assert "weft" not in answer.json()
            assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] > 0
        again = ask(NUM_PICTURES)
        assert again.status_code == 200, again.text
        metrics = cluster.metrics()
        assert metrics['weft_router_dispatch_errors_total{code="machine_busy",kind="encode"}'] == len(late)
        assert 'weft_router_dispatch_errors_total{code="deadline_exceeded",kind="encode"}' not in metrics
        eventually(lambda: cluster.total("weft_encoder_num_items_pending") == 0)
