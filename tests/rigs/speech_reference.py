"""Asks transformers' whole Qwen3-Omni for answers in speech, and makes the thinker's part of each for the stages.

The reference returns text and samples only, so its talker's codes and its thinker's hidden states are taken on the way.
Its `chunked_decode`, which loses samples between its pieces of 300 frames, is replaced by one whole decode.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from family_rig import FamilyPrompt, LoadedFamily, Text
from family_row import FamilyRow, Medium
from family_rows_qwen3_omni import QWEN3_OMNI
from speech_line import Answer
from tiny_speech import NEWLINE, TOKENS_OF_CHAT, tiny_omni

from fabric.contracts import StagePrompt
from llm_workers.stages import StageOutput

NUM_TEXT_TOKENS, NUM_CODEC_TOKENS = 10, 34
TEXT_END = 25
"""Ends some of the answers, beside the end of a turn."""
ROW: FamilyRow = dataclasses.replace(
    QWEN3_OMNI,
    name="qwen3_omni_speech",
    build=tiny_omni,
    files={
        **QWEN3_OMNI.files,
        "generation_config.json": {"eos_token_id": [TOKENS_OF_CHAT["im_end_token_id"], TEXT_END]},
    },
)


class Spoken(NamedTuple):
    """A `Spoken` is the reference's answer to one chat."""

    answer: Answer
    """Holds the prompt and what the thinker makes of it, token by token, for `SpeechLine`."""
    text_ids: list[int]
    codes: npt.NDArray[np.int64]
    """Has shape `(num_frames, num_groups)`."""
    samples: npt.NDArray[np.float32]
    is_ended: bool
    """Says that the talker ended the speech itself."""


class SpeechReference:
    def __init__(self, directory: Path) -> None:
        self.directory, self.loaded = directory, LoadedFamily(ROW, directory)
        model = self.model = self.loaded.reference
        model.talker.config.audio_config = model.config.thinker_config.audio_config
        self._codes: list[torch.Tensor] = []
        self._thought: list[Any] = []
        think = model.thinker.generate

        def decode(codes: torch.Tensor, **_: Any) -> torch.Tensor:
            self._codes.append(codes)
            samples: torch.Tensor = model.code2wav(codes)
            return samples

        def generate(*arguments: Any, **options: Any) -> Any:
            self._thought.append(think(*arguments, **options))
            return self._thought[-1]

        model.code2wav.chunked_decode, model.thinker.generate = decode, generate

    def ask(self, *parts: Text | Medium, before: Sequence[int] = (), voice: str = "ethan") -> Spoken:
        """Asks with one turn of the user, which follows the tokens `before`."""
        chat = TOKENS_OF_CHAT
        head = [*before, chat["im_start_token_id"], chat["user_token_id"], NEWLINE]
        tail = [chat["im_end_token_id"], NEWLINE, chat["im_start_token_id"], chat["assistant_token_id"], NEWLINE]
        inner = self.loaded.prompt(*parts)
        token_ids = (*head, *inner.token_ids, *tail)
        placeholders = tuple(
            type(run)(run.offset + len(head), run.length, run.item, run.unit, run.row) for run in inner.placeholders
        )
        prompt = StagePrompt(token_ids, placeholders, inner.media)
        return self._spoken(prompt, inner, voice)

    def _spoken(self, prompt: StagePrompt, inner: FamilyPrompt, voice: str) -> Spoken:
        ids = torch.tensor([prompt.token_ids])
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sequences, samples = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                speaker=voice,
                return_audio=True,
                thinker_do_sample=False,
                thinker_max_new_tokens=NUM_TEXT_TOKENS,
                thinker_eos_token_id=[TOKENS_OF_CHAT["im_end_token_id"], TEXT_END],
                talker_do_sample=False,
                talker_max_new_tokens=NUM_CODEC_TOKENS,
                **self.loaded.processed(inner).inputs,
            )
        text_ids = sequences[0, len(prompt.token_ids) :].tolist()
        codes = self._codes.pop()[0].T.numpy()
        layer = self.model.config.talker_config.accept_hidden_layer
        hidden = self._thought.pop().hidden_states[0][layer][0].numpy()
        outputs = [*_media_outputs(prompt, hidden), *_text_outputs(text_ids)]
        options = {"temperature": 0, "max_codec_frames": NUM_CODEC_TOKENS - 1, "voice": voice}
        is_ended = len(codes) < NUM_CODEC_TOKENS - 1
        return Spoken(Answer(prompt, outputs, options), text_ids, codes, samples[0, 0].numpy(), is_ended)


def _media_outputs(prompt: StagePrompt, hidden: npt.NDArray[np.float32]) -> list[StageOutput]:
    """Returns the hidden rows of each run of media as an output of its own."""
    found = []
    for run in prompt.placeholders:
        at = np.arange(run.offset, run.end, dtype=np.int64)
        found.append(StageOutput({"prompt_hidden": hidden[at], "prompt_hidden_at": at}, False))
    return found


def _text_outputs(text_ids: Sequence[int]) -> list[StageOutput]:
    """Returns one output for each token. The reference does not speak the last token that the thinker generates, which
    it takes for the end token, so a token that the limit made the last one is left out."""
    is_ended = text_ids[-1] in (TEXT_END, TOKENS_OF_CHAT["im_end_token_id"])
    spoken = text_ids if is_ended else text_ids[:-1]
    return [
        StageOutput({"token_ids": np.array([token], dtype=np.int64), "first_index": index}, index == len(spoken) - 1, 1)
        for index, token in enumerate(spoken)
    ]
