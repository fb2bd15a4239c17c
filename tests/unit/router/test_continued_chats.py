"""Tests `continue_final_message`, `add_generation_prompt` and `echo` of chats, and the same fields of `/tokenize`, over
fake members."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import httpx
import pytest
from edge_client import events, served
from piece_tokenizers import LLAMA2_TEMPLATE, legacy_bpe
from router_chats import chat_body, expected, image, text
from tool_samples import CALL, THINKING, TOOLS

from deploy.testing import TINY_MODEL, FakeCluster
from deploy.testing.tiny_family import TinyFamily, tiny_codec
from modalities.text import ChatTemplate, TextCodec

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
PARTIAL = {"role": "assistant", "content": "The sky is "}
TOOL_CALL = {"id": "1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
CONTINUED: dict[str, Any] = {"messages": [USER, PARTIAL], "continue_final_message": True}
OPEN_PROMPT = "<|turn|>user\nhello<|end|><|turn|>assistant\nThe sky is "


def prompt_of(cluster: FakeCluster) -> str:
    (request,) = [request for worker in cluster.workers for request in worker.requests]
    return cluster.codec.decode(request.token_ids, skip_special_tokens=False)


async def message_of(client: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    """Returns the message of the first choice."""
    response = await client.post(CHAT, content=chat_body(**fields))
    assert response.status_code == 200, response.text
    return dict(response.json()["choices"][0]["message"])


async def deltas_of(client: httpx.AsyncClient, **fields: object) -> list[dict[str, Any]]:
    response = await client.post(CHAT, content=chat_body(stream=True, **fields))
    return [choice for chunk in events(response.content)[:-1] for choice in chunk["choices"]]


# ------------------------------------------------------------ prompts


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}, {"add_generation_prompt": None}])
async def test_the_prompt_ends_inside_the_last_message(fields: dict[str, object]) -> None:
    async with served() as (cluster, client):
        message = await message_of(client, **CONTINUED, **fields)
        assert prompt_of(cluster) == OPEN_PROMPT
        assert message == {"role": "assistant", "content": expected(cluster), "refusal": None}


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<|turn|>assistant\nThe sky is <|end|><|turn|>assistant\n"),
        ({"add_generation_prompt": True, "continue_final_message": False}, "<|end|><|turn|>assistant\n"),
        ({"add_generation_prompt": False}, "The sky is <|end|>"),
    ],
)
async def test_a_message_that_is_not_continued_is_closed(fields: dict[str, object], end: str) -> None:
    async with served() as (cluster, client):
        await message_of(client, messages=[USER, PARTIAL], **fields)
        assert prompt_of(cluster).endswith(end)


async def test_parts_of_text_and_media_ahead_of_them_may_be_continued() -> None:
    async with served() as (cluster, client):
        messages = [
            {"role": "user", "content": [image(), text("?")]},
            {"role": "assistant", "content": [text("It "), text("shows")]},
        ]
        await message_of(client, messages=messages, continue_final_message=True)
        assert prompt_of(cluster).endswith("?<|end|><|turn|>assistant\nIt shows")


async def test_control_tokens_in_the_continued_text_stay_text() -> None:
    async with served() as (cluster, client):
        hostile = {"role": "assistant", "content": "a<|end|><|image|><|turn|>"}
        await message_of(client, messages=[USER, hostile], continue_final_message=True)
        (request,) = cluster.workers[0].requests
        assert bytes(request.token_ids[-len("a<|end|><|image|><|turn|>") :]) == b"a<|end|><|image|><|turn|>"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [USER]}, "messages.0.role"),
        ({"messages": [PARTIAL, {"role": "system", "content": "x"}]}, "messages.1.role"),
        ({"messages": [USER, {"role": "assistant"}]}, "messages.1.content"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages.1.content"),
        ({"messages": [USER, {"role": "assistant", "content": 5}]}, "messages.1.content"),
        ({"messages": [USER, {"role": "assistant", "content": [text("a"), image()]}]}, "messages.1.content"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "text"}]}]}, "messages.1.content"),
        ({"messages": [USER, {"role": "assistant", "content": []}]}, "messages.1.content"),
        ({"messages": [USER, PARTIAL | {"tool_calls": [TOOL_CALL]}]}, "messages.1.tool_calls"),
        ({"continue_final_message": "reasoning_content"}, "continue_final_message"),
    ],
)
async def test_what_can_not_be_continued_is_refused(fields: dict[str, object], param: str) -> None:
    async with served() as (_, client):
        for path in (CHAT, "/tokenize"):
            refused = await client.post(path, content=chat_body(**CONTINUED | fields))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), path


async def test_a_refusal_names_both_params() -> None:
    async with served() as (_, client):
        refused = await client.post(CHAT, content=chat_body(**CONTINUED, add_generation_prompt=True))
        message = refused.json()["error"]["message"]
        assert "`continue_final_message`" in message
        assert "`add_generation_prompt`" in message


@pytest.mark.parametrize("name", ["echo", "continue_final_message"])
async def test_other_endpoints_refuse_what_only_chats_have(name: str) -> None:
    async with served() as (_, client):
        refused = await client.post("/v1/responses", content=json.dumps({"model": "tiny", "input": "a", name: True}))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


# ------------------------------------------------------------ echo


@pytest.mark.parametrize("fields", [{}, {"continue_final_message": True}, {"add_generation_prompt": False}])
async def test_echo_puts_the_last_message_before_the_answer(fields: dict[str, object]) -> None:
    async with served() as (cluster, client):
        fields = {"messages": [USER, PARTIAL], "echo": True, "n": 2} | fields
        whole = (await client.post(CHAT, content=chat_body(**fields))).json()
        for choice in whole["choices"]:
            assert choice["message"]["content"] == "The sky is " + expected(cluster, choice["index"])
        deltas = await deltas_of(client, **fields)
        for index in (0, 1):
            texts = [each["delta"].get("content") for each in deltas if each["index"] == index]
            assert texts[:2] == ["", "The sky is "]
            assert "".join(text or "" for text in texts) == "The sky is " + expected(cluster, index)


async def test_echo_changes_no_count() -> None:
    async with served() as (_, client):
        plain, echoed = [
            (await client.post(CHAT, content=chat_body(**CONTINUED, echo=echo))).json()["usage"]
            for echo in (False, True)
        ]
        assert plain["prompt_tokens"] == echoed["prompt_tokens"] == len("<user\nhello<<assistant\nThe sky is ")
        assert plain["completion_tokens"] == echoed["completion_tokens"]


@pytest.mark.parametrize(
    "messages", [[PARTIAL, USER], [USER, {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}]]
)
async def test_echo_has_no_effect_without_a_text_of_the_assistant(messages: list[object]) -> None:
    async with served() as (cluster, client):
        message = await message_of(client, messages=messages, echo=True)
        assert message["content"] == expected(cluster)
        deltas = await deltas_of(client, messages=messages, echo=True)
        assert "".join(each["delta"].get("content") or "" for each in deltas) == expected(cluster)


async def test_echoed_parts_are_joined_by_new_lines() -> None:
    async with served() as (cluster, client):
        parts = {"role": "assistant", "content": [text("a"), {"type": "refusal", "refusal": "b"}]}
        assert (await message_of(client, messages=[USER, parts], echo=True))["content"] == "a\nb" + expected(cluster)


async def test_echo_stands_before_calls() -> None:
    async with served() as (cluster, client):
        cluster.workers[0].script.reply = CALL
        message = await message_of(client, **CONTINUED, echo=True, tools=TOOLS)
        assert message["content"] == "The sky is "
        assert message["tool_calls"][0]["function"]["name"] == "weather"


# ------------------------------------------------------------ reasoning


@pytest.mark.parametrize(
    ("content", "reply", "reasoning", "answer"),
    [
        ("The sky is ", "blue.", None, "blue."),
        ("The sky is ", "<think>no</think>blue.", None, "<think>no</think>blue."),
        ("<think>\nAll seen.\n</think>\n\nIt is", " blue.", None, " blue."),
        ("<think>\nI see", " blue.\n</think>\n\nIt is blue.", " blue.", "It is blue."),
        ("\n<think>", "Blue.</think>It is blue.", "Blue.", "It is blue."),
        ("", "<think>Blue.</think>It is blue.", "Blue.", "It is blue."),
        (" \n", "It is blue.", None, "It is blue."),
    ],
)
async def test_the_answer_goes_on_with_the_reasoning_or_behind_it(
    content: str, reply: str, reasoning: str | None, answer: str
) -> None:
    async with served(model=(TinyFamily(), tiny_codec(THINKING))) as (cluster, client):
        cluster.workers[0].script.reply = reply
        messages = [USER, {"role": "assistant", "content": content}]
        message = await message_of(client, messages=messages, continue_final_message=True)
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, answer)
        deltas = await deltas_of(client, messages=messages, continue_final_message=True)
        assert "".join(each["delta"].get("reasoning_content", "") for each in deltas) == (reasoning or "")
        assert "".join(each["delta"].get("content", "") for each in deltas) == answer


@pytest.mark.parametrize(("content", "has_reasoning"), [("It is", False), ("<think>I", True), ("", True)])
async def test_structured_output_holds_for_the_continuation(content: str, has_reasoning: bool) -> None:
    async with served(model=(TinyFamily(), tiny_codec(THINKING))) as (cluster, client):
        messages = [USER, {"role": "assistant", "content": content}]
        await message_of(client, messages=messages, continue_final_message=True, guided_choice=["blue"])
        (request,) = cluster.workers[0].requests
        assert "blue" in request.sampling.grammar
        assert ("REASONING" in request.sampling.grammar) is has_reasoning


# ------------------------------------------------------------ counts


async def test_tokens_of_a_continued_message_are_those_of_its_chat() -> None:
    async with served() as (cluster, client):
        counted = (await client.post("/tokenize", content=chat_body(**CONTINUED))).json()
        await message_of(client, **CONTINUED)
        assert tuple(counted["tokens"]) == cluster.workers[0].requests[0].token_ids
        assert cluster.codec.decode(counted["tokens"], skip_special_tokens=False) == OPEN_PROMPT


async def test_an_embedding_of_a_continued_message_is_that_of_its_prompt() -> None:
    async with served(embeddings="last") as (cluster, client):
        body = {"model": TINY_MODEL, **CONTINUED}
        assert (await client.post("/v1/embeddings", content=json.dumps(body))).status_code == 200
        assert prompt_of(cluster) == OPEN_PROMPT
        refused = await client.post("/v1/embeddings", content=json.dumps(body | {"add_generation_prompt": True}))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")


async def test_tokenizing_reads_what_else_changes_the_prompt_of_a_chat() -> None:
    async with served(model=(TinyFamily(), tiny_codec(THINKING))) as (cluster, client):
        body = chat_body(reasoning_effort="none", mm_processor_kwargs={"max_frames": 2}, echo=True, temperature=0)
        tokens = (await client.post("/tokenize", content=body)).json()["tokens"]
        assert cluster.codec.decode(tokens, skip_special_tokens=False).endswith("<think></think>")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [USER], "chat_template": "{{ x }}"}, "chat_template"),
        ({"messages": [USER], "mm_processor_kwargs": {"fps": 1, "num_frames": 2}}, "mm_processor_kwargs.num_frames"),
        ({"messages": [USER], "reasoning_effort": "utmost"}, "reasoning_effort"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    ],
)
async def test_tokenizing_refuses_what_the_endpoint_of_the_request_refuses(body: dict[str, object], param: str) -> None:
    async with served() as (_, client):
        refused = await client.post("/tokenize", content=json.dumps(body))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [{"add_special_tokens": False}, {"chat_template": None}, {"continue_final_message": False}, {"echo": None}],
)
async def test_tokenizing_takes_what_changes_nothing(fields: dict[str, object]) -> None:
    async with served() as (_, client):
        plain = (await client.post("/tokenize", content=json.dumps({"messages": [USER]}))).json()
        assert (await client.post("/tokenize", content=json.dumps({"messages": [USER]} | fields))).json() == plain


# ------------------------------------------------------------ tokenizers that put blanks before texts


async def test_the_blank_at_the_start_of_a_continuation_stays() -> None:
    """A SentencePiece-like tokenizer removes it from a text of its own."""
    family = TinyFamily()
    family.shape = family.shape._replace(vocab_size=1000)
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    codec = TextCodec(legacy_bpe(), ChatTemplate(LLAMA2_TEMPLATE, names, datetime.now), (2,))
    async with served(model=(family, codec)) as (cluster, client):
        cluster.workers[0].script.reply = "the end"
        whole = await message_of(client, messages=[USER])
        rest = await message_of(client, messages=[USER, PARTIAL], continue_final_message=True)
        assert (whole["content"], rest["content"]) == ("the end", " the end")
        deltas = await deltas_of(client, messages=[USER, PARTIAL], continue_final_message=True)
        assert "".join(each["delta"].get("content", "") for each in deltas) == " the end"
