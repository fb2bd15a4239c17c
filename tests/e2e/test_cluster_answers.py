"""Checks the real cluster (Ray, Serve, NIXL, sockets) as an ordinary OpenAI client sees it."""

from __future__ import annotations

import base64
import json
from typing import Any

import openai
import pytest
from chat_media import image_part, user
from cluster_process import ClusterProcess, eventually
from reference_model import Comparison, ReferenceModel

from deploy.demo.build import demo_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.nixl, pytest.mark.torch]

BLOCK = 16


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    return ReferenceModel(demo_checkpoint())


def ask(cluster: ClusterProcess, messages: list[dict[str, Any]], max_tokens: int = 12, **fields: Any) -> dict[str, Any]:
    body = {
        "model": cluster.model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "return_token_ids": True,
        **fields,
    }
    with cluster.client() as client:
        response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_openai_client_streams_text_about_a_picture(cluster: ClusterProcess, reference: ReferenceModel) -> None:
    messages = user("What is in this picture?", image_part(21))
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=cluster.model,
        messages=messages,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expected = reference.answer(messages, 12)
    assert text == ask(cluster, messages)["choices"][0]["message"]["content"]
    usage = chunks[-1].usage
    assert usage is not None
    assert chunks[-1].choices == []
    assert usage.prompt_tokens == len(expected.prompt_ids)
    assert usage.completion_tokens == len(expected.token_ids)


def test_streamed_token_ids_are_those_of_the_whole_answer(cluster: ClusterProcess) -> None:
    """Checks `return_token_ids` (vLLM's extension): each id comes in exactly one chunk, and stop strings cut both
    answers alike."""
    messages = user("What can you do?")
    whole = ask(cluster, messages, 24)
    text = whole["choices"][0]["message"]["content"]
    for fields in ({}, {"stop": [text[4:7]]}):
        expected = ask(cluster, messages, 24, **fields)
        client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
        stream = client.chat.completions.create(
            model=cluster.model,
            messages=messages,
            temperature=0,
            max_tokens=24,
            stream=True,
            extra_body={"return_token_ids": True, **fields},
        )
        chunks = list(stream)
        choices = [chunk.choices[0].model_dump() for chunk in chunks]
        ids = [token for choice in choices for token in choice.get("token_ids") or ()]
        assert chunks[0].model_dump()["prompt_token_ids"] == expected["prompt_token_ids"]
        assert ids == expected["choices"][0]["token_ids"]
        assert len(ids) == expected["usage"]["completion_tokens"]
        assert choices[-1]["finish_reason"] == expected["choices"][0]["finish_reason"]


def test_openai_client_reads_logprobs_and_structured_output(cluster: ClusterProcess) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=cluster.model,
        messages=user("What is in this picture?", image_part(22)),
        response_format={"type": "json_schema", "json_schema": {"name": "seen", "schema": schema, "strict": True}},
        max_tokens=300,
        logprobs=True,
        top_logprobs=2,
        presence_penalty=0.5,
        logit_bias={"20": -5},
    )
    choice = answer.choices[0]
    said = json.loads(choice.message.content or "")
    assert said["colour"] in ("red", "blue")
    assert 0 <= said["count"] <= 9
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert answer.usage is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert {len(entry.top_logprobs) for entry in choice.logprobs.content} == {2}
    text = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content[:-1]).decode()
    assert text == choice.message.content, "the last entry is the end-of-turn token"
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        client.chat.completions.create(
            model=cluster.model,
            messages=user("Hello"),
            extra_body={"guided_json": {"type": "array", "uniqueItems": True}},
        )
    assert caught.value.param == "guided_json"


def test_tokens_equal_transformers(cluster: ClusterProcess, reference: ReferenceModel) -> None:
    comparison = Comparison()
    prompts = [
        user("Hello there!"),
        user("What is in this picture?", image_part(31)),
        user(image_part(32), "and", image_part(33, width=160, height=64), "differ how?"),
    ]
    for messages in [*prompts, *prompts]:
        answer = ask(cluster, messages)
        comparison.check(
            reference.answer(messages, 12), answer["prompt_token_ids"], answer["choices"][0]["token_ids"], "cluster"
        )
    comparison.finish()


def test_same_text_other_picture_shares_only_the_text_in_front(cluster: ClusterProcess) -> None:
    """The second request hits the text blocks before the picture; the third hits everything and encodes nothing."""
    prefix = "Please look very carefully at the picture that follows these words and tell me what you see in it. " * 2
    first = ask(cluster, user(prefix, image_part(41)))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < BLOCK * 2
    placeholder = 0
    ids: list[int] = first["prompt_token_ids"]
    placeholder = max(set(ids), key=ids.count)
    text_blocks = ids.index(placeholder) // BLOCK
    assert text_blocks >= 2

    def learned() -> bool:
        return ask(cluster, user(prefix, image_part(42)))["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    eventually(learned)
    other = ask(cluster, user(prefix, image_part(43)))
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == text_blocks * BLOCK
    encoded = cluster.total("weft_encoder_items_encoded_total")
    same = ask(cluster, user(prefix, image_part(43)))
    whole = (len(ids) - 1) // BLOCK * BLOCK
    assert same["usage"]["prompt_tokens_details"]["cached_tokens"] == whole
    assert same["choices"][0]["token_ids"] == other["choices"][0]["token_ids"]
    assert cluster.total("weft_encoder_items_encoded_total") == encoded


def test_a_client_that_leaves_frees_everything(cluster: ClusterProcess) -> None:
    body = {
        "model": cluster.model,
        "messages": user("Tell me a very long story about", image_part(51)),
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    with cluster.client() as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
        gauges = ("kv_used_blocks", "inbox_used_bytes", "num_running", "num_waiting", "num_features")
        eventually(lambda: all(cluster.total(f"weft_worker_{gauge}") == 0 for gauge in gauges))
        eventually(lambda: cluster.total("weft_encoder_num_leases") == 0)
        eventually(lambda: cluster.total("weft_encoder_arena_used_bytes") == 0)
        assert cluster.total("weft_router_requests_in_flight") == 0


def test_trace_tells_the_stages_in_order(cluster: ClusterProcess) -> None:
    answer = ask(cluster, user("What is this?", image_part(61)))
    with cluster.client() as client:
        trace = client.get(f"/weft/requests/{answer['id']}").json()
    names = [event["name"] for event in trace["events"]]
    for earlier, later in [
        ("planned", "dispatched"),
        ("unit_announced", "unit_landed"),
        ("unit_landed", "first_token"),
        ("first_token", "finished"),
    ]:
        assert names.index(earlier) < names.index(later), names


def refused(cluster: ClusterProcess, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
    with cluster.client() as client:
        response = client.post("/v1/chat/completions", **({"json": body} if options == {} else options))
    return response.status_code, response.json()["error"]


def url_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def bad_requests() -> list[tuple[str, Any, int, str, str]]:
    whole = base64.b64decode(image_part(71)["image_url"]["url"].split(",", 1)[1])
    cut = "data:image/png;base64," + base64.b64encode(whole[: len(whole) // 2]).decode()
    text = "data:image/png;base64," + base64.b64encode(b"I am no picture at all").decode()
    return [
        ("unknown part", [{"type": "hologram", "hologram": {}}], 400, "messages.0.content.0", "hologram"),
        ("broken base64", [url_part("data:image/png;base64,@@@@")], 400, "messages.0.content.0", "base64"),
        ("truncated picture", ["Look:", url_part(cut)], 400, "messages.0.content.1", ""),
        ("text called PNG", ["Look:", url_part(text)], 400, "messages.0.content.1", "image"),
        ("http url", [url_part("http://127.0.0.1/x.png")], 400, "messages.0.content.0", "https"),
    ]


@pytest.mark.parametrize(
    ("label", "parts", "status", "param", "hint"),
    bad_requests(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_parts_are_named(
    cluster: ClusterProcess, label: str, parts: Any, status: int, param: str, hint: str
) -> None:
    got, error = refused(cluster, {"model": cluster.model, "max_tokens": 4, "messages": user(*parts)})
    assert (got, error["param"]) == (status, param), error
    assert hint in error["message"]
    assert ask(cluster, user("Still there?"), max_tokens=2)["usage"]["completion_tokens"] >= 1


def test_unknown_model_is_404(cluster: ClusterProcess) -> None:
    got, error = refused(cluster, {"model": "nobody", "messages": user("hi")})
    assert (got, error["code"]) == (404, "model_not_found")


def test_malformed_json_is_400(cluster: ClusterProcess) -> None:
    got, error = refused(cluster, None, content=b'{"model": ', headers={"content-type": "application/json"})
    assert got == 400
    assert "JSON" in error["message"]


def test_too_long_prompt_says_both_numbers(cluster: ClusterProcess) -> None:
    got, error = refused(cluster, {"model": cluster.model, "messages": user("word " * 9000), "max_tokens": 4})
    assert (got, error["code"]) == (400, "context_length_exceeded")
    numbers = [int(word) for word in error["message"].replace(",", " ").split() if word.isdigit()]
    assert 8192 in numbers
    assert any(number > 8192 for number in numbers)
