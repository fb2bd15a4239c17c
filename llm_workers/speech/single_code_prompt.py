"""Says what each row of Qwen2.5-Omni's talker is made of, and which rows are ready.

This talker reads the whole prompt of the thinker: each row is the sum of the thinker's last hidden state and of the
embedding of the token, which is zero for media. Two rows follow: the mark of the voice, and the first generated token,
with special ids of the codec. Each later row continues one code, and adds the hidden state and the embedding of the
next generated token, then an end mark once, then pads. The thinker has a hidden state of a generated token only after
it has read the token, so the last token is never spoken. The rules are those of transformers'
`Qwen2_5OmniForConditionalGeneration.generate`.

The module is pure: it knows ids and counts, and neither tensors nor positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fabric.contracts import ProtocolError, StagePrompt
from llm_workers.speech.row_ids import NONE, Ints, RowParts
from llm_workers.stages import media_positions

_NUM_MARKS = 2
"""Counts the rows between the prompt and the first continuation: the voice's mark and the first token."""


@dataclass(frozen=True, slots=True)
class SingleCodeTokens:
    """Holds the special ids of the talker, from the checkpoint's config."""

    text_end: int
    text_pad: int
    codec_pad: int
    codec_begin: int


class SingleCodeRows:
    """Implements `RowBook` for a talker with one code per frame."""

    def __init__(self, prompt: StagePrompt, tokens: SingleCodeTokens, voice_mark: int) -> None:
        """Takes the thinker's prompt. `voice_mark` is the token that begins the speech of the voice."""
        self._tokens, self._voice_mark = tokens, voice_mark
        ids = np.array(prompt.token_ids, dtype=np.int64)
        ids[media_positions(prompt.placeholders)] = NONE
        self._prompt_ids = ids
        self.user_at = np.arange(len(ids), dtype=np.int64)
        """Holds the positions of the thinker's prompt that are rows here: all of them."""
        self._generated: list[int] = []
        self._num_hidden = 0
        self.is_text_finished = False

    @property
    def num_prompt_rows(self) -> int:
        return len(self._prompt_ids) + _NUM_MARKS

    @property
    def is_silent(self) -> bool:
        return self.is_text_finished and self._num_spoken == 0

    @property
    def _num_spoken(self) -> int:
        """Returns how many generated tokens have come with their hidden states."""
        return min(max(0, self._num_hidden - len(self._prompt_ids)), len(self._generated))

    def add_hidden(self, positions: Ints) -> None:
        """Notes that the thinker's hidden states at these positions have come: those of the prompt, then those of the
        generated tokens. Raises ProtocolError if they are not the next ones."""
        end = self._num_hidden + len(positions)
        if not np.array_equal(positions, np.arange(self._num_hidden, end)):
            raise ProtocolError(f"hidden rows came for other positions than those from {self._num_hidden} on")
        self._num_hidden = end

    def add_text(self, token_ids: Sequence[int], first_index: int, *, is_last: bool) -> None:
        if first_index != len(self._generated):
            raise ProtocolError(f"the tokens start at {first_index}, but {len(self._generated)} have come")
        self._generated += [int(token) for token in token_ids]
        self.is_text_finished |= is_last

    def end_text(self) -> None:
        self.is_text_finished = True

    def num_ready(self, num_frames: int) -> int:
        if self._num_hidden < len(self._prompt_ids):
            return self._num_hidden
        if self.is_text_finished:
            return self.num_prompt_rows + num_frames
        if self._num_spoken == 0:
            return self.num_prompt_rows - 1
        return self.num_prompt_rows + min(num_frames, self._num_spoken - 1)

    def parts(self, start: int, end: int) -> RowParts:
        num_prompt, tokens = len(self._prompt_ids), self._tokens
        texts = [self._text_id(row) for row in range(start, end)]
        marks = {num_prompt: tokens.codec_pad, num_prompt + 1: tokens.codec_begin}
        codes = [marks.get(row, NONE) for row in range(start, end)]
        # The hidden state of a generated token is the one row further that the voice's mark takes.
        hidden = [
            (row - start, row if row < num_prompt else row - 1)
            for row in range(start, end)
            if row < num_prompt or 0 <= row - num_prompt - 1 < self._num_spoken
        ]
        pairs = np.array(hidden, dtype=np.int64).reshape(-1, 2)
        return RowParts(
            np.array(texts, dtype=np.int64), np.array(codes, dtype=np.int64), pairs[:, 0].copy(), pairs[:, 1].copy()
        )

    def _text_id(self, row: int) -> int:
        if row < len(self._prompt_ids):
            return int(self._prompt_ids[row])
        index = row - len(self._prompt_ids) - 1
        if index < 0:
            return self._voice_mark
        if index < self._num_spoken:
            return self._generated[index]
        return self._tokens.text_end if index == self._num_spoken else self._tokens.text_pad
