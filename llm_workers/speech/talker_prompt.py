"""Says what each row of a talker's sequence is made of, and which rows are ready.

The sequence of the talker begins with the user's turns of the thinker's prompt; system turns and earlier answers are
left out. Nine rows follow: the three tokens `<|im_start|>assistant\\n`, four pads, a beginning mark, and the first
token of the answer, to which special ids of the codec are added, among them the voice. Each later row continues one
frame of codes, and adds the next token of the answer, then the end mark once, then pads. A row is ready when everything
that it is made of is there. The rules are those of transformers' `Qwen3OmniMoeForConditionalGeneration.generate`.

Transformers leaves out the last token that the thinker generated, because it takes it for the end token. Here an end
token is left out, and any other last token is spoken.

The module is pure: it knows ids and counts, and neither tensors nor positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fabric.contracts import InvalidRequest, ProtocolError, StagePrompt
from llm_workers.speech.row_ids import NONE, Ints, RowParts
from llm_workers.stages import media_positions

_NUM_MARKS = 3
"""Counts the tokens of `<|im_start|>assistant\\n`, which stand before the answer."""
_NUM_PADS = 4


@dataclass(frozen=True, slots=True)
class TalkerTokens:
    """Holds the ids that the talker's prompt is made of, from the checkpoint's config."""

    im_start: int
    user: int
    assistant: int
    tts_pad: int
    tts_bos: int
    tts_eos: int
    text_ends: frozenset[int]
    """Holds the tokens that end an answer of the thinker."""
    codec_heads: tuple[int, int, int]
    """Holds the codec's ids for "no thinking" and the begin and end of thinking."""
    codec_pad: int
    codec_bos: int
    codec_eos: int


class TalkerRows:
    """A `TalkerRows` holds the ids of one request's rows as far as they are known."""

    def __init__(self, prompt: StagePrompt, tokens: TalkerTokens, speaker: int) -> None:
        """Takes the thinker's prompt. `speaker` is the codec's id of the voice. Raises InvalidRequest if the prompt has
        no turn of the assistant."""
        self._tokens = tokens
        ids = np.array(prompt.token_ids, dtype=np.int64)
        self.user_at = user_positions(ids, tokens)
        """Holds the positions of the thinker's prompt that are rows here, in ascending order."""
        self._answer: list[int] = ids[_answer_start(ids, tokens) :].tolist()
        """Holds the assistant's turn, from its first mark on."""
        self._num_prompt_tokens = len(self._answer)
        self.is_text_finished = False
        self._media_at = media_positions(prompt.placeholders)
        self._num_media = 0
        self._user_ids = ids[self.user_at]
        self._user_ids[np.isin(self.user_at, self._media_at)] = NONE
        heads = (*tokens.codec_heads, speaker, tokens.codec_pad, tokens.codec_bos)
        self._head_codes = np.array([NONE] * _NUM_MARKS + list(heads), dtype=np.int64)

    @property
    def num_prompt_rows(self) -> int:
        return len(self.user_at) + len(self._head_codes)

    @property
    def is_silent(self) -> bool:
        """Returns whether the answer has ended without a token to speak."""
        return self.is_text_finished and len(self._answer) <= _NUM_MARKS

    def add_hidden(self, positions: Ints) -> None:
        """Notes that the thinker's hidden states at these positions have come. Raises ProtocolError if they are not
        those of the next media."""
        end = self._num_media + len(positions)
        if not np.array_equal(positions, self._media_at[self._num_media : end]):
            raise ProtocolError(f"hidden rows came for other positions than the media's next {len(positions)}")
        self._num_media = end

    def add_text(self, token_ids: Sequence[int], first_index: int, *, is_last: bool) -> None:
        """Adds generated tokens up to the first end token. Raises ProtocolError if they do not continue the answer."""
        num_generated = len(self._answer) - self._num_prompt_tokens
        if first_index != num_generated and not (self.is_text_finished and first_index > num_generated):
            raise ProtocolError(f"the tokens start at {first_index}, but {num_generated} have come")
        for token in token_ids:
            self.is_text_finished |= token in self._tokens.text_ends
            if not self.is_text_finished:
                self._answer.append(int(token))
        self.is_text_finished |= is_last

    def end_text(self) -> None:
        """Notes that no tokens follow."""
        self.is_text_finished = True

    def num_ready(self, num_frames: int) -> int:
        """Returns how many rows are ready from the beginning, when `num_frames` frames have been made."""
        num_users = len(self.user_at)
        if self._num_media < len(self._media_at):
            is_missing = (self._user_ids == NONE) & (self.user_at >= self._media_at[self._num_media])
            if is_missing.any():
                return int(is_missing.argmax())
        if self.is_text_finished:
            return self.num_prompt_rows + num_frames
        if len(self._answer) <= _NUM_MARKS:
            return num_users + (len(self._answer) if len(self._answer) < _NUM_MARKS else len(self._head_codes) - 1)
        return self.num_prompt_rows + min(num_frames, len(self._answer) - _NUM_MARKS - 1)

    def parts(self, start: int, end: int) -> RowParts:
        """Returns what the rows `[start, end)`, which must be ready, are made of, except for codes of frames."""
        texts = np.array([self._text_id(row) for row in range(start, end)], dtype=np.int64)
        first = len(self.user_at)
        codes = np.full(end - start, NONE, dtype=np.int64)
        begin, stop = max(start, first), min(end, self.num_prompt_rows)
        if begin < stop:
            codes[begin - start : stop - start] = self._head_codes[begin - first : stop - first]
        hidden_rows = np.flatnonzero(self._user_ids[start:end] == NONE)
        return RowParts(texts, codes, hidden_rows, np.searchsorted(self._media_at, self.user_at[hidden_rows + start]))

    def _text_id(self, row: int) -> int:
        if row < len(self.user_at):
            return int(self._user_ids[row])
        tokens, index = self._tokens, row - len(self.user_at)
        if index < _NUM_MARKS:
            return int(self._answer[index]) if index < len(self._answer) else tokens.tts_eos
        if index < _NUM_MARKS + _NUM_PADS:
            return tokens.tts_pad
        if index == _NUM_MARKS + _NUM_PADS:
            return tokens.tts_bos
        spoken = index - _NUM_PADS - 1  # The first token that is spoken stands at `_NUM_MARKS` of the answer.
        if spoken < len(self._answer):
            return int(self._answer[spoken])
        return tokens.tts_eos if spoken == len(self._answer) else tokens.tts_pad


def user_positions(ids: Ints, tokens: TalkerTokens) -> Ints:
    """Returns the positions of the user's turns, from each turn's start mark up to the next one, in ascending order."""
    if not len(ids):
        return np.empty(0, dtype=np.int64)
    at = np.arange(len(ids))
    starts = np.maximum.accumulate(np.where(ids == tokens.im_start, at, 0))
    roles = ids[np.minimum(starts + 1, len(ids) - 1)]
    return np.flatnonzero(roles == tokens.user)


def _answer_start(ids: Ints, tokens: TalkerTokens) -> int:
    found = np.flatnonzero((ids[:-1] == tokens.im_start) & (ids[1:] == tokens.assistant))
    if not len(found):
        raise InvalidRequest("speech needs a chat whose prompt has a turn of the assistant")
    return int(found[-1])
