"""Asks transformers' whole Qwen2.5-Omni for answers in speech, and makes the thinker's part of each for the stages.

The hidden states behind the thinker's last layer and the codes are taken on the way; the noise of each decoding comes
from the same seed.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from family_rig import FamilyPrompt, LoadedFamily, Text
from family_row import FamilyRow, Medium
from family_rows_qwen_vl import QWEN2_5_OMNI
from speech_line import Answer
from tiny_single_code import CODEC_END, CODEC_PAD, tiny_single_code

from fabric.contracts import StagePrompt
from llm_workers.stages import StageOutput

ROW: FamilyRow = dataclasses.replace(QWEN2_5_OMNI, name="qwen2_5_omni_speech", build=tiny_single_code)
NUM_TEXT_TOKENS, NUM_CODES, SEED = 8, 30, 11


class SpokenChat(NamedTuple):
    """A `SpokenChat` is the reference's answer to one prompt."""

    of: FamilyPrompt
    answer: Answer
    """Holds the prompt and what the thinker makes of it, token by token, for `SpeechLine`."""
    text_ids: list[int]
    codes: npt.NDArray[np.int64]
    samples: npt.NDArray[np.float32]


class SingleCodeReference:
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

    def ask(self, *parts: Text | Medium, voice: str = "Chelsie") -> SpokenChat:
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
        return SpokenChat(inner, answer, text_ids, self._codes.pop()[0].numpy(), samples.numpy())


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
