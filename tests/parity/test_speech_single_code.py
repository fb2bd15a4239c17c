"""Compares Qwen2.5-Omni's talker and token2wav with transformers' whole model, in any order of chunks and steps."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from family_rig import FamilyPrompt, LoadedFamily, Text
from family_row import FamilyRow, Medium
from family_rows_qwen_vl import QWEN2_5_OMNI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from speech_line import Answer, SpeechCall, SpeechLine
from tiny_single_code import CODEC_END, CODEC_PAD, tiny_single_code

from fabric.contracts import ConfigError, InvalidRequest, ProtocolError, StagePrompt
from llm_workers.speech import TalkerStage, Token2WavStage, load_code2wav, load_talker
from llm_workers.stages import StageChunk, StageOutput

pytestmark = pytest.mark.torch

ROW: FamilyRow = dataclasses.replace(QWEN2_5_OMNI, name="qwen2_5_omni_speech", build=tiny_single_code)
NUM_TEXT_TOKENS, NUM_CODES, SEED = 8, 30, 11
PICTURE, SOUND, VIDEO = Medium("image", 1), Medium("audio", 2, (1000, 0)), Medium("video", 3, (84, 56))


class Spoken(NamedTuple):
    answer: Answer
    codes: npt.NDArray[np.int64]
    samples: npt.NDArray[np.float32]


class SingleCodeReference:
    """Asks transformers for speech. The hidden states behind the thinker's last layer and the codes are taken on the
    way; the noise of each decoding comes from the same seed."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.loaded = directory, LoadedFamily(ROW, directory)
        model = self.model = self.loaded.reference
        self._hidden: list[torch.Tensor] = []
        self._codes: list[torch.Tensor] = []
        decode = model.token2wav.forward

        def seeded(codes: torch.Tensor, **options: Any) -> Any:
            self._codes.append(codes)
            torch.manual_seed(SEED)
            return decode(codes, **options)

        def keep(module: Any, inputs: Any, output: Any) -> None:
            self._hidden.append((output[0] if isinstance(output, tuple) else output)[0])

        def mask(module: Any, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            found = options["input_ids"] if options.get("inputs_embeds") is None else options["inputs_embeds"]
            count = options["past_key_values"].get_seq_length() + found.shape[1]
            return inputs, options | {"attention_mask": torch.ones((1, count), dtype=torch.long)}

        # `generate` of transformers 5.23 leaves out a mask without padding, and the talker then leaves out the codec's
        # begin marks and the positions of media, with which the model was trained.
        model.talker.register_forward_pre_hook(mask, with_kwargs=True)
        model.token2wav.forward = seeded
        model.thinker.model.language_model.layers[-1].register_forward_hook(keep)

    def ask(self, *parts: Text | Medium, voice: str = "Chelsie") -> Spoken:
        inner: FamilyPrompt = self.loaded.prompt(*parts)
        ids = torch.tensor([inner.token_ids])
        # The reference would hand pixels on to its talker, which refuses them, unless they are named as the thinker's.
        inputs = {
            f"thinker_{name}" if name.startswith("pixel_values") else name: value
            for name, value in self.loaded.processed(inner).inputs.items()
        }
        self._hidden.clear()
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sequences, samples = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                speaker=voice,
                thinker_do_sample=False,
                thinker_max_new_tokens=NUM_TEXT_TOKENS,
                talker_do_sample=False,
                talker_max_new_tokens=NUM_CODES,
                talker_eos_token_id=[CODEC_PAD, CODEC_END],
                **inputs,
            )
        text_ids = sequences[0, ids.shape[1] :].tolist()
        hidden = torch.cat(self._hidden).numpy()
        prompt = StagePrompt(inner.token_ids, inner.placeholders, inner.media)
        options = {"temperature": 0, "max_codec_frames": NUM_CODES, "voice": voice, "seed": SEED}
        answer = Answer(prompt, outputs_of(hidden, ids.shape[1], text_ids), options)
        return Spoken(answer, self._codes.pop()[0].numpy(), samples.numpy())


def outputs_of(hidden: npt.NDArray[np.float32], num_prompt: int, text_ids: list[int]) -> list[StageOutput]:
    """Returns what the thinker makes: the prompt's hidden states in two parts, then each token with the hidden state of
    the token before it."""

    def rows(start: int, end: int) -> dict[str, Any]:
        return {"prompt_hidden": hidden[start:end], "prompt_hidden_at": np.arange(start, end, dtype=np.int64)}

    half = num_prompt // 2
    outputs = [StageOutput(rows(0, half), False), StageOutput(rows(half, num_prompt), False)]
    for index, token in enumerate(text_ids):
        values = {"token_ids": np.array([token], dtype=np.int64), "first_index": index}
        before = rows(num_prompt + index - 1, num_prompt + index) if index else {}
        outputs.append(StageOutput(values | before, index == len(text_ids) - 1, 1))
    return outputs


class Speaker(NamedTuple):
    directory: Path
    talker: TalkerStage
    token2wav: Token2WavStage
    spoken: list[Spoken]


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


def assert_equal(call: SpeechCall, spoken: Spoken) -> None:
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
