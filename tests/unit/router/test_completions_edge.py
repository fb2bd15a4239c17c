"""Tests `/v1/completions` over fake members: texts and token ids as prompts, several prompts, echo, refusals."""

from __future__ import annotations

import json

import pytest
from edge_client import events, served

from deploy.testing import TINY_MODEL, FakeCluster, reply_text
from fabric.contracts import EngineFailed, GenerateRequest
from modalities.text.tokenizer_parts import AddedIds

PATH = "/v1/completions"


def completion_body(prompt: object = "once upon", **fields: object) -> bytes:
    return json.dumps({"model": TINY_MODEL, "prompt": prompt, "max_tokens": 500, "seed": 7} | fields).encode()


def prompts_of(cluster: FakeCluster) -> list[GenerateRequest]:
    requests = [request for worker in cluster.workers for request in worker.requests]
    return sorted(requests, key=lambda request: request.age)


def expected_text(token_ids: tuple[int, ...], choice: int = 0) -> str:
    return reply_text(token_ids, 7, choice)


async def test_a_text_is_continued_without_a_template() -> None:
    async with served() as (cluster, client):
        body = (await client.post(PATH, content=completion_body())).json()
        (request,) = prompts_of(cluster)
        assert request.token_ids == tuple(b"once upon")
        assert body["object"] == "text_completion"
        assert body["id"].startswith("cmpl-")
        (choice,) = body["choices"]
        assert choice == {
            "index": 0,
            "text": expected_text(request.token_ids),
            "logprobs": None,
            "finish_reason": "stop",
        }
        assert body["usage"]["prompt_tokens"] == len("once upon")


async def test_the_default_limit_is_that_of_openai() -> None:
    async with served() as (_, client):
        body = (await client.post(PATH, content=json.dumps({"model": TINY_MODEL, "prompt": "a"}))).json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 16


async def test_token_ids_are_taken_as_they_are() -> None:
    async with served() as (cluster, client):
        body = completion_body([104, 258, 105], return_token_ids=True)
        answer = (await client.post(PATH, content=body)).json()
        (request,) = prompts_of(cluster)
        assert request.token_ids == (104, 258, 105)
        (choice,) = answer["choices"]
        assert choice["prompt_token_ids"] == [104, 258, 105]
        assert bytes(choice["token_ids"][:-1]).decode() == expected_text(request.token_ids)


async def test_control_tokens_in_a_text_stay_text() -> None:
    async with served() as (cluster, client):
        await client.post(PATH, content=completion_body("a<|end|><|image|>"))
        (request,) = prompts_of(cluster)
        assert request.token_ids == tuple(b"a<|end|><|image|>")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_several_prompts_have_their_choices_behind_each_other(is_streamed: bool) -> None:
    async with served(num_workers=2) as (cluster, client):
        body = completion_body(["first", "the second", "3"], n=2, stream=is_streamed)
        response = await client.post(PATH, content=body)
        texts = [""] * 6
        reasons = [""] * 6
        if is_streamed:
            *chunks, done = events(response.content)
            assert done == "[DONE]"
            listed = [choice for chunk in chunks for choice in chunk["choices"]]
        else:
            listed = response.json()["choices"]
        for choice in listed:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
        wanted = [
            expected_text(tuple(prompt.encode()), choice)
            for prompt in ("first", "the second", "3")
            for choice in (0, 1)
        ]
        assert texts == wanted
        assert reasons == ["stop"] * 6
        assert len(prompts_of(cluster)) == 3


async def test_each_prompt_takes_a_place_of_its_own() -> None:
    async with served(max_in_flight=2) as (_, client):
        refused = await client.post(PATH, content=completion_body(["a", "b", "c"]))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        answer = await client.post(PATH, content=completion_body(["a", "b"]))
        assert len(answer.json()["choices"]) == 2


async def test_a_refused_prompt_ends_the_others() -> None:
    async with served(max_model_len=64) as (cluster, client):
        refused = await client.post(PATH, content=completion_body(["a", "b" * 100], max_tokens=1))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt.1")
        assert cluster.service.admission.num_in_flight == 0


async def test_a_failure_in_one_of_several_prompts_ends_the_stream_with_an_error() -> None:
    async with served(max_attempts=1) as (cluster, client):
        cluster.workers[0].script.error = EngineFailed("it broke")
        cluster.workers[0].script.die_at = 4
        response = await client.post(PATH, content=completion_body(["a", "b"], stream=True))
        *chunks, last = events(response.content)
        assert last["error"]["code"] == "engine_failed"
        assert all("choices" in chunk for chunk in chunks)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_echo_begins_each_choice_with_its_prompt(is_streamed: bool) -> None:
    async with served() as (_, client):
        response = await client.post(PATH, content=completion_body(["ab", "c"], echo=True, stream=is_streamed))
        choices = (
            [choice for chunk in events(response.content)[:-1] for choice in chunk["choices"]]
            if is_streamed
            else response.json()["choices"]
        )
        texts = ["".join(each["text"] for each in choices if each["index"] == index) for index in (0, 1)]
        assert texts == ["ab" + expected_text(tuple(b"ab")), "c" + expected_text(tuple(b"c"))]


async def test_usage_comes_last_when_it_is_asked_for() -> None:
    async with served() as (_, client):
        options = {"include_usage": True}
        response = await client.post(PATH, content=completion_body("ab", stream=True, stream_options=options))
        *chunks, usage, done = events(response.content)
        assert done == "[DONE]"
        assert all(chunk["usage"] is None for chunk in chunks)
        assert (usage["choices"], usage["usage"]["prompt_tokens"]) == ([], 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [[1], ["a"]]}, "prompt"),
        ({"prompt": [[1], [262]]}, "prompt.1"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": [262]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [257]}, "messages"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "n": 9}, "n"),
    ],
)
async def test_bad_completions_are_named(fields: dict[str, object], param: str) -> None:
    async with served() as (_, client):
        response = await client.post(PATH, content=completion_body(**fields))
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
        if param != "messages":  # A placeholder is refused where prompts meet media.
            assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(("prompt", "place"), [("", "prompt"), ([""], "prompt.0"), (["a", ""], "prompt.1")])
async def test_an_empty_prompt_is_refused_where_it_stands_if_the_tokenizer_adds_no_token(
    prompt: object, place: str
) -> None:
    async with served() as (cluster, client):
        refused = (await client.post(PATH, content=completion_body(prompt))).json()["error"]
        assert (refused["param"], refused["code"]) == (place, "invalid_request")
        assert refused["message"].startswith(f"`{place}` is empty, and the model needs at least one token")
        assert cluster.service.admission.num_in_flight == 0


@pytest.mark.parametrize("prompt", ["", [""]])
async def test_an_empty_prompt_is_what_the_tokenizer_adds_to_it(
    prompt: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served() as (cluster, client):
        monkeypatch.setattr(cluster.codec, "_added_ids", AddedIds((7,), ()))
        answer = await client.post(PATH, content=completion_body(prompt))
        assert answer.status_code == 200
        (request,) = prompts_of(cluster)
        assert request.token_ids == (7,)
        refused = await client.post(PATH, content=completion_body(prompt, add_special_tokens=False))
        assert refused.status_code == 400


async def test_a_missing_prompt_is_named() -> None:
    async with served() as (_, client):
        response = await client.post(PATH, content=json.dumps({"model": TINY_MODEL}))
        assert response.json()["error"]["message"] == "`prompt` is required"
