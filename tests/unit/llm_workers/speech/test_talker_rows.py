"""Tests what the rows of a talker's sequence are made of, when they are ready, and the options of a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fabric.contracts import (
    ConfigError,
    InvalidRequest,
    MemberId,
    PlaceholderRange,
    ProtocolError,
    RequestId,
    StagePrompt,
    StageRequest,
)
from llm_workers.speech import TalkerDefaults
from llm_workers.speech.row_ids import NONE
from llm_workers.speech.talker_prompt import TalkerRows, TalkerTokens

pytestmark = pytest.mark.torch

START, USER, ASSISTANT, SYSTEM, END, LINE, MEDIUM = 90, 91, 92, 93, 94, 95, 99
PAD, BEGIN, FINISH = 80, 81, 82
TOKENS = TalkerTokens(START, USER, ASSISTANT, PAD, BEGIN, FINISH, frozenset([END]), (203, 204, 205), 201, 202, 200)
TAIL = [START, ASSISTANT, LINE]
VOICE = 210


def rows_of(*turns: list[int], media: tuple[tuple[int, int], ...] = ()) -> TalkerRows:
    ids = [token for turn in turns for token in turn]
    runs = tuple(PlaceholderRange(offset, length, 0, 0, 0) for offset, length in media)
    return TalkerRows(StagePrompt(tuple(ids), runs), TOKENS, VOICE)


def user(*ids: int) -> list[int]:
    return [START, USER, LINE, *ids, END, LINE]


def test_the_rows_are_the_users_turns_and_the_beginning_of_the_answer() -> None:
    rows = rows_of([START, SYSTEM, LINE, 1, END, LINE], user(2), [*TAIL, 3, END, LINE], user(4, 5), TAIL)
    rows.add_text([7, 8], 0, is_last=False)
    assert rows.user_at.tolist() == [*range(6, 12), *range(18, 25)]
    assert rows.num_prompt_rows == 13 + 9
    texts = rows.parts(0, rows.num_prompt_rows).text_ids.tolist()
    assert texts == [*user(2), *user(4, 5), *TAIL, PAD, PAD, PAD, PAD, BEGIN, 7]
    codes = rows.parts(0, rows.num_prompt_rows).codes.tolist()
    assert codes == [NONE] * 16 + [203, 204, 205, VOICE, 201, 202]
    assert rows.parts(18, 25).codes.tolist() == [205, VOICE, 201, 202, NONE, NONE, NONE]


def test_text_is_followed_by_its_end_once_and_by_pads() -> None:
    rows = rows_of(user(2), TAIL)
    rows.add_text([7, 8, 9], 0, is_last=False)
    rows.add_text([END], 3, is_last=True)
    first = rows.num_prompt_rows
    assert rows.parts(first - 1, first + 5).text_ids.tolist() == [7, 8, 9, FINISH, PAD, PAD]


def test_rows_are_ready_as_their_parts_come() -> None:
    rows = rows_of(user(MEDIUM, MEDIUM, 2, MEDIUM), TAIL, media=((3, 2), (6, 1)))
    assert rows.num_ready(0) == 3
    rows.add_hidden(np.array([3]))
    assert rows.num_ready(0) == 4
    rows.add_hidden(np.array([4]))
    assert rows.num_ready(0) == 6
    rows.add_hidden(np.array([6]))
    count = rows.num_prompt_rows
    assert rows.num_ready(0) == count - 1
    assert rows.parts(0, count).hidden_indexes.tolist() == [0, 1, 2]
    assert rows.parts(4, count).hidden_indexes.tolist() == [1, 2]
    rows.add_text([7], 0, is_last=False)
    assert [rows.num_ready(frames) for frames in (0, 1)] == [count, count]
    rows.add_text([8], 1, is_last=False)
    assert [rows.num_ready(frames) for frames in (0, 1, 2)] == [count, count + 1, count + 1]
    rows.add_text([], 2, is_last=True)
    assert [rows.num_ready(frames) for frames in (2, 30)] == [count + 2, count + 30]


def test_the_text_ends_at_its_first_end_token() -> None:
    rows = rows_of(user(2), TAIL)
    rows.add_text([7, END, 8], 0, is_last=False)
    rows.add_text([9], 3, is_last=True)
    first = rows.num_prompt_rows
    assert rows.parts(first - 1, first + 2).text_ids.tolist() == [7, FINISH, PAD]
    assert not rows.is_silent
    silent = rows_of(user(2), TAIL)
    silent.add_text([END], 0, is_last=True)
    assert silent.is_silent


def test_an_answer_that_the_prompt_begins_is_spoken_from_its_beginning() -> None:
    rows = rows_of(user(2), [*TAIL, 5, 6])
    rows.add_text([7], 0, is_last=True)
    first = rows.num_prompt_rows
    assert rows.parts(first - 1, first + 3).text_ids.tolist() == [5, 6, 7, FINISH]


def test_media_of_other_turns_take_no_rows() -> None:
    rows = rows_of([START, SYSTEM, LINE, MEDIUM, END, LINE], user(MEDIUM, 2), TAIL, media=((3, 1), (9, 1)))
    assert rows.num_ready(0) == 3
    rows.add_hidden(np.array([3]))
    assert rows.num_ready(0) == 3
    rows.add_hidden(np.array([9]))
    assert rows.parts(0, rows.num_prompt_rows).hidden_indexes.tolist() == [1]


def test_gaps_are_refused() -> None:
    rows = rows_of(user(MEDIUM, MEDIUM, 2), TAIL, media=((3, 2),))
    with pytest.raises(ProtocolError, match="other positions"):
        rows.add_hidden(np.array([4]))
    with pytest.raises(ProtocolError, match="start at 1"):
        rows.add_text([7], 1, is_last=False)
    with pytest.raises(InvalidRequest, match="assistant"):
        rows_of(user(2))


DEFAULTS = TalkerDefaults.of({"Ethan": 5, "Chelsie": 6}, {"talker_temperature": 0.7, "talker_max_new_tokens": 100})


def request(**options: Any) -> StageRequest:
    return StageRequest(RequestId("r"), 0, MemberId("router"), "", 1, (0.0, "r"), options=options)


def test_options_default_to_the_generation_config_and_then_to_transformers() -> None:
    options = DEFAULTS.options(request())
    assert (options.speaker, options.max_frames) == (5, 99)
    first = options.first
    assert (first.temperature, first.top_k, first.top_p, first.repetition_penalty) == (0.7, 50, 1.0, 1.05)
    assert (options.residual.temperature, options.residual.top_k, options.residual.top_p) == (1.0, 50, 0.8)
    assert DEFAULTS.options(request()).first.seed == first.seed
    greedy = TalkerDefaults.of({"a": 1}, {"talker_do_sample": False}).options(request())
    assert (greedy.speaker, greedy.first.temperature, greedy.residual.temperature) == (1, 0, 0)


def test_a_request_chooses_its_options() -> None:
    options = DEFAULTS.options(request(voice="CHELSIE", seed=3, temperature=0, top_k=2, top_p=0.5, max_codec_frames=7))
    assert (options.speaker, options.max_frames) == (6, 7)
    assert (options.first.seed, options.residual.seed) == (3, 3)
    assert (options.first.top_k, options.first.top_p, options.residual.temperature) == (2, 0.5, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"voice": "nobody"}, "this model has ethan, chelsie"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": "much"}, "top_p"),
        ({"initial_codec_chunk_frames": 0}, "initial_codec_chunk_frames"),
        ({"max_codec_frames": 0}, "max_codec_frames"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        DEFAULTS.options(request(**options))


def test_a_talker_without_voices_is_refused() -> None:
    with pytest.raises(ConfigError, match="no voices"):
        TalkerDefaults.of(None, {})
