"""Loads a row of the family table: the family's own halves and transformers' whole model, with prompts for both.

It knows nothing of the encoder and worker services.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from family_row import FILM, MODALITY_TO_SAMPLE, NUM_TEXT_TOKENS, FamilyRow, Medium, Processed, load_reference

from fabric.contracts import MediaItem, PlaceholderRange
from llm_workers.compute import register_attention
from modalities.family import EncoderInput, MediaHeader, VideoHeader
from modalities.media import plan_media
from modalities.registry import REGISTRY


class Text(NamedTuple):
    seed: int
    num_tokens: int


@dataclass(frozen=True, eq=False)
class FamilyPrompt:
    """Holds a prompt as the worker receives it. `units` holds the pair (item, unit) of each of `inputs`."""

    files: tuple[tuple[str, bytes], ...]
    token_ids: tuple[int, ...]
    placeholders: tuple[PlaceholderRange, ...]
    media: tuple[MediaItem, ...]
    inputs: tuple[EncoderInput, ...]
    units: tuple[tuple[int, int], ...]


class Expected(NamedTuple):
    token_ids: list[int]
    margins: list[float]
    """Holds the difference between the best and the second best logit, per token."""


class LoadedFamily:
    """Holds one tiny float32 checkpoint of a row, and computes with the family and with transformers on it. It caches
    the results."""

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, row: FamilyRow, directory: Path) -> None:
        self.row, self.directory = row, directory
        built = row.build()
        built.save_pretrained(directory)
        for name, content in row.files.items():
            (directory / name).write_text(json.dumps(content))
        self.reference = load_reference(directory, type(built).__name__)
        self.family = REGISTRY.load_family(directory)
        self.model = self.family.load_language_model(directory, "cpu", "float32", register_attention())
        self.encoder = None
        if row.modalities:
            self.encoder = self.family.load_encoder(directory, "cpu", "float32", row.modalities)
        self.prompt = functools.cache(self._prompt)
        self.feature = functools.cache(self._feature)
        self.processed = functools.cache(self._processed)
        self.expected = functools.cache(self._expected)

    def _prompt(self, *parts: Text | Medium) -> FamilyPrompt:
        token_ids: list[int] = []
        files, media, plans, inputs, units = [], [], [], [], []
        for part in parts:
            if isinstance(part, Text):
                rng = np.random.default_rng(part.seed)
                token_ids += rng.integers(3, NUM_TEXT_TOKENS, part.num_tokens).tolist()
                continue
            markup = self.row.markup[part.modality]
            token_ids += [*markup.before, markup.placeholder, *markup.after]
            data = MODALITY_TO_SAMPLE[part.modality](part)
            files.append((part.modality, data))
            for header, anchor in self._headers(part.modality, data, len(media)):
                plan, item = plan_media(self.family, data, header, len(media), f"part.{len(media)}", anchor=anchor)
                found = self.family.preprocess(data, item)
                units += [(item.index, unit) for unit in range(len(found))]
                inputs += found
                plans.append(plan)
                media.append(item)
        expanded = self.family.expand(token_ids, plans, spelled)
        return FamilyPrompt(
            tuple(files), tuple(expanded.token_ids), expanded.placeholders, tuple(media), tuple(inputs), tuple(units)
        )

    def _headers(self, kind: str, data: bytes, index: int) -> list[tuple[MediaHeader, int]]:
        """Returns the headers of the items that a part becomes, each with its anchor."""
        header = REGISTRY.modality("video" if kind == FILM else kind).probe(data, "part")
        if kind != FILM:
            return [(header, -1)]
        assert isinstance(header, VideoHeader)
        assert header.sound is not None
        return [(header, -1), (header.sound, index)]

    def _feature(self, of: FamilyPrompt, index: int) -> torch.Tensor:
        """Returns the feature of `of.inputs[index]`, encoded alone."""
        assert self.encoder is not None
        with torch.inference_mode():
            return self.encoder.encode([of.inputs[index]])[0]

    def _processed(self, of: FamilyPrompt) -> Processed:
        if not of.files:
            return Processed({}, [], [])
        assert self.row.process is not None
        return self.row.process(self.directory, of.files)

    def _expected(self, of: FamilyPrompt, num_tokens: int) -> Expected:
        """Returns what transformers generates greedily from the same token ids."""
        ids = torch.tensor([of.token_ids])
        inputs: dict[str, Any] = {**self.processed(of).inputs, **self.row.inputs_of_ids(ids)}
        with torch.inference_mode():
            out = self.reference.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                output_logits=True,
                return_dict_in_generate=True,
                **inputs,
            )
        best = [step[0].topk(2).values.tolist() for step in out.logits]
        return Expected(out.sequences[0, ids.shape[1] :].tolist(), [first - second for first, second in best])


def spelled(text: str, behind: int | None = None) -> list[int]:
    """Serves as a tokenizer: it maps each character to one id."""
    return [3 + ord(letter) % (NUM_TEXT_TOKENS - 3) for letter in text]
