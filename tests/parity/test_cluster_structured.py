"""Tests structured output through the whole cluster, with an untrained model at temperature 1. Although the model
itself would generate anything, every output parses, validates, matches or is one of the choices."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest
from chat_media import image_part, user
from cluster_in_process import ask, body, serving

from fabric.contracts import GenerateRequest, GenerateResult, MemberId, WorkerLost

pytestmark = pytest.mark.torch
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", "🙂"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "x": {"type": "boolean"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}
CODE = r"(foo|bär)-[0-9]{2,4}( ok)?"
CHOICES = ["yes", "no", "yes, but", "ja – grüß Gott", 'a "quoted"\\ one\n']


def as_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def is_person(text: str) -> None:
    jsonschema.validate(json.loads(text), PERSON)


def is_code(text: str) -> None:
    assert re.fullmatch(CODE, text), text


def is_choice(text: str) -> None:
    assert text in CHOICES, text


WAYS = [
    ({"response_format": as_schema(PERSON)}, is_person),
    ({"structured_outputs": {"json": PERSON}}, is_person),
    ({"guided_json": json.dumps(PERSON)}, is_person),
    ({"structured_outputs": {"regex": CODE}}, is_code),
    ({"guided_regex": f"^{CODE}$"}, is_code),
    ({"structured_outputs": {"choice": CHOICES}}, is_choice),
    ({"guided_choice": CHOICES}, is_choice),
]


def texts(answer: dict[str, Any]) -> list[str]:
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    return [choice["message"]["content"] for choice in answer["choices"]]


@pytest.mark.parametrize(
    "workers", [{}, {"max_step_tokens": 7}, {"max_step_tokens": 24, "prefix_cache": False}], ids=str
)
async def test_every_answer_is_what_was_asked_for(workers: dict[str, Any]) -> None:
    """Runs all kinds of grammars at once with requests that have no grammar: the mask of one row must not affect
    another."""
    async with serving(**workers) as (_, client):
        free = {"temperature": 0, "max_tokens": 8}
        alone = texts_of_any(await ask(client, **free))

        async def constrained(index: int, fields: dict[str, Any], check: Any) -> list[str]:
            answer = await ask(client, max_tokens=400, seed=index, n=2, temperature=1, **fields)
            for text in texts(answer):
                check(text)
            return texts(answer)

        calls = [constrained(index, fields, check) for index in range(2) for fields, check in WAYS]
        *made, beside = await asyncio.gather(*calls, ask(client, **free))
        assert texts_of_any(beside) == alone
        assert len({text for each in made for text in each}) > len(WAYS), "the seeds draw different answers"


def texts_of_any(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


async def test_a_json_object_of_any_shape() -> None:
    """Raises the probability of quotes and braces, because an untrained model hardly ever closes a string without
    that."""
    async with serving() as (cluster, client):
        bias = {str(cluster.router._codec.encode(closing)[0]): 7 for closing in '"}]'}
        form = {"response_format": {"type": "json_object"}, "logit_bias": bias, "max_tokens": 120}
        answers = await asyncio.gather(*[ask(client, seed=seed, **form) for seed in range(6)])
        complete = [answer for answer in answers if answer["choices"][0]["finish_reason"] == "stop"]
        assert complete, "of these seeds some come to an end"
        made = [json.loads(texts(answer)[0]) for answer in complete]
        assert {type(each) for each in made} == {dict}
        assert any(made), "and some have content"


async def test_pictures_streams_stops_and_the_length_limit() -> None:
    async with serving(max_step_tokens=32) as (_, client):
        seen = await ask(client, messages=user("Who is it?", image_part(3)), max_tokens=400, guided_json=PERSON)
        is_person(texts(seen)[0])
        response = await client.post("/v1/chat/completions", json=body(stream=True, guided_json=PERSON, max_tokens=400))
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        is_person("".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines))
        cut = (await ask(client, guided_json=PERSON, max_tokens=5))["choices"][0]
        assert (cut["finish_reason"], len(cut["token_ids"])) == ("length", 5)
        forced = await ask(client, guided_choice=["no"], logit_bias={"20": 100}, min_tokens=30, max_tokens=40)
        assert texts(forced) == ["no"]


async def test_preemption_does_not_lose_the_place_in_the_grammar() -> None:
    """Uses so few blocks that sequences are preempted again and again."""
    async with serving(num_blocks=34, block_size=8, prefix_cache=False, max_step_tokens=48) as (cluster, client):
        calls = [ask(client, seed=seed, max_tokens=60, guided_regex="([a-z]{4}-){8}end") for seed in range(10)]
        small = await asyncio.gather(*calls)
        (worker,) = cluster.workers.services.values()
        assert worker.report().engine.num_preemptions > 0
    async with serving(num_blocks=256) as (_, client):
        calls = [ask(client, seed=seed, max_tokens=60, guided_regex="([a-z]{4}-){8}end") for seed in range(10)]
        large = await asyncio.gather(*calls)
    for one, other in zip(small, large, strict=True):
        assert re.fullmatch("([a-z]{4}-){8}end", texts(one)[0])
        assert one["choices"][0]["token_ids"] == other["choices"][0]["token_ids"]


async def test_another_worker_goes_on_where_the_lost_one_was() -> None:
    """The second attempt receives the tokens that were sent, and follows the grammar from there."""
    async with serving(replicas=2) as (cluster, client):
        fields = {"guided_json": PERSON, "max_tokens": 400, "seed": 11, "presence_penalty": 0.5, "logprobs": True}
        whole = await ask(client, **fields)
        generate, told = cluster.workers.generate, []

        async def lossy(worker_id: MemberId, request: GenerateRequest) -> GenerateResult:
            """Loses the first attempt after some tokens were sent."""
            if request.attempt:
                told.append(request.emitted[0])
                return await generate(worker_id, request)
            call = asyncio.ensure_future(generate(worker_id, request))
            output = cluster.router._runs[request.request_id].stream.choices[0]
            while output.num_tokens < 5:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.001)
            call.cancel()
            raise WorkerLost("for the test")

        cluster.workers.generate = lossy
        again = await ask(client, **fields)
        assert len(told[0]) >= 5
        assert list(told[0]) == whole["choices"][0]["token_ids"][: len(told[0])]
        assert again["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
        assert len(again["choices"][0]["logprobs"]["content"]) == len(again["choices"][0]["token_ids"])
        is_person(texts(again)[0])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": as_schema({"not": {"type": "string"}})}, "response_format.json_schema.schema", "not"),
        ({"guided_json": {"type": "fish"}}, "guided_json", "fish"),
        ({"guided_json": {"$ref": "http://example.com/x"}}, "guided_json", "example.com"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "not supported"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    async with serving() as (_, client):
        response = await client.post("/v1/chat/completions", json=body(**fields))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert words in error["message"]
