"""Compares Qwen2.5-Omni's talker and token2wav with transformers' whole model, in any order of chunks and steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from family_rig import Text
from family_row import Medium
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from single_code_reference import NUM_CODES, SingleCodeReference, SpokenChat
from speech_line import Answer, SpeechCall, SpeechLine

from fabric.contracts import ConfigError, InvalidRequest, ProtocolError
from llm_workers.speech import TalkerStage, Token2WavStage, load_code2wav, load_talker
from llm_workers.stages import StageChunk, StageOutput

pytestmark = pytest.mark.torch

PICTURE, SOUND, VIDEO = Medium("image", 1), Medium("audio", 2, (1000, 0)), Medium("video", 3, (84, 56))


class Speaker(NamedTuple):
    directory: Path
    talker: TalkerStage
    token2wav: Token2WavStage
    spoken: list[SpokenChat]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    reference = SingleCodeReference(tmp_path_factory.mktemp("omni"))
    spoken = [
        reference.ask(Text(0, 4)),
        reference.ask(Text(1, 6), voice="Ethan"),
        reference.ask(Text(1, 3), PICTURE, Text(2, 2)),
        reference.ask(SOUND, Text(3, 4)),
        reference.ask(Text(4, 2), PICTURE, Text(1, 1), SOUND, PICTURE, Text(5, 3), voice="Ethan"),
        reference.ask(Text(1, 3), VIDEO, Text(2, 2)),
    ]
    talker = load_talker(reference.directory, "cpu", "float32", (200, 8))
    token2wav = load_code2wav(reference.directory, "cpu", "bfloat16")
    assert isinstance(token2wav, Token2WavStage)
    return Speaker(reference.directory, talker, token2wav, spoken)


def assert_equal(call: SpeechCall, spoken: SpokenChat) -> None:
    np.testing.assert_array_equal(np.concatenate(call.codes)[:, 0], spoken.codes)
    samples = np.concatenate(call.samples)
    assert spoken.samples.std() > 1e-4
    np.testing.assert_allclose(samples, spoken.samples, atol=1e-5 * float(spoken.samples.std()) + 1e-9)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_codes_and_samples_equal_those_of_transformers(speaker: Speaker, data: st.DataObject) -> None:
    line = SpeechLine(speaker.talker, speaker.token2wav, is_async=data.draw(st.booleans()))
    asked = data.draw(st.lists(st.sampled_from(speaker.spoken), min_size=1, max_size=4))
    try:
        calls = [line.open(f"r{index}", spoken.answer) for index, spoken in enumerate(asked)]
        for _ in range(data.draw(st.integers(0, 30))):
            call = data.draw(st.sampled_from(calls))
            action = data.draw(st.sampled_from(["receive", "receive", "step", "step", "preempt"]))
            if action == "receive":
                line.receive(call)
            elif action == "step":
                line.step([call, *(other for other in calls if other is not call)][:2], data.draw(st.integers(1, 9)))
            else:
                line.preempt(call)
        line.finish()
        for call, spoken in zip(calls, asked, strict=True):
            assert_equal(call, spoken)
    finally:
        line.close()


def test_the_answers_differ_and_end_in_both_ways(speaker: Speaker) -> None:
    assert len({spoken.codes.tobytes() for spoken in speaker.spoken}) == len(speaker.spoken)
    assert {len(spoken.codes) == NUM_CODES for spoken in speaker.spoken} == {True, False}


def test_an_answer_of_one_token_is_silent(speaker: Speaker) -> None:
    line = SpeechLine(speaker.talker, speaker.token2wav)
    answer = speaker.spoken[0].answer
    ended = StageOutput({"token_ids": np.array([5]), "first_index": 0}, True, 1)
    call = line.open("r", Answer(answer.prompt, [*answer.outputs[:2], ended], {}))
    line.finish()
    assert [len(codes) for codes in call.codes] == [0]


def test_voices_and_payloads_are_checked(speaker: Speaker, tmp_path: Path) -> None:
    answer = speaker.spoken[0].answer
    assert speaker.talker.voices == ("chelsie", "ethan")
    line = SpeechLine(speaker.talker, speaker.token2wav)
    with pytest.raises(InvalidRequest, match="chelsie, ethan"):
        line.open("r", Answer(answer.prompt, answer.outputs, {"voice": "nobody"}))
    call = line.open("r", answer)
    payload = {"prompt_hidden": np.zeros((1, 64), np.float32), "prompt_hidden_at": np.array([1])}
    with pytest.raises(ProtocolError, match="other positions"):
        speaker.talker.receive(StageChunk(call.key, 0, False, payload))
    with pytest.raises(ProtocolError, match=r"\[0, 40\]"):
        speaker.token2wav.receive(StageChunk(call.key, 0, False, {"codes": np.array([[41]]), "first_frame": 0}))
    line.close()
    shutil.copytree(speaker.directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "spk_dict.pt").unlink()
    with pytest.raises(ConfigError, match="voices"):
        load_talker(tmp_path, "cpu", "float32", (8, 8))
