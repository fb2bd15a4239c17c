"""Drives a served demo model with OpenAI's own Python library, as its users do: blocking and asynchronous, whole and
streamed. What the library returns are its own types, so an answer that it can't read fails here."""

from __future__ import annotations

import asyncio
import json
from itertools import groupby
from typing import Any, Literal

import jsonschema
import openai
import pytest
from client_questions import media_question
from cluster_process import ClusterProcess
from pydantic import BaseModel

from deploy.demo.tasks.words import HELLO

pytestmark = pytest.mark.torch

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
UNIT = {
    "type": "object",
    "properties": {"unit": {"enum": ["second", "hour"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
NAME_TO_SCHEMA = {"weather": CITY, "clock": UNIT}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"Asks the {name}.", "parameters": schema}}
    for name, schema in NAME_TO_SCHEMA.items()
]
FLAT_TOOLS: list[Any] = [{"type": "function", "strict": True} | tool["function"] for tool in TOOLS]
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
GREETING: list[Any] = [{"role": "user", "content": "Hello"}]
CALLING: dict[str, Any] = {"messages": ASKED, "tools": TOOLS, "max_tokens": 400, "parallel_tool_calls": False}


class Seen(BaseModel):
    shape: Literal["circle", "square", "triangle", "star"]
    count: Literal[1, 2, 3]


def misfits(calls: Any) -> list[str]:
    """Returns what the arguments of calls violate in the schemas of their tools."""
    flaws = []
    for call in calls:
        validator = jsonschema.Draft202012Validator(NAME_TO_SCHEMA[call.function.name])
        flaws += [error.message for error in validator.iter_errors(json.loads(call.function.arguments))]
    return flaws


# ------------------------------------------------------------ chat


def test_a_chat_is_the_same_whole_streamed_and_by_the_stream_helper(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "weft-demo", "messages": GREETING, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.content == HELLO
    assert whole.choices[0].finish_reason == "stop"
    assert whole._request_id
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    with client.chat.completions.stream(**fields) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == HELLO
    assert len({chunk.id for chunk in chunks}) == 1


def test_choices_and_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="weft-demo", messages=GREETING, n=3, logprobs=True, top_logprobs=2, max_tokens=6, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in choice.logprobs.content)


def test_parse_returns_an_object_of_the_callers_class(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "weft-demo", "messages": GREETING, "max_tokens": 300}
    message = client.chat.completions.parse(**fields, response_format=Seen).choices[0].message
    assert isinstance(message.parsed, Seen)
    with client.chat.completions.stream(**fields, response_format=Seen) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Seen)


def test_many_asynchronous_streams_at_once(served: ClusterProcess) -> None:
    async def ask(made: openai.AsyncOpenAI) -> str:
        async with made.chat.completions.stream(model="weft-demo", messages=GREETING, temperature=0) as stream:
            return (await stream.get_final_completion()).choices[0].message.content or ""

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
            return await asyncio.gather(*(ask(made) for _ in range(16)))

    assert asyncio.run(ask_all()) == [HELLO] * 16


# ------------------------------------------------------------ tools


@pytest.mark.parametrize("seed", range(4))
def test_demanded_calls_fit_their_schemas(client: openai.OpenAI, seed: int) -> None:
    whole = client.chat.completions.create(model="weft-demo", tool_choice="required", seed=seed, **CALLING)
    calls = whole.choices[0].message.tool_calls or []
    assert whole.choices[0].finish_reason == "tool_calls"
    assert len(calls) == 1
    assert misfits(calls) == []


@pytest.mark.parametrize("name", NAME_TO_SCHEMA)
def test_a_named_tool_is_the_one_that_is_called(client: openai.OpenAI, name: str) -> None:
    choice: Any = {"type": "function", "function": {"name": name}}
    fields = CALLING | {"temperature": 0, "tool_choice": choice}
    answer = client.chat.completions.create(model="weft-demo", **fields)
    whole: Any = answer.choices[0].message.tool_calls
    assert [call.function.name for call in whole] == [name]
    assert misfits(whole) == []
    with client.chat.completions.stream(model="weft-demo", **fields) as stream:
        joined: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert [call.function.name for call in joined] == [name]
    assert [call.function.arguments for call in joined] == [call.function.arguments for call in whole]


def test_the_model_may_choose_to_answer_in_words(client: openai.OpenAI) -> None:
    for tool_choice in ("auto", openai.omit):
        answer = client.chat.completions.create(model="weft-demo", tool_choice=tool_choice, temperature=0, **CALLING)
        message = answer.choices[0].message
        assert message.content or misfits(message.tool_calls) == []


def test_no_tool_is_called_where_none_may_be(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="weft-demo", tool_choice="none", **CALLING)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_the_library_joins_streamed_calls(client: openai.OpenAI) -> None:
    fields = CALLING | {"temperature": 0}
    whole = client.chat.completions.create(model="weft-demo", tool_choice="required", **fields)
    with client.chat.completions.stream(model="weft-demo", tool_choice="required", **fields) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    calls: Any = message.tool_calls
    before: Any = whole.choices[0].message.tool_calls
    assert [event.name for event in done] == [call.function.name for call in calls]
    assert [call.function.arguments for call in calls] == [call.function.arguments for call in before]
    assert misfits(calls) == []


def test_parallel_calls_are_joined_each_with_its_own_arguments(client: openai.OpenAI) -> None:
    fields = CALLING | {"parallel_tool_calls": True, "tool_choice": "required"}
    nums_calls = []
    for seed in range(4):
        with client.chat.completions.stream(model="weft-demo", seed=seed, **fields) as stream:
            choice = stream.get_final_completion().choices[0]
        calls: Any = choice.message.tool_calls
        whole = calls if choice.finish_reason == "tool_calls" else calls[:-1]  # The limit of tokens cuts the last one.
        assert misfits(whole) == []
        assert len({call.id for call in calls}) == len(calls)
        nums_calls.append(len(whole))
    assert max(nums_calls) >= 2


def test_a_result_of_a_tool_goes_back_with_the_call(client: openai.OpenAI) -> None:
    """The library's own message object is what users send back."""
    first = client.chat.completions.create(model="weft-demo", tool_choice="required", **CALLING)
    calls: Any = first.choices[0].message.tool_calls
    history = [
        *ASKED,
        first.choices[0].message,
        *({"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls),
    ]
    second = client.chat.completions.create(model="weft-demo", messages=history, tools=TOOLS, max_tokens=20)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.choices[0].message.content


# ------------------------------------------------------------ completions


def test_completions_of_several_prompts_with_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="weft-demo", prompt=["The red", "A blue"], echo=True, logprobs=2, max_tokens=4, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("The red")
    assert answer.choices[1].text.startswith("A blue")
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert "".join(choice.logprobs.tokens or ()).removesuffix("<|im_end|>") == choice.text
    chunks = client.completions.create(model="weft-demo", prompt="The red", max_tokens=4, temperature=0, stream=True)
    assert "The red" + "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


# ------------------------------------------------------------ responses


def test_a_response_is_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="weft-demo", input="Hello", temperature=0)
    assert whole.output_text == HELLO
    with client.responses.stream(model="weft-demo", input="Hello", temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == HELLO
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


EVENTS_OF_A_TEXT = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]
EVENTS_OF_A_CALL = [
    *EVENTS_OF_A_TEXT[:3],
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    *EVENTS_OF_A_TEXT[-2:],
]


def test_the_events_of_a_response_come_in_openais_order(client: openai.OpenAI) -> None:
    plain = client.responses.create(model="weft-demo", input="Hello", temperature=0, stream=True)
    calling = client.responses.create(
        model="weft-demo",
        input="How is the weather in Rome?",
        tools=FLAT_TOOLS,
        tool_choice={"type": "function", "name": "clock"},
        parallel_tool_calls=False,
        max_output_tokens=400,
        stream=True,
    )
    for stream, wanted in ((plain, EVENTS_OF_A_TEXT), (calling, EVENTS_OF_A_CALL)):
        events = list(stream)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [kind for kind, _ in groupby(event.type for event in events)] == wanted
    (call,) = events[-1].response.output
    assert call.name == "clock"
    jsonschema.validate(json.loads(call.arguments), UNIT)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments


def test_a_response_about_a_picture(client: openai.OpenAI) -> None:
    asked, right = media_question("image")
    content = []
    for part in asked[-1]["content"]:
        if part["type"] == "text":
            content.append({"type": "input_text", "text": part["text"]})
        else:
            content.append({"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"})
    items: Any = [{"role": "user", "content": content}]
    assert client.responses.create(model="weft-demo", input=items, temperature=0).output_text == right


def test_items_of_a_response_are_sent_back_with_the_result_of_a_tool(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": FLAT_TOOLS, "max_output_tokens": 400, "parallel_tool_calls": False}
    items: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
    first = client.responses.create(model="weft-demo", input=items, tool_choice="required", **fields)
    calls = [item for item in first.output if item.type == "function_call"]
    assert len(calls) == 1
    jsonschema.validate(json.loads(calls[0].arguments), NAME_TO_SCHEMA[calls[0].name])
    items += first.output
    items.append({"type": "function_call_output", "call_id": calls[0].call_id, "output": "sunny"})
    second = client.responses.create(model="weft-demo", input=items, tool_choice="none", **fields)
    assert second.output_text
    with client.responses.stream(model="weft-demo", input=items[:1], tool_choice="required", **fields) as stream:
        (call,) = [item for item in stream.get_final_response().output if item.type == "function_call"]
    jsonschema.validate(json.loads(call.arguments), NAME_TO_SCHEMA[call.name])


def test_a_response_is_parsed_into_the_callers_class(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model="weft-demo", input="Hello", text_format=Seen, max_output_tokens=300)
    assert isinstance(answer.output_parsed, Seen)


# ------------------------------------------------------------ embeddings, models, tokens


def test_embeddings_are_the_same_in_both_encodings(client: openai.OpenAI) -> None:
    """The library asks for base64 unless it is told otherwise, and decodes it."""
    texts = ["A red circle", "A blue square"]
    packed = client.embeddings.create(model="weft-demo", input=texts)
    plain = client.embeddings.create(model="weft-demo", input=texts, encoding_format="float")
    assert [each.index for each in packed.data] == [0, 1]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
    assert packed.data[0].embedding != packed.data[1].embedding


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["weft-demo"]
    assert client.models.retrieve("weft-demo").id == "weft-demo"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


# ------------------------------------------------------------ errors


def test_the_class_of_the_status_is_raised_whole_and_streamed(client: openai.OpenAI) -> None:
    for is_streamed in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="weft-demo", messages=GREETING, temperature=9, stream=is_streamed)
        assert (refused.value.code, refused.value.param) == ("invalid_request", "temperature")
        with pytest.raises(openai.NotFoundError) as missing:
            client.responses.create(model="other", input="Hello", stream=is_streamed)
        assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="weft-demo", prompt="word " * 20_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="/v1"):
        client.with_options(base_url=str(client.base_url).removesuffix("v1/")).models.list()
