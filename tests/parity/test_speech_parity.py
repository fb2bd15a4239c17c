"""Compares talker and code2wav with transformers' whole Qwen3-Omni, in any order of chunks, steps and preemptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
from family_rig import Text
from family_row import Medium
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from speech_line import Answer, SpeechCall, SpeechLine
from speech_reference import TEXT_END, SpeechReference, Spoken
from tiny_speech import NEWLINE, TOKENS_OF_CHAT

from fabric.contracts import InvalidRequest
from llm_workers.speech import Code2WavStage, TalkerStage, load_code2wav, load_talker
from llm_workers.stages import StageOutput

pytestmark = pytest.mark.torch

ROUNDING = 5e-5
"""Is relative to the level of the signal, as in `test_speech_code2wav`."""
START, END = TOKENS_OF_CHAT["im_start_token_id"], TOKENS_OF_CHAT["im_end_token_id"]
SYSTEM = [START, TOKENS_OF_CHAT["system_token_id"], NEWLINE, 5, 6, 7, END, NEWLINE]
TURN = [START, TOKENS_OF_CHAT["user_token_id"], NEWLINE, 50, 51, END, NEWLINE]
EARLIER = [*TURN, START, TOKENS_OF_CHAT["assistant_token_id"], NEWLINE, 60, 61, END, NEWLINE]
PICTURE, SOUND, VIDEO = Medium("image", 1), Medium("audio", 2, (1000, 0)), Medium("video", 3, (96, 64))


class Speaker(NamedTuple):
    talker: TalkerStage
    code2wav: Code2WavStage
    spoken: list[Spoken]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    reference = SpeechReference(tmp_path_factory.mktemp("omni"))
    spoken = [
        reference.ask(Text(0, 4), before=[*SYSTEM, *EARLIER]),
        reference.ask(Text(1, 5), before=SYSTEM, voice="Chelsie"),
        reference.ask(Text(13, 7), before=SYSTEM),
        reference.ask(Text(1, 3), PICTURE, Text(2, 2)),
        reference.ask(SOUND, Text(3, 4)),
        reference.ask(Text(4, 2), PICTURE, Text(1, 1), SOUND, PICTURE, Text(5, 3), before=SYSTEM),
        reference.ask(Text(1, 3), VIDEO, Text(2, 2)),
    ]
    directory = reference.directory
    talker = load_talker(directory, "cpu", "float32", (200, 8))
    return Speaker(talker, load_code2wav(directory, "cpu", "float32"), spoken)


@contextmanager
def speaking(speaker: Speaker, *, is_async: bool = True) -> Iterator[SpeechLine]:
    """Yields a line whose requests are closed at the end, also after a failure."""
    line = SpeechLine(speaker.talker, speaker.code2wav, is_async=is_async)
    try:
        yield line
    finally:
        line.close()


def assert_equal(call: SpeechCall, spoken: Spoken) -> None:
    codes, samples = np.concatenate(call.codes), np.concatenate(call.samples)
    np.testing.assert_array_equal(codes, spoken.codes)
    assert len(samples) == len(spoken.samples)
    level = np.sqrt(np.mean(spoken.samples**2))
    assert level > 0.01
    assert np.abs(samples - spoken.samples).max() <= ROUNDING * level


def test_the_answers_differ_and_end_in_both_ways(speaker: Speaker) -> None:
    assert len({spoken.codes.tobytes() for spoken in speaker.spoken}) == len(speaker.spoken)
    assert {spoken.is_ended for spoken in speaker.spoken} == {True, False}
    assert {spoken.text_ids[-1] == TEXT_END for spoken in speaker.spoken} == {True, False}


@pytest.mark.parametrize("is_async", [True, False])
def test_all_answers_together_equal_those_of_transformers(speaker: Speaker, is_async: bool) -> None:
    with speaking(speaker, is_async=is_async) as line:
        calls = [line.open(f"r{index}", spoken.answer) for index, spoken in enumerate(speaker.spoken)]
        line.finish()
        for call, spoken in zip(calls, speaker.spoken, strict=True):
            assert_equal(call, spoken)
            assert len(call.chunk_sizes) == 1 if not is_async else call.chunk_sizes[0] <= 4


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_chunks_steps_and_preemptions(speaker: Speaker, data: st.DataObject) -> None:
    with speaking(speaker, is_async=data.draw(st.booleans())) as line:
        asked = data.draw(st.lists(st.sampled_from(speaker.spoken), min_size=1, max_size=4))
        calls = []
        for index, spoken in enumerate(asked):
            first = data.draw(st.sampled_from([1, 3, 25]))
            options = {**spoken.answer.options, "initial_codec_chunk_frames": first}
            calls.append(line.open(f"r{index}", Answer(spoken.answer.prompt, spoken.answer.outputs, options)))
        for _ in range(data.draw(st.integers(0, 40))):
            some = data.draw(st.lists(st.sampled_from(calls), min_size=1, unique_by=id))
            action = data.draw(st.sampled_from(["receive", "receive", "step", "step", "decode", "preempt"]))
            if action == "receive":
                line.receive(some[0])
            elif action == "step":
                line.step(some, data.draw(st.sampled_from([1, 2, 7, 1000])))
            elif action == "decode":
                line.decode(some, data.draw(st.sampled_from([1, 1000])))
            else:
                line.preempt(some[0])
        line.finish()
        for call, spoken in zip(calls, asked, strict=True):
            assert_equal(call, spoken)


def test_a_preemption_in_the_middle_of_the_speech_draws_no_frame_twice(speaker: Speaker) -> None:
    with speaking(speaker) as line:
        spoken = speaker.spoken[5]
        call = line.open("r", spoken.answer)
        while line.receive(call):
            pass
        for index in range(20):
            line.step([call])
            if index % 7 == 3:
                line.preempt(call)
        assert sum(map(len, call.codes)) == 20
        line.finish()
        assert_equal(call, spoken)


def test_drawn_codes_depend_on_the_seed_alone(speaker: Speaker) -> None:
    """The same seed draws the same codes in any company and after a preemption, and another seed other ones."""
    with speaking(speaker) as line:
        prompt, outputs, _ = speaker.spoken[0].answer.prompt, speaker.spoken[0].answer.outputs, None
        options = {"temperature": 1.0, "max_codec_frames": 12}
        same = [line.open(f"same{index}", Answer(prompt, outputs, options | {"seed": 5})) for index in range(2)]
        other = line.open("other", Answer(prompt, outputs, options | {"seed": 6}))
        for call in (*same, other):
            while line.receive(call):
                pass
        for _ in range(6):
            line.step([same[0], other])
        line.preempt(same[0])
        line.finish()
        first, second, third = (np.concatenate(call.codes) for call in (*same, other))
        np.testing.assert_array_equal(first, second)
        assert len({tuple(frame) for frame in first}) > 6
        assert not np.array_equal(first, third)


def test_voices_speak_differently_and_unknown_ones_are_named(speaker: Speaker) -> None:
    assert sorted(speaker.talker.voices) == ["chelsie", "ethan"]
    with speaking(speaker) as line:
        answer = speaker.spoken[0].answer
        calls = [
            line.open(voice, Answer(answer.prompt, answer.outputs, {**answer.options, "voice": voice}))
            for voice in ("Ethan", "CHELSIE")
        ]
        with pytest.raises(InvalidRequest, match="this model has"):
            line.open("nobody", Answer(answer.prompt, answer.outputs, {"voice": "nobody"}))
        line.finish()
        assert not np.array_equal(np.concatenate(calls[0].codes), np.concatenate(calls[1].codes))


def test_an_answer_without_words_is_silent(speaker: Speaker) -> None:
    with speaking(speaker) as line:
        ended = StageOutput({"token_ids": np.array([TEXT_END]), "first_index": 0}, True, 1)
        call = line.open("r", Answer(speaker.spoken[0].answer.prompt, [ended], {}))
        line.finish()
        assert [len(codes) for codes in call.codes] == [0]
        assert call.samples == []
