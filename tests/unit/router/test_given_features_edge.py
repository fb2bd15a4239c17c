"""Tests features that clients send in place of pictures (`image_embeds`): what encoders and workers get of them, and
what is refused before anything is dispatched."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest
from edge_client import served
from hypothesis import given, settings
from hypothesis import strategies as st
from router_chats import chat_body, image, text
from safetensors.numpy import save

from deploy.testing import FakeCluster, TinyFamily, settled
from fabric.contracts import InvalidMedia, InvalidRequest, WeftError, content_digest, frame
from modalities.family import HasLeastPixels, TakesFeatures
from modalities.media import MediaLimits
from router.api import MediaPart
from router.planning import ClusterState
from router.prompt.given_features import ImageEmbedsReader

CHAT = "/v1/chat/completions"
WIDTH = 8
ROWS = np.arange(3 * WIDTH, dtype=np.float32).reshape(3, WIDTH)


def encoded(*arrays: np.ndarray, **tensors: np.ndarray) -> str:
    return base64.b64encode(save({"a": arrays[0]} if arrays else tensors)).decode()


def features(value: object, **fields: object) -> dict[str, object]:
    return {"type": "image_embeds", "image_embeds": value, **fields}


async def asked(client: httpx.AsyncClient, *content: object, **fields: object) -> httpx.Response:
    return await client.post(CHAT, content=chat_body([*content, text("?")], **fields))


async def refusal(value: object, **settings: Any) -> dict[str, Any]:
    """Sends features that are to be refused, and returns the error. Nothing reaches a worker or an encoder."""
    async with served(takes_image_embeds=True, **settings) as (cluster, client):
        answer = await asked(client, text("see"), features(value))
        assert answer.status_code == 400, answer.text
        assert cluster.workers[0].requests == []
        assert cluster.encoders[0].requests == []
        error: dict[str, Any] = answer.json()["error"]
        assert error["param"] == "messages.0.content.1"
        return error


# ---------------------------------------------------------------- These tests cover features that are taken.


async def test_an_encoder_gets_the_features_and_a_worker_their_place() -> None:
    async with served(takes_image_embeds=True) as (cluster, client):
        assert (await asked(client, features(encoded(ROWS)))).status_code == 200
        (request,), (encode,) = cluster.workers[0].requests, cluster.encoders[0].requests
        (item,) = request.media
        assert (item.modality, item.work, item.unit_tokens, item.cost) == ("image", "given image", (3,), 1)
        assert (item.num_levels, item.options, item.decode_bytes) == (1, "", 0)
        assert encode.items == request.media
        assert cluster.encoders[0].media == [ROWS.tobytes()]
        assert [(run.length, run.item, run.row) for run in request.placeholders] == [(3, 0, 0)]


async def test_a_picture_and_features_are_two_pictures() -> None:
    async with served(takes_image_embeds=True) as (cluster, client):
        answer = await asked(client, image(1), features(encoded(ROWS)))
        picture, given_item = cluster.workers[0].requests[0].media
        assert (picture.is_given, given_item.is_given) == (False, True)
        tokens = answer.json()["usage"]["prompt_tokens_details"]["image_tokens"]
        assert tokens == picture.num_tokens + given_item.num_tokens
        five = [features(encoded(ROWS)) for _ in range(5)]
        refused = await asked(client, *five)
        assert refused.status_code == 400
        assert "at most 4 image items" in refused.json()["error"]["message"]


async def items_of(*contents: object, **fields: object) -> list[Any]:
    """Returns the item that each content becomes, in one cluster."""
    async with served(takes_image_embeds=True) as (cluster, client):
        for content in contents:
            answer = await asked(client, content, **fields)
            assert answer.status_code == 200, answer.text
        return [request.media[0] for request in cluster.workers[0].requests]


async def test_identity_is_that_of_the_content() -> None:
    other = ROWS.copy()
    other[0, 0] += 1
    grid = {"image_embeds": encoded(ROWS), "image_grid_thw": [1, 3, 1]}
    turned = grid | {"image_grid_thw": [[1, 1, 3]]}
    halves = encoded(ROWS.astype(np.float16))
    parts = [encoded(ROWS), halves, encoded(ROWS[None]), encoded(other), grid, turned]
    hashes = [item.mm_hash for item in await items_of(*map(features, parts))]
    assert hashes[0] == hashes[1] == hashes[2], "the same numbers of another dtype are the same content"
    assert len({hashes[0], hashes[3], hashes[4]}) == 3
    assert hashes[4] != hashes[5], "the grid decides where the tokens stand"
    (salted,) = await items_of(features(encoded(ROWS)), cache_salt="mine")
    assert salted.mm_hash not in hashes
    file = ImageEmbedsReader(TinyFamily(), "float32", is_enabled=True).read(part(encoded(ROWS)), MediaLimits())
    digests = {content_digest(file.data), content_digest(frame([file.data]))}
    assert file.digest not in digests, "no file of a picture may have the digest of features"


async def test_the_grid_may_be_a_list_or_a_tensor_of_its_own_or_in_the_file() -> None:
    grid = np.array([[1, 3, 1]], np.int64)
    forms = [
        {"image_embeds": encoded(ROWS), "image_grid_thw": [1, 3, 1]},
        {"image_embeds": encoded(ROWS), "image_grid_thw": [[1, 3, 1]]},
        {"image_embeds": encoded(ROWS), "image_grid_thw": encoded(grid)},
        {"image_embeds": encoded(ROWS), "image_grid_thw": encoded(grid[0].astype(np.int32))},
        {"image_embeds": encoded(image_embeds=ROWS, image_grid_thw=grid)},
        encoded(image_embeds=ROWS, image_grid_thw=grid),
    ]
    items = await items_of(*map(features, forms))
    assert {item.grid for item in items} == {(1, 3, 1)}
    assert len({item.mm_hash for item in items}) == 1


async def test_the_sizes_that_a_request_asks_for_do_not_change_features() -> None:
    (plain,) = await items_of(features(encoded(ROWS)))
    (limited,) = await items_of(features(encoded(ROWS)), mm_processor_kwargs={"max_pixels": 100})
    assert limited == plain


async def test_features_have_names_of_their_own() -> None:
    async with served(takes_image_embeds=True) as (cluster, client):
        assert (await asked(client, features(encoded(ROWS), uuid="cat"))).status_code == 200
        assert (await asked(client, features(None, uuid="cat"))).status_code == 200
        first, second = (request.media for request in cluster.workers[0].requests)
        assert first == second
        picture = {"type": "image_url", "image_url": {"url": ""}, "uuid": "cat"}
        refused = await asked(client, picture)
        assert "names no medium that this router keeps" in refused.json()["error"]["message"]


async def test_responses_take_features_too() -> None:
    async with served(takes_image_embeds=True) as (cluster, client):
        content = [{"type": "input_text", "text": "?"}, features(encoded(ROWS))]
        body = {"model": json.loads(chat_body("x"))["model"], "input": [{"role": "user", "content": content}]}
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        assert cluster.workers[0].requests[0].media[0].is_given


async def test_no_cost_is_learned_from_features(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[int] = []
    observe = ClusterState.observe_encode

    def noted(self: ClusterState, plan: Any, result: Any, now: float) -> None:
        learned.extend(item.index for item in result.items)
        observe(self, plan, result, now)

    monkeypatch.setattr(ClusterState, "observe_encode", noted)
    async with served(takes_image_embeds=True) as (cluster, client):
        await asked(client, features(encoded(ROWS)), image(1))
        await settled(lambda: cluster.service.admission.num_in_flight == 0)
    assert learned == [1]


# ---------------------------------------------------------------- These tests cover what is refused.


async def test_features_are_refused_unless_the_operator_takes_them() -> None:
    async with served() as (cluster, client):
        answer = await asked(client, features("not even base64"))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", "messages.0.content.0")
        assert "its operator turns them on with `media.image_embeds`" in error["message"]
        assert cluster.workers[0].requests == []


class PictureFamily(TinyFamily):
    """Takes no features."""

    plan_features = None
    least_features = property()


async def test_a_model_that_takes_none_refuses_them() -> None:
    bare = PictureFamily()
    assert not isinstance(bare, TakesFeatures | HasLeastPixels)
    reader = ImageEmbedsReader(bare, "float32", is_enabled=True)
    with pytest.raises(WeftError, match="takes no features as input") as caught:
        reader.check(part(encoded(ROWS)))
    assert caught.value.code == "unsupported_modality"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "must be base64 text of a file in the safetensors format"),
        (7, "must be base64 text of a file in the safetensors format"),
        ([], "must be base64 text of a file in the safetensors format"),
        ({}, "must be base64 text of a file in the safetensors format"),
        ({"image_embeds": {}}, "must be base64 text of a file in the safetensors format"),
        ({"url": encoded(ROWS)}, 'features have no field "url"'),
        ("", "must be base64 text of a file in the safetensors format"),
        ("%%%", "not valid base64"),
        (encoded(ROWS)[:-5], "not valid base64"),
        (encoded(ROWS)[:-8], "must be in the safetensors format"),
        (base64.b64encode(b"\x80\x04K\x01." + bytes(20)).decode(), "write them with safetensors.torch.save"),
        (base64.b64encode(b"PK\x03\x04" + bytes(20)).decode(), "write them with safetensors.torch.save"),
        (encoded(ROWS[:, :4]), "must have the shape (number of tokens, 8), not [3, 4]"),
        (encoded(ROWS.reshape(1, 24)), "must have the shape (number of tokens, 8), not [1, 24]"),
        (encoded(ROWS[:0]), "must have the shape (number of tokens, 8), not [0, 8]"),
        (encoded(np.zeros((65, 8), np.float32)), "at most 64"),
        (encoded(ROWS.astype(np.float64)), "must be one of F32, F16, BF16, not F64"),
        (encoded(ROWS.astype(np.int32)), "must be one of F32, F16, BF16, not I32"),
        (encoded(ROWS * np.nan), "some are NaN or infinite"),
        (encoded(ROWS + np.inf), "some are NaN or infinite"),
        (encoded(a=ROWS, b=ROWS), "must have one tensor, or tensors of the names"),
        (encoded(image_embeds=ROWS, more=ROWS), "must have one tensor, or tensors of the names"),
        ({"image_embeds": encoded(ROWS), "image_grid_thw": [1, 2, 2]}, "must have 3 patches"),
        ({"image_embeds": encoded(ROWS), "image_grid_thw": [3, 1]}, "`image_grid_thw` must hold 3 positive integers"),
        ({"image_embeds": encoded(ROWS), "image_grid_thw": [1, 3, 0]}, "must hold 3 positive integers"),
        ({"image_embeds": encoded(ROWS), "image_grid_thw": [1, 3, True]}, "must hold 3 positive integers"),
        ({"image_embeds": encoded(ROWS), "image_grid_thw": [1, 3, 1.0]}, "must hold 3 positive integers"),
        ({"image_embeds": encoded(ROWS), "image_grid_thw": [1, 3, 2**70]}, "must hold 3 positive integers"),
        ({"image_embeds": encoded(ROWS), "image_grid_thw": {"a": 1}}, "must hold 3 positive integers"),
        ({"image_embeds": encoded(ROWS), "image_grid_thw": encoded(ROWS)}, "must hold 3 positive integers"),
        ({"image_embeds": encoded(ROWS), "image_grid_thw": "AAAA"}, "must be in the safetensors format"),
        ({"image_embeds": encoded(ROWS), "image_sizes": [5]}, "`image_sizes` must hold 2 positive integers"),
    ],
)
async def test_what_is_wrong_with_features_is_said(value: object, words: str) -> None:
    assert words in (await refusal(value))["message"]


async def test_the_size_is_limited_before_anything_is_decoded() -> None:
    limits = MediaLimits(max_bytes_per_item=100)
    assert "more than the limit of 100" in (await refusal("!" * 200, media_limits=limits))["message"]
    whole = MediaLimits(max_bytes_per_item=len(base64.b64decode(encoded(ROWS))))
    async with served(takes_image_embeds=True, media_limits=whole) as (_, client):
        assert (await asked(client, features(encoded(ROWS)))).status_code == 200


async def test_features_have_no_detail() -> None:
    refused = await refusal({"image_embeds": encoded(ROWS), "detail": "high", "grid": 1})
    assert 'features have no field "grid"' in refused["message"]
    async with served(takes_image_embeds=True) as (_, client):
        answer = await asked(client, features({"image_embeds": encoded(ROWS), "detail": "low"}))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages.0.content.0.image_embeds.detail"


# ---------------------------------------------------------------- Random features are refused or taken, never worse.


def part(value: object) -> MediaPart:
    return MediaPart("image_embeds", {"type": "image_embeds", "image_embeds": value}, "messages.0.content.0")


READER = ImageEmbedsReader(TinyFamily(), "float32", is_enabled=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(encoded(ROWS)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries({}, optional={"image_embeds": JSON, "image_grid_thw": JSON, "image_sizes": JSON})
FILES = st.binary(max_size=150) | st.tuples(st.integers(0, 120), st.integers(0, 255)).map(
    lambda change: (
        base64.b64decode(encoded(ROWS))[: change[0]]
        + bytes([change[1]])
        + base64.b64decode(encoded(ROWS))[change[0] + 1 :]
    )
)


@settings(deadline=None, max_examples=1500)
@given(JSON | FIELDS | FILES.map(lambda data: base64.b64encode(data).decode()))
def test_whatever_is_sent_is_taken_or_refused(value: object) -> None:
    try:
        file = READER.read(part(value), MediaLimits())
    except (InvalidRequest, InvalidMedia) as error:
        refused = error.param
    else:
        refused = None
        found = np.frombuffer(file.data, np.float32)
        assert np.isfinite(found).all()
        assert len(found) == WIDTH * file.header.num_tokens
    assert refused in (None, "messages.0.content.0")


async def test_random_files_are_answered_400_and_the_cluster_stays() -> None:
    rng = np.random.default_rng(0)
    async with served(takes_image_embeds=True) as (cluster, client):
        statuses = set()
        for size in range(60):
            data = rng.bytes(size)
            answer = await asked(client, features(base64.b64encode(data).decode()))
            statuses.add(answer.status_code)
        assert statuses == {400}
        assert_untouched(cluster)
        assert (await asked(client, features(encoded(ROWS)))).status_code == 200


def assert_untouched(cluster: FakeCluster) -> None:
    assert [worker.requests for worker in cluster.workers] == [[] for _ in cluster.workers]
    assert [encoder.requests for encoder in cluster.encoders] == [[] for _ in cluster.encoders]
