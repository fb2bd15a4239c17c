"""Tests tools and reasoning in chat completions over fake members: prompts, grammars, whole and streamed answers."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from edge_client import events, served
from jsonschema import ValidationError, validate
from router_chats import chat_body, image
from tool_samples import CALL, CITY, SECOND, THINKING, TOOLS

from deploy.testing import FakeCluster
from deploy.testing.tiny_family import TinyFamily, tiny_codec
from fabric.contracts import GenerateRequest

CHAT = "/v1/chat/completions"
PARAMETERS = "tools.0.function.parameters"


def request_of(cluster: FakeCluster) -> GenerateRequest:
    (request,) = [request for worker in cluster.workers for request in worker.requests]
    return request


def prompt_of(cluster: FakeCluster) -> str:
    return cluster.codec.decode(request_of(cluster).token_ids, skip_special_tokens=False)


async def answer(cluster: FakeCluster, client: httpx.AsyncClient, reply: str, **fields: object) -> dict[str, Any]:
    """Returns the first choice of a whole answer to a chat to which the worker replies with this text."""
    cluster.workers[0].script.reply = reply
    response = await client.post(CHAT, content=chat_body(**fields))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


async def test_a_call_becomes_a_tool_call() -> None:
    async with served() as (cluster, client):
        choice = await answer(cluster, client, f"Let me see.\n{CALL}", tools=TOOLS)
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see.\n"
        assert call["id"].startswith("call_")
        assert call["type"] == "function"
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}


async def test_calls_alone_leave_no_content_and_have_ids_of_their_own() -> None:
    async with served() as (cluster, client):
        choice = await answer(cluster, client, f"{CALL}\n{SECOND}", tools=TOOLS)
        assert choice["message"]["content"] is None
        calls = choice["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["weather", "time"]
        assert calls[0]["id"] != calls[1]["id"]


async def test_streamed_calls_concatenate_to_the_whole_ones() -> None:
    async with served() as (cluster, client):
        cluster.workers[0].script.reply = f"See: {CALL}\n{SECOND}"
        response = await client.post(CHAT, content=chat_body(tools=TOOLS, stream=True))
        *chunks, done = events(response.content)
        assert done == "[DONE]"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls: dict[int, dict[str, str]] = {}
        for delta in deltas:
            for piece in delta.get("tool_calls", ()):
                call = calls.setdefault(piece["index"], {"id": piece.get("id", ""), "name": "", "arguments": ""})
                call["name"] += piece["function"].get("name", "")
                call["arguments"] += piece["function"].get("arguments", "")
        assert "".join(delta.get("content") or "" for delta in deltas).strip() == "See:"
        assert [call["name"] for call in calls.values()] == ["weather", "time"]
        assert json.loads(calls[0]["arguments"]) == {"city": "Köln"}
        assert json.loads(calls[1]["arguments"]) == {}
        assert all(call["id"].startswith("call_") for call in calls.values())
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_model_that_calls_nothing_stops_as_ever() -> None:
    async with served() as (cluster, client):
        choice = await answer(cluster, client, "No tool is needed.", tools=TOOLS)
        assert choice["finish_reason"] == "stop"
        assert choice["message"] == {"role": "assistant", "content": "No tool is needed.", "refusal": None}


async def test_without_tools_the_text_of_a_call_is_text() -> None:
    async with served() as (cluster, client):
        choice = await answer(cluster, client, CALL)
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"
        choice = await answer(cluster, client, CALL, tools=TOOLS, tool_choice="none")
        assert choice["message"]["content"] == CALL


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["weather", "time"]),
        ({"type": "function", "function": {"name": "time"}}, ["time"]),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]},
            },
            ["weather"],
        ),
    ],
)
async def test_a_demanded_call_constrains_the_worker(choice: object, names: list[str]) -> None:
    async with served() as (cluster, client):
        await answer(cluster, client, CALL, tools=TOOLS, tool_choice=choice)
        grammar = request_of(cluster).sampling.grammar
        assert [name for name in ("weather", "time") if f'\\"{name}\\"' in grammar or f'"{name}"' in grammar] == names
        assert "tool_call" in grammar


async def test_the_model_is_told_of_all_tools_even_if_it_may_call_one() -> None:
    async with served() as (cluster, client):
        named = {"type": "function", "function": {"name": "time"}}
        await answer(cluster, client, SECOND, tools=TOOLS, tool_choice=named)
        prompt = prompt_of(cluster)
        assert "Tells the weather." in prompt
        assert prompt.index("Tells the weather.") < prompt.index("hello")


async def test_tools_join_the_system_message_of_a_template_that_does_not_take_them() -> None:
    async with served() as (cluster, client):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        await answer(cluster, client, CALL, messages=messages, tools=TOOLS)
        prompt = prompt_of(cluster)
        assert prompt.startswith("<|turn|>system\nBe brief.\n\n")
        assert prompt.count("<|turn|>system") == 1


async def test_earlier_calls_and_results_are_shown_to_the_model() -> None:
    async with served() as (cluster, client):
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ]
        await answer(cluster, client, "It is sunny.", messages=messages, tools=TOOLS)
        prompt = prompt_of(cluster)
        call_text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
        assert f"<|turn|>assistant\n{call_text}" in prompt
        assert "<|turn|>user\n<tool_response>\nsunny\n</tool_response>" in prompt


async def test_a_template_that_takes_tools_gets_them_as_variables() -> None:
    template = (
        "{% for tool in tools or [] %}<|turn|>tool {{ tool.function.name }}{% endfor %}"
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}[{{ call.function.name }}|{{ call.function.arguments.city }}]{% endfor %}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
    async with served(model=(TinyFamily(), tiny_codec(template))) as (cluster, client):
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
        await answer(cluster, client, "ok", messages=messages, tools=TOOLS)
        prompt = prompt_of(cluster)
        assert prompt.startswith("<|turn|>tool weather<|turn|>tool time<|turn|>user\nhi<|end|>")
        assert "<|turn|>assistant\n[weather|Rom]<|end|>" in prompt


async def test_tools_and_a_schema_allow_either() -> None:
    async with served() as (cluster, client):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
        await answer(cluster, client, CALL, tools=TOOLS, response_format=form)
        grammars = json.loads(request_of(cluster).sampling.grammar)["grammars"]
        assert [each.get("name") for each in grammars][:3] == ["answer", "calls", "response"]


def tools_with(parameters: dict[str, object] | None) -> list[dict[str, object]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def tools_with_pattern(pattern: str) -> list[dict[str, object]]:
    return tools_with({"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": [TOOLS[1]] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": tools_with({"type": "objekt"})}, f"{PARAMETERS}.type"),
        ({"tools": tools_with({"type": "array", "items": {}})}, f"{PARAMETERS}.type"),
        ({"tools": tools_with({"type": ["array", "null"]}), "tool_choice": "none"}, f"{PARAMETERS}.type"),
        ({"tools": tools_with({"properties": {"x": {"type": "objekt"}}})}, PARAMETERS),
        ({"tools": tools_with({"enum": [1]})}, PARAMETERS),
        ({"tools": [*TOOLS, *tools_with({"$ref": "#/nowhere"})]}, f"tools.{len(TOOLS)}.function.parameters"),
        *(({"tools": tools_with_pattern(pattern)}, PARAMETERS) for pattern in ("(", "(?=a)b", "[z-a]")),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls.0.function"),
    ],
)
async def test_bad_tools_are_named(fields: dict[str, object], param: str) -> None:
    async with served() as (_, client):
        response = await client.post(CHAT, content=chat_body(**fields))
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
async def test_a_tool_without_parameters_gets_no_arguments(parameters: dict[str, object] | None) -> None:
    async with served() as (cluster, client):
        await answer(cluster, client, CALL, tools=tools_with(parameters), tool_choice="required")
        (schema,) = re.findall(r"%json (.*)", request_of(cluster).sampling.grammar)
        validate({}, json.loads(schema))
        with pytest.raises(ValidationError):
            validate({"x": 1}, json.loads(schema))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("head", ["<tool", "<tool_call>", '<tool_call>\n{"name":', f"{CALL}\n<tool_call>\n{{"])
async def test_a_demanded_call_that_is_cut_before_its_arguments_shows_no_markup(head: str, is_streamed: bool) -> None:
    async with served() as (cluster, client):
        cluster.workers[0].script.reply = f"{head}!"
        fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": len(head.encode())}
        response = await client.post(CHAT, content=chat_body(**fields, stream=is_streamed))
        if is_streamed:
            choices = [chunk["choices"][0] for chunk in events(response.content)[:-1]]
            messages, finish = [choice["delta"] for choice in choices], choices[-1]["finish_reason"]
        else:
            (choice,) = response.json()["choices"]
            messages, finish = [choice["message"]], choice["finish_reason"]
        assert "".join(message.get("content") or "" for message in messages).strip() == ""
        calls = [call for message in messages for call in message.get("tool_calls", ()) if call["function"].get("name")]
        assert [call["function"]["name"] for call in calls] == (["weather"] if CALL in head else [])
        assert finish == "length"


@pytest.mark.parametrize(
    ("fields", "reason", "arguments"),
    [
        ({"stop": ["öln"]}, "stop", '{"city": "K'),
        ({"stop_token_ids": [ord("K")]}, "stop", '{"city": "'),
        ({"max_tokens": CALL.index("K") + 1}, "length", '{"city": "K'),
        ({"stop": ["</tool_call>"]}, "tool_calls", '{"city": "Köln"}'),
    ],
)
async def test_a_call_that_was_cut_is_not_told_as_complete(fields: dict[str, Any], reason: str, arguments: str) -> None:
    async with served() as (cluster, client):
        choice = await answer(cluster, client, CALL, tools=TOOLS, **fields)
        assert choice["finish_reason"] == reason
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments
        streamed = await client.post(CHAT, content=chat_body(tools=TOOLS, stream=True, **fields))
        assert events(streamed.content)[-2]["choices"][0]["finish_reason"] == reason


# ---------------------------------------------------------------- These tests cover reasoning.


async def test_reasoning_stands_apart_from_the_answer() -> None:
    async with served(model=(TinyFamily(), tiny_codec(THINKING))) as (cluster, client):
        choice = await answer(cluster, client, "So it is two.\n</think>\n\nTwo.")
        assert choice["message"]["reasoning_content"] == "So it is two."
        assert choice["message"]["content"] == "Two."
        hidden = await answer(cluster, client, "So.\n</think>\n\nTwo.", include_reasoning=False)
        assert "reasoning_content" not in hidden["message"]


async def test_streamed_reasoning_comes_before_the_answer() -> None:
    async with served(model=(TinyFamily(), tiny_codec(THINKING))) as (cluster, client):
        cluster.workers[0].script.reply = "First.\nThen.\n</think>\n\nTwo."
        response = await client.post(CHAT, content=chat_body(stream=True))
        deltas = [chunk["choices"][0]["delta"] for chunk in events(response.content)[:-1]]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "First.\nThen."
        assert "".join(delta.get("content", "") for delta in deltas) == "Two."


async def test_without_thinking_the_whole_text_is_the_answer() -> None:
    async with served(model=(TinyFamily(), tiny_codec(THINKING))) as (cluster, client):
        for fields in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
            choice = await answer(cluster, client, "Two.", **fields)
            assert choice["message"] == {"role": "assistant", "content": "Two.", "refusal": None}
            assert prompt_of(cluster).endswith("<think></think>")
            cluster.workers[0].requests.clear()


@pytest.mark.parametrize(
    ("reply", "fields", "count"),
    [
        ("So.\n</think>\n\nTwo.", {}, len("So.\n")),
        ("<think>So.</think>Two.", {}, len("So.")),
        ("\n<think>\nSö.</think></think>", {}, len("\nSö.".encode())),
        ("</think>Two.", {}, 0),
        ("Never </thin done", {}, len("Never </thin done")),
        ("So.</think>A literal </think> is text.", {}, len("So.")),
        ("A literal </think> is text.", {"reasoning_effort": "none"}, 0),
        (" <think>So.</think>Two.", {"reasoning_effort": "none"}, len("So.")),
    ],
)
async def test_the_tokens_between_the_marks_are_counted(reply: str, fields: dict[str, Any], count: int) -> None:
    """A token of the tiny model is a byte."""
    async with served(model=(TinyFamily(), tiny_codec(THINKING))) as (cluster, client):
        cluster.workers[0].script.reply = reply
        whole = await client.post(CHAT, content=chat_body(n=2, **fields))
        assert whole.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * count
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await client.post(CHAT, content=chat_body(**options, **fields))
        usage = events(streamed.content)[-2]["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == count


async def test_a_call_may_follow_the_reasoning() -> None:
    async with served(model=(TinyFamily(), tiny_codec(THINKING))) as (cluster, client):
        choice = await answer(cluster, client, f"I ask.\n</think>\n\n{CALL}", tools=TOOLS, tool_choice="required")
        assert choice["message"]["reasoning_content"] == "I ask."
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert "REASONING" in request_of(cluster).sampling.grammar


async def test_the_router_can_be_told_not_to_read_reasoning() -> None:
    async with served(model=(TinyFamily(), tiny_codec(THINKING)), reads_reasoning=False) as (cluster, client):
        choice = await answer(cluster, client, "So.</think>Two.")
        assert choice["message"]["content"] == "So.</think>Two."


async def test_template_variables_can_not_replace_the_conversation() -> None:
    async with served() as (_, client):
        response = await client.post(CHAT, content=chat_body(chat_template_kwargs={"messages": []}))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize("schema", ['{"enum": [NaN]}', '{"enum": [1e999]}', '{"const": ' + "9" * 4299 + "}"])
async def test_numbers_that_json_does_not_have_are_refused_in_schemas(schema: str) -> None:
    async with served() as (_, client):
        body = chat_body(guided_json={}).replace(b'"guided_json": {}', b'"guided_json": ' + schema.encode())
        assert (await client.post(CHAT, content=body)).status_code == 400


async def test_a_result_made_of_parts_stays_one() -> None:
    async with served() as (cluster, client):
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        messages = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}, image()]},
        ]
        await answer(cluster, client, "It is sunny.", messages=messages, tools=TOOLS)
        assert "<tool_response>\nsunny<|image|>" in prompt_of(cluster)
