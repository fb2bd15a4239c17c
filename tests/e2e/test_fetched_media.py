"""Asks the demo model about media by URL, on a real cluster in this process that may fetch from the test's server."""

from __future__ import annotations

import pytest
from chat_media import data_url, user
from media_corpus import video_file
from media_servers import media_server, response

from deploy.testing import in_process_cluster, small_config

pytestmark = pytest.mark.torch


async def test_a_video_by_url_gives_the_answer_of_the_same_video_in_the_request() -> None:
    video = video_file("mp4-h264-aac")
    async with media_server({"/film.mp4": response(video, cache_control="max-age=60")}) as server:
        fetch = {"schemes": ["http"], "allowed_networks": ["127.0.0.2/32"], "allowed_ports": [server.port]}
        config = small_config(
            media={"probe_processes": 0, "max_frames": 4, "fetch": fetch},
            encoders={"modalities": ["video", "audio"]},
            workers={"num_blocks": 640},
        )
        urls = [data_url(video, "video/mp4"), server.url("/film.mp4"), server.url("/film.mp4")]
        async with in_process_cluster(config) as (_, client):
            records, texts = [], []
            for url in urls:
                part = {"type": "video_url", "video_url": {"url": url}}
                wanted = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "weft": {"explain": True}}
                body = {"model": "weft-demo", "messages": user("Watch this.", part), **wanted}
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                texts.append(answer.json()["choices"][0]["message"]["content"])
                records.append(answer.json()["weft"]["explain"])
            refused = await client.post(
                "/v1/chat/completions",
                json={
                    "model": "weft-demo",
                    "messages": user({"type": "video_url", "video_url": {"url": server.url("/film.mp4", "127.0.0.1")}}),
                },
            )
        assert len(set(texts)) == 1
        assert len({record["media"][0]["mm_hash"] for record in records}) == 1
        fetched = [[event["detail"] for event in each["events"] if event["name"] == "fetched"] for each in records]
        assert [[detail["is_cached"] for detail in each] for each in fetched] == [[], [False], [True]]
        for record in records:
            assert sum(record["first_token"]["parts"].values()) == pytest.approx(record["first_token"]["at_s"])
            assert all(value >= 0.0 for value in record["first_token"]["parts"].values())
        assert len(server.asked) == 1
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "url_refused")
