"""Checks what OpenAI's Python library reads of a model that reasons, whole and streamed: the reasoning, the answer and
calls of tools. The library talks to a real socket; the members behind the router are fakes."""

from __future__ import annotations

from typing import Any

import pytest
from sdk_serving import serving
from tool_samples import CALL, THINKING, TOOLS

from deploy.testing import TINY_MODEL
from deploy.testing.tiny_family import TinyFamily, tiny_codec

ASKED: list[Any] = [{"role": "user", "content": "How many?"}]
SETTINGS: dict[str, Any] = {"model": (TinyFamily(), tiny_codec(THINKING))}
FIELDS: dict[str, Any] = {"model": TINY_MODEL, "messages": ASKED}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_reasoning_of_a_chat_is_a_field_of_its_own(is_streamed: bool) -> None:
    async with serving(**SETTINGS) as (cluster, client):
        cluster.workers[0].script.reply = "One and one.\nSo two.\n</think>\n\nTwo."
        if is_streamed:
            async with client.chat.completions.stream(**FIELDS) as stream:
                answer: Any = await stream.get_final_completion()
        else:
            answer = await client.chat.completions.create(**FIELDS)
        message = answer.choices[0].message
        assert message.reasoning_content == "One and one.\nSo two."
        assert message.content == "Two."


async def test_the_reasoning_can_be_left_out_and_turned_off() -> None:
    async with serving(**SETTINGS) as (cluster, client):
        cluster.workers[0].script.reply = "So two.\n</think>\n\nTwo."
        hidden = await client.chat.completions.create(**FIELDS, extra_body={"include_reasoning": False})
        assert hidden.choices[0].message.content == "Two."
        assert "reasoning_content" not in (hidden.choices[0].message.model_extra or {})
        cluster.workers[0].script.reply = "Two."
        direct = await client.chat.completions.create(**FIELDS, reasoning_effort="none")
        assert direct.choices[0].message.content == "Two."


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_call_follows_the_reasoning(is_streamed: bool) -> None:
    async with serving(**SETTINGS) as (cluster, client):
        cluster.workers[0].script.reply = f"I ask.\n</think>\n\n{CALL}"
        fields: dict[str, Any] = FIELDS | {"tools": TOOLS, "tool_choice": "required"}
        if is_streamed:
            async with client.chat.completions.stream(**fields) as stream:
                choice: Any = (await stream.get_final_completion()).choices[0]
        else:
            choice = (await client.chat.completions.create(**fields)).choices[0]
        assert choice.message.reasoning_content == "I ask."
        assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
        assert choice.finish_reason == "tool_calls"


async def test_a_response_has_the_reasoning_as_an_item() -> None:
    async with serving(**SETTINGS) as (cluster, client):
        cluster.workers[0].script.reply = "So two.\n</think>\n\nTwo."
        whole = await client.responses.create(model=TINY_MODEL, input="How many?")
        async with client.responses.stream(model=TINY_MODEL, input="How many?") as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        for answer in (whole, streamed):
            assert [item.type for item in answer.output] == ["reasoning", "message"]
            assert [part.text for part in answer.output[0].content] == ["So two."]
            assert answer.output_text == "Two."
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == "So two."
