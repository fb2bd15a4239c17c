"""Checks the records of requests on a real cluster in this process: what they say of time agrees with itself and with
what the planner and the members did."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from chat_media import data_url, image_part, user
from media_corpus import video_file

from deploy.local import LocalCluster
from deploy.testing import in_process_cluster, small_config

pytestmark = pytest.mark.torch

VIDEO = {"type": "video_url", "video_url": {"url": data_url(video_file("mp4-h264-aac"), "video/mp4")}}
CONTENT = ["Look at this picture.", image_part(31), "Now watch and hear this.", VIDEO, "What is it?"]
CONFIG = small_config(
    encoders={"replicas": 2, "modalities": ["image", "video", "audio"], "encode_delay_s": 0.2},
    workers={"replicas": 2, "num_blocks": 640},
    media={"max_frames": 8},
)


def body(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "weft-demo", "messages": user(*content), "max_tokens": 4, "temperature": 0, "ignore_eos": True} | (
        fields
    )


async def record_of(client: httpx.AsyncClient, *content: Any) -> dict[str, Any]:
    """Asks, and returns the record from the answer, which equals that of the endpoint."""
    response = await client.post("/v1/chat/completions", json=body(*content, weft={"explain": True}))
    assert response.status_code == 200, response.text
    record: dict[str, Any] = response.json()["weft"]["explain"]
    assert record == (await client.get(f"/weft/requests/{response.json()['id']}")).json()
    return record


def seconds(record: dict[str, Any], name: str) -> float:
    return sum(span["end_s"] - span["begin_s"] for span in record["timeline"] if span["name"] == name)


def check_times(record: dict[str, Any]) -> None:
    """Checks that the timeline is in order and that the parts of the time to first token agree with it."""
    spans, first = record["timeline"], record["first_token"]
    begins = [span["begin_s"] for span in spans]
    assert begins == sorted(begins)
    assert all(0.0 <= span["begin_s"] <= span["end_s"] for span in spans)
    assert {span["uncertainty_s"] for span in spans} == {0.0}, "all members are on one host"
    parts = first["parts"]
    assert sum(parts.values()) == pytest.approx(first["at_s"])
    assert all(value >= 0.0 for value in parts.values()), parts
    # The timing of the request begins a little after its record does.
    assert 0.0 <= first["at_s"] - record["timing"]["first_token_s"] < 0.1 * first["at_s"]
    assert parts["prefill"] == pytest.approx(seconds(record, "prefill"))
    assert parts["held"] == pytest.approx(seconds(record, "held"))
    assert parts["read"] == pytest.approx(seconds(record, "read"))
    arrivals = [span["begin_s"] for span in spans if span["name"] == "first_token"]
    assert arrivals[-1] == pytest.approx(first["at_s"])
    ttft = next(stage for stage in record["stages"] if stage["stage"] == "ttft")
    assert ttft["actual_s"] == pytest.approx(first["actual_s"])
    assert first["overlap_efficiency"] == pytest.approx(first["lower_bound_s"] / first["actual_s"])


def check_plan(record: dict[str, Any], cluster: LocalCluster) -> None:
    """Checks that the plan shows each worker, with terms that add up."""
    (entry,) = record["plans"]
    explanation = entry["plan"]["explanation"]
    candidates = [explanation["winner"], *explanation["alternatives"]]
    assert {each["worker_id"] for each in candidates} == set(cluster.workers.services)
    for each in candidates:
        names = ("queue_s", "prefill_s", "held_s", "first_token_s", "delivery_s")
        terms_s = sum(each[name] for name in names)
        assert terms_s == pytest.approx(each["ttft_s"])


async def test_the_record_of_a_request_with_a_picture_a_video_and_text() -> None:
    async with in_process_cluster(CONFIG) as (cluster, client):
        record = await record_of(client, *CONTENT)
        assert (record["modality"], record["outcome"]) == ("video", "ok")
        assert [medium["modality"] for medium in record["media"]] == ["image", "video", "audio"]
        check_times(record)
        check_plan(record, cluster)
        names = {span["name"] for span in record["timeline"]}
        assert {"read", "prompted", "planned", "way", "decoded", "unit_encoded", "transfer", "queue"} <= names
        assert {"held", "prefill", "first_token", "generate"} <= names
        encoded = {span["detail"]["item"] for span in record["timeline"] if span["name"] == "unit_encoded"}
        assert encoded == {0, 1, 2}
        for item in encoded:
            mine = [span for span in record["timeline"] if span["detail"].get("item") == item]
            (decoded,) = (span for span in mine if span["name"] == "decoded")
            first_pass = min(span["begin_s"] for span in mine if span["name"] == "unit_encoded")
            last_pass = max(span["end_s"] for span in mine if span["name"] == "unit_encoded")
            landed = max(span["end_s"] for span in mine if span["name"] == "transfer")
            assert decoded["begin_s"] <= first_pass < last_pass <= landed <= record["first_token"]["at_s"]
            stages = {each["stage"]: each["actual_s"] for each in record["stages"] if each["item"] == item}
            assert {"decode_wait", "decode", "ready", "encode", "transfer", "landing"} <= set(stages)
            assert stages["ready"] + stages["encode"] <= stages["landing"]
        # The forward pass is the longest work by far, so the request stood at its doorstep for its sake.
        assert record["first_token"]["longest_part"] == "held"
        again = await record_of(client, *CONTENT)
        check_times(again)
        assert not [span for span in again["timeline"] if span["name"] == "unit_encoded"]
        assert record["first_token"]["at_s"] > again["first_token"]["at_s"]
        page = await client.get(f"/weft/requests/{record['request_id']}.html")
        assert "Held at the doorstep" in page.text
        assert f"{record['first_token']['overlap_efficiency']:.2f}" in page.text


async def test_the_record_of_a_request_of_text() -> None:
    async with in_process_cluster(CONFIG) as (cluster, client):
        record = await record_of(client, "Only words.")
        check_times(record)
        check_plan(record, cluster)
        assert (record["modality"], record["first_token"]["parts"]["held"]) == ("text", 0.0)
        assert {each["stage"] for each in record["stages"]} == {"queue", "prefill", "held", "first_token", "ttft"}


async def test_openais_client_gets_the_record() -> None:
    async with in_process_cluster(CONFIG) as (_, client):
        asked = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=client)
        fields = {name: value for name, value in body("Only words.").items() if name != "ignore_eos"}
        extra = {"weft": {"explain": True}}
        answer = await asked.chat.completions.create(**fields, extra_body=extra)
        assert answer.model_extra is not None
        whole = answer.model_extra["weft"]["explain"]
        chunks = [chunk async for chunk in await asked.chat.completions.create(**fields, extra_body=extra, stream=True)]
        last = chunks[-1].model_extra
        assert last is not None
        for record, name in ((whole, answer.id), (last["weft"]["explain"], chunks[-1].id)):
            assert record["request_id"] == name.removeprefix("chatcmpl-")
            check_times(record)
