"""Tests `/v1/responses` over fake members. The answers and events are read by the types of OpenAI's own client."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import httpx
import pytest
from edge_client import served
from openai.types.responses import Response, ResponseIncludable, ResponseStreamEvent
from pydantic import TypeAdapter
from router_chats import image
from tool_samples import CALL, CITY, THINKING

from deploy.testing import TINY_MODEL, FakeCluster
from deploy.testing.tiny_family import TinyFamily, tiny_codec
from fabric.contracts import EngineFailed

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": CITY, "strict": True}


def asked(content: object = "hello", **fields: object) -> bytes:
    return json.dumps({"model": TINY_MODEL, "input": content, "seed": 7} | fields).encode()


async def answered(client: httpx.AsyncClient, body: bytes) -> Response:
    response = await client.post(PATH, content=body)
    assert response.status_code == 200, response.text
    return Response.model_validate(response.json(), strict=True)


async def streamed(client: httpx.AsyncClient, body: bytes) -> list[Any]:
    """Returns the events of a stream, each checked against its own type and the name in its `event` line."""
    response = await client.post(PATH, content=body)
    found: list[Any] = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = EVENT.validate_json(data.removeprefix("data: "))
        assert name == f"event: {event.type}"
        found.append(event)
    assert [event.sequence_number for event in found] == list(range(len(found)))
    return found


def prompt(cluster: FakeCluster) -> str:
    (request,) = cluster.workers[0].requests
    return cluster.codec.decode(request.token_ids, skip_special_tokens=False)


async def test_a_text_becomes_a_user_message() -> None:
    async with served() as (cluster, client):
        cluster.workers[0].script.reply = "Grüß dich!"
        response = await answered(client, asked(instructions="Be brief.", metadata={"a": "b"}, temperature=0.5))
        assert prompt(cluster) == "<|turn|>system\nBe brief.<|end|><|turn|>user\nhello<|end|><|turn|>assistant\n"
        assert response.output_text == "Grüß dich!"
        assert response.status == "completed"
        assert response.id.startswith("resp_")
        assert (response.metadata, response.temperature, response.instructions) == ({"a": "b"}, 0.5, "Be brief.")
        assert response.usage is not None
        assert response.usage.input_tokens == len(cluster.workers[0].requests[0].token_ids)
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


async def test_events_tell_of_each_item_from_its_beginning_to_its_end() -> None:
    async with served() as (cluster, client):
        cluster.workers[0].script.reply = "Grüß dich!"
        found = await streamed(client, asked(stream=True))
        kinds = [event.type for event in found]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert set(kinds[4:-4]) == {"response.output_text.delta"}
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert "".join(event.delta for event in found[4:-4]) == found[-4].text == "Grüß dich!"
        assert {event.item_id for event in found[3:-2]} == {found[2].item.id}
        assert found[-1].response.output[0] == found[-2].item
        assert found[-1].response.output_text == "Grüß dich!"


async def test_calls_of_tools_are_items_of_their_own() -> None:
    async with served() as (cluster, client):
        cluster.workers[0].script.reply = f"Let me see.{CALL}"
        whole = await answered(client, asked(tools=[WEATHER]))
        assert [item.type for item in whole.output] == ["message", "function_call"]
        call: Any = whole.output[1]
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Köln"})
        assert call.call_id.startswith("call_")
        assert call.id.startswith("fc_")
        found = await streamed(client, asked(tools=[WEATHER], stream=True))
        pieces = [event.delta for event in found if event.type == "response.function_call_arguments.delta"]
        (done,) = [event for event in found if event.type == "response.function_call_arguments.done"]
        assert json.loads("".join(pieces)) == json.loads(done.arguments) == {"city": "Köln"}
        assert [item.type for item in found[-1].response.output] == ["message", "function_call"]


async def test_a_demanded_tool_reaches_the_worker() -> None:
    async with served() as (cluster, client):
        cluster.workers[0].script.reply = CALL
        await answered(client, asked(tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}))
        assert "weather" in cluster.workers[0].requests[0].sampling.grammar
        await answered(client, asked(text={"format": {"type": "json_schema", "name": "x", "schema": CITY}}))
        assert "city" in cluster.workers[0].requests[1].sampling.grammar


async def test_a_conversation_is_sent_as_items() -> None:
    async with served() as (cluster, client):
        cluster.workers[0].script.reply = "It is sunny."
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "The weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Ask."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rom"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ]
        await answered(client, asked(items, tools=[WEATHER]))
        text = prompt(cluster)
        call_text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
        assert f"<|turn|>user\nThe weather?<|end|><|turn|>assistant\nWait.\n{call_text}<|end|>" in text
        assert "<tool_response>\nsunny\n</tool_response>" in text


async def test_pictures_are_given_by_a_string() -> None:
    async with served() as (cluster, client):
        picture: Any = image()
        part = {"type": "input_image", "image_url": picture["image_url"]["url"], "detail": "auto"}
        await answered(client, asked([{"role": "user", "content": [part, {"type": "input_text", "text": "?"}]}]))
        (request,) = cluster.workers[0].requests
        assert [item.modality for item in request.media] == ["image"]


async def test_reasoning_is_an_item_before_the_message() -> None:
    async with served(model=(TinyFamily(), tiny_codec(THINKING))) as (cluster, client):
        cluster.workers[0].script.reply = "I think.\n</think>\n\nTwo."
        whole = await answered(client, asked())
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        thought: Any = whole.output[0]
        assert thought.content[0].text == "I think."
        assert whole.output_text == "Two."
        found = await streamed(client, asked(stream=True))
        deltas = [event.delta for event in found if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == "I think."
        assert found[-1].response.output_text == "Two."


async def test_a_cut_response_is_incomplete() -> None:
    async with served() as (_, client):
        whole = await answered(client, asked(max_output_tokens=3))
        assert whole.status == "incomplete"
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        found = await streamed(client, asked(max_output_tokens=3, stream=True))
        assert found[-1].type == "response.incomplete"


async def test_a_call_that_was_cut_is_incomplete() -> None:
    async with served() as (cluster, client):
        cluster.workers[0].script.reply = CALL
        fields: dict[str, Any] = {"tools": [WEATHER], "max_output_tokens": CALL.index("K") + 1}
        whole = await answered(client, asked(**fields))
        assert whole.status == "incomplete"
        call: Any = whole.output[0]
        assert (call.status, call.arguments) == ("incomplete", '{"city": "K')
        kinds = [event.type for event in await streamed(client, asked(stream=True, **fields))]
        assert "response.function_call_arguments.done" not in kinds
        assert kinds[-2:] == ["response.output_item.done", "response.incomplete"]


async def test_a_failure_in_mid_stream_is_told_twice() -> None:
    """Some clients look at the response that failed, and others raise on the event `error`."""
    async with served(max_attempts=1) as (cluster, client):
        cluster.workers[0].script.error = EngineFailed("it broke")
        cluster.workers[0].script.die_at = 4
        found = await streamed(client, asked(stream=True))
        assert [event.type for event in found[-2:]] == ["response.failed", "error"]
        assert found[-2].response.error.message == "it broke"
        assert found[-1].code == "engine_failed"


async def test_log_probabilities_come_with_the_text() -> None:
    async with served() as (cluster, client):
        cluster.workers[0].script.reply = "ab"
        whole = await answered(client, asked(include=["message.output_text.logprobs"], top_logprobs=2))
        assert cluster.workers[0].requests[0].sampling.num_top_logprobs == 2
        message: Any = whole.output[0]
        assert [entry.token for entry in message.content[0].logprobs][:2] == ["a", "b"]


async def test_log_probabilities_are_those_of_the_text_beside_reasoning_and_calls() -> None:
    reply = f"because</think>\n\nab <c{CALL}"
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "tools": [WEATHER]}
    async with served(model=(TinyFamily(), tiny_codec(THINKING))) as (cluster, client):
        cluster.workers[0].script.reply = reply
        whole = await answered(client, asked(**fields))
        message: Any = next(item for item in whole.output if item.type == "message")
        (part,) = message.content
        assert part.text == "ab <c"
        assert "".join(entry.token for entry in part.logprobs) == part.text
        found = await streamed(client, asked(stream=True, **fields))
        deltas = [event for event in found if event.type == "response.output_text.delta"]
        assert "".join(event.delta for event in deltas) == part.text
        assert "".join(entry.token for event in deltas for entry in event.logprobs) == part.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input.0.content.0.image_url",
        ),
        ({"input": [{"role": "user", "content": [{"type": "other"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "king", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": 7}]}, "input.0.content"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input.0.arguments"),
        ({"instructions": "x", "input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "response_format": {"type": "text"}}, "response_format"),
        ({"text": {"verbosity": "bogus"}}, "text.verbosity"),
        ({"reasoning": {"summary": "bogus"}}, "reasoning.summary"),
        ({"include": ["bogus"]}, "include.0"),
        ({"truncation": "bogus"}, "truncation"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"return_token_ids": True}, "return_token_ids"),
    ],
)
async def test_bad_requests_for_responses_are_named(fields: dict[str, object], param: str) -> None:
    async with served() as (_, client):
        response = await client.post(PATH, content=asked(**({"content": fields.pop("input", "hello")} | fields)))
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def user(*parts: object) -> list[object]:
    return [{"role": "user", "content": list(parts)}]


OUTPUT = {"type": "function_call_output", "call_id": "c"}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": [OUTPUT]}, "input.0.output", "`input.0.output` must be a string or a non-empty array"),
        ({"input": [OUTPUT | {"output": {"a": 1}}]}, "input.0.output", "`input.0.output` must be .* not an object"),
        ({"input": [OUTPUT | {"output": []}]}, "input.0.output", "`input.0.output` must be .* not an empty array"),
        ({"input": [OUTPUT | {"output": [7]}]}, "input.0.output.0", "not 7"),
        ({"input": [{"role": "user", "content": 7}]}, "input.0.content", "`input.0.content` must be a string"),
        ({"input": user({"type": "input_text"})}, "input.0.content.0", "`input_text` needs a string under `text`"),
        ({"input": user(PICTURE | {"detail": "bogus"})}, "input.0.content.0.detail", "`auto`, `low`, `high` or"),
        ({"input": user(PICTURE | {"uuid": ""})}, "input.0.content.0.uuid", "1 to 256 characters"),
        ({"input": user({"type": "input_file", "file_id": "f"})}, "input.0.content.0.file_id", "keeps no files"),
        ({"input": user({"type": "input_file"})}, "input.0.content.0.file_data", "needs its content"),
        ({"input": [CALLED | {"name": 7}]}, "input.0.name", "`input.0.name` must be a string"),
        ({"text": {"format": {"type": "bogus"}}}, "text.format.type", '`text.format.type` must be .* not "bogus"'),
        ({"text": {"format": {}}}, "text.format.type", "`text.format.type` must be .* not null"),
        ({"input": [{"role": "user", "content": "a"}] * 9}, "input", "`input` may have at most 8 elements, not 9"),
    ],
)
async def test_a_refusal_has_the_words_of_the_request(fields: dict[str, Any], param: str, words: str) -> None:
    async with served(max_messages=8) as (_, client):
        response = await client.post(PATH, content=asked(fields.pop("input", "hello"), **fields))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert re.search(words, error["message"]), error["message"]
        assert "messages" not in error["message"]
        assert "response_format" not in error["message"]


async def test_hints_that_change_nothing_are_taken() -> None:
    included = list(get_args(ResponseIncludable))
    async with served() as (_, client):
        for verbosity in ("low", "medium", "high"):
            whole = await answered(client, asked(include=included, text={"verbosity": verbosity}))
            assert whole.text is not None
            assert whole.text.verbosity == verbosity


async def test_no_response_says_that_its_input_may_be_truncated() -> None:
    async with served() as (_, client):
        whole = await answered(client, asked(truncation="auto"))
        assert whole.truncation == "disabled"
        refused = await client.post(PATH, content=asked("long " * 100_000, truncation="auto"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_pictures_of_a_response_have_a_detail() -> None:
    async with served() as (cluster, client):
        picture: Any = image()
        for detail in ("high", "original"):
            part = {"type": "input_image", "image_url": picture["image_url"]["url"], "detail": detail}
            await answered(client, asked(user(part)))
        high, original = (request.media for request in cluster.workers[0].requests)
        assert high == original


async def test_a_name_stands_for_a_medium_of_an_earlier_response() -> None:
    async with served() as (cluster, client):
        picture: Any = image()
        url = picture["image_url"]["url"]
        for part in (
            {"type": "input_image", "image_url": url},
            {"type": "input_image"},
            {"type": "input_image", "image_url": None, "detail": "auto"},
            {"type": "input_file"},
            {"type": "input_file", "filename": "a.png"},
        ):
            await answered(client, asked(user(part | {"uuid": "f9"})))
        first, *others = (request.media for request in cluster.workers[0].requests)
        assert [other == first for other in others] == [True] * 4
        refused = await client.post(PATH, content=asked(user({"type": "input_image", "uuid": "f8"})))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input.0.content.0")


async def test_an_error_about_a_medium_names_its_place_in_the_input() -> None:
    async with served() as (_, client):
        part = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
        items = [{"role": "user", "content": "a"}, {"role": "user", "content": [part]}]
        error = (await client.post(PATH, content=asked(items, instructions="b"))).json()["error"]
        assert error["param"] == "input.1.content.0"
        assert error["message"].startswith("input.1.content.0: ")
