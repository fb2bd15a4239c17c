"""Tests the functions that make the input of the next stage of speech."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fabric.contracts import MemberId, RequestId, StageRequest
from llm_workers.speech import talker_to_code2wav, thinker_to_talker
from llm_workers.stages import ChunkAccumulator, StageOutput

pytestmark = pytest.mark.torch


def accumulator(is_async: bool = True, num_running: int = 1, **options: Any) -> ChunkAccumulator:
    request = StageRequest(RequestId("r"), 0, MemberId("router"), "", 1, (0.0, "r"), options=options)
    return ChunkAccumulator(request, is_async, {}, num_running=num_running)


def sizes(held: ChunkAccumulator, num_frames: int, ends_with_frame: bool = False) -> list[int]:
    """Sends frames one by one and returns the sizes of the chunks, after a check that they hold all frames in order."""
    found: list[Any] = []
    last = num_frames - 1 if ends_with_frame else num_frames
    for index in range(last + 1):
        codes = np.full((int(index < num_frames), 3), index, dtype=np.int64)
        output = StageOutput({"codes": codes, "first_frame": index}, index == last, len(codes))
        payload = talker_to_code2wav(held, output)
        if payload is not None:
            found.append(payload)
            held.num_chunks += 1
    full = [payload for payload in found if payload]
    assert full == found[: len(full)]
    np.testing.assert_array_equal(np.concatenate([each["codes"] for each in full])[:, 0], np.arange(num_frames))
    starts = np.cumsum([0, *(len(each["codes"]) for each in full)])
    assert [each["first_frame"] for each in full] == starts[:-1].tolist()
    return [len(payload.get("codes", ())) for payload in found]


def test_frames_are_collected_into_chunks_of_which_the_first_is_small() -> None:
    assert sizes(accumulator(), 92) == [4, 8, 24, 25, 25, 6]
    assert sizes(accumulator(), 61) == [4, 8, 24, 25, 0]
    assert sizes(accumulator(), 36, ends_with_frame=True) == [4, 8, 24]
    assert sizes(accumulator(), 2) == [2]


def test_the_first_chunk_grows_with_the_load_and_later_ones_grow_from_it() -> None:
    assert sizes(accumulator(num_running=20), 50) == [5, 10, 25, 10]
    assert sizes(accumulator(num_running=128), 60) == [25, 25, 10]


def test_a_request_chooses_its_first_chunk() -> None:
    assert sizes(accumulator(num_running=64, initial_codec_chunk_frames=1), 60) == [1, 2, 6, 18, 25, 8]
    assert sizes(accumulator(initial_codec_chunk_frames=99), 30) == [25, 5]


def test_settings_of_the_stage_choose_the_sizes() -> None:
    held = accumulator()
    held.settings = {"codec_chunk_frames": 10, "initial_codec_chunk_frames": 2}
    assert sizes(held, 19) == [2, 4, 10, 3]


def test_the_sequential_pipeline_sends_all_frames_at_the_end() -> None:
    assert sizes(accumulator(is_async=False), 70) == [70]


def test_speech_without_a_frame_ends_with_an_empty_payload() -> None:
    codes = np.empty((0, 3), dtype=np.int64)
    for is_async in (True, False):
        held = accumulator(is_async)
        assert talker_to_code2wav(held, StageOutput({"codes": codes, "first_frame": 0}, True)) == {}


def thought() -> list[StageOutput]:
    def rows(first: int) -> StageOutput:
        return StageOutput({"prompt_hidden": np.full((2, 4), first), "prompt_hidden_at": np.arange(2) + first}, False)

    def token(index: int, *ids: int, is_finished: bool = False) -> StageOutput:
        return StageOutput({"token_ids": np.array(ids, dtype=np.int64), "first_index": index}, is_finished, len(ids))

    return [rows(3), rows(9), token(0, 7), token(1), token(1, 8, 9), token(3, is_finished=True)]


def test_what_the_thinker_makes_goes_on_at_once() -> None:
    held = accumulator()
    found: list[Any] = [thinker_to_talker(held, output) for output in thought()]
    assert found[3] is None
    assert [payload["token_ids"].tolist() for payload in found[2:] if payload] == [[7], [8, 9], []]
    assert [payload["prompt_hidden_at"].tolist() for payload in found[:2]] == [[3, 4], [9, 10]]
    assert held.held == []


def test_the_chunks_of_a_long_text_grow_while_many_requests_run() -> None:
    held, sizes, sent = accumulator(num_running=64), [], []
    for index in range(60):
        payload: Any = thinker_to_talker(
            held, StageOutput({"token_ids": np.array([index]), "first_index": index}, False)
        )
        if payload is not None:
            sizes.append(len(payload["token_ids"]))
            sent += payload["token_ids"].tolist()
            assert payload["first_index"] == len(sent) - sizes[-1]
    assert sizes[:12] == [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 3]
    assert max(sizes) == 8
    last: Any = thinker_to_talker(held, StageOutput({"token_ids": np.array([60]), "first_index": 60}, True))
    assert sent + last["token_ids"].tolist() == list(range(61))


@pytest.mark.parametrize("is_async", [True, False])
def test_rows_of_tokens_travel_with_the_tokens_behind_them(is_async: bool) -> None:
    """Each output after the first has a token, and the row of the token before it."""
    held, chunks = accumulator(is_async, num_running=64), []
    for index in range(60):
        at = np.arange(5) if index == 0 else np.array([4 + index])
        values = {"prompt_hidden": at[:, None] * 1.0, "prompt_hidden_at": at, "first_index": index}
        payload: Any = thinker_to_talker(
            held, StageOutput(values | {"token_ids": np.array([70 + index])}, index == 59, 1)
        )
        chunks += [payload] if payload is not None else []
    assert (len(chunks) > 1, max(len(chunk["token_ids"]) for chunk in chunks)) == (
        (True, 8) if is_async else (False, 60)
    )
    num_tokens, num_rows = 0, 0
    for chunk in chunks:
        assert chunk["first_index"] == num_tokens
        assert chunk["token_ids"].tolist() == [70 + num_tokens + each for each in range(len(chunk["token_ids"]))]
        num_tokens += len(chunk["token_ids"])
        assert chunk["prompt_hidden_at"].tolist() == chunk["prompt_hidden"][:, 0].tolist()
        assert chunk["prompt_hidden_at"].tolist() == list(range(num_rows, 4 + num_tokens))
        num_rows = 4 + num_tokens
    assert (num_tokens, num_rows) == (60, 64)


def test_each_token_is_a_chunk_while_few_requests_run_or_if_a_setting_says_so() -> None:
    outputs = [StageOutput({"token_ids": np.array([index]), "first_index": index}, False) for index in range(40)]
    few, limited = accumulator(num_running=7), accumulator(num_running=64)
    limited.settings = {"most_chunk_tokens": 1}
    assert all(thinker_to_talker(few, output) is not None for output in outputs)
    assert all(thinker_to_talker(limited, output) is not None for output in outputs)


def test_the_sequential_pipeline_sends_all_that_the_thinker_made_at_the_end() -> None:
    held = accumulator(is_async=False)
    *before, last = [thinker_to_talker(held, output) for output in thought()]
    assert before == [None] * 5
    payload: Any = last
    assert payload["prompt_hidden_at"].tolist() == [3, 4, 9, 10]
    assert payload["prompt_hidden"].shape == (4, 4)
    assert payload["token_ids"].tolist() == [7, 8, 9]
    assert payload["first_index"] == 0
    assert held.held == []
