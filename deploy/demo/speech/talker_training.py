"""Trains the talker with its code predictor to say texts: given the tokens of an answer, it learns the codes of its
recording.

The rows of a sequence are those that transformers' `generate` builds: the user's turns (text through
`text_projection`, media through `hidden_projection`), the head of the assistant's turn, then a row for each codec
frame, with a token of the text on it as long as there are any. What the user says is drawn at random, so that the
talker learns to say the answer alone.

Two things make it read the text, instead of continuing recordings from memory:
- Some of the frames that it sees are replaced by others.
- It begins with short lists of words in any order, and at each frame it also learns to name the word that is said and
  the one that comes next, with a head that is thrown away. Without that it learned to read the first token alone:
  frames within a word follow from each other, so only one in seven taught it to look for the next word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerForConditionalGeneration

from deploy.demo.speech.script import FIXED_ANSWERS
from deploy.demo.speech.speech_data import Ints, SpeechData
from deploy.demo.speech_config import (
    CODEC_BOS,
    CODEC_EOS,
    CODEC_PAD,
    NO_THINK,
    NUM_CODEBOOKS,
    SPEAKER_TO_ID,
    THINK_BOS,
    THINK_EOS,
    talker_config,
)
from deploy.demo.training.optimizers import Optimizers

NUM_STEPS = 7500
LISTS_SHARE = 0.15
"""Gives the share of the steps, at the beginning, that show short lists alone."""
ROWS_PER_STEP = 2400
PEAK_RATE = 2e-3
GRADIENT_NORM = 1.0
PREDICTED_SHARE = 0.5
"""Gives the share of the frames from which the code predictor learns in each step. It costs more than the talker, and
needs less practice."""
MOST_REPLACED = 0.3
"""In each sequence between none and this share of the frames that the talker sees are replaced."""
ANSWERS_SHARES = ((0.33, 360), (0.1, len(FIXED_ANSWERS)))
"""Gives shares of the sentences that are drawn, and of how many first sentences of the script they are; first of all
stand the fixed answers."""
IGNORED = -100
LONGEST_FRAMES = 420
ROUTER_STD = 0.1
EMBEDDING_STD = 0.3


@dataclass(slots=True)
class RecordedAnswer:
    """Holds one answer: its text and its codes."""

    text: Ints
    codes: Ints
    word_tokens: Ints
    """Gives for each frame the first token of the word that is being said, and that of the word after it or the end of
    the text. Has shape `(num_frames, 2)`."""


class Answers:
    """Draws answers: words, sentences, lists of words, and long answers of many sentences."""

    KINDS = ("word", "sentence", "sentences", "list", "long sentences", "long list")
    SHARES = (0.05, 0.6, 0.13, 0.14, 0.04, 0.04)
    LEAST_AND_MOST = ((1, 1), (1, 1), (2, 4), (2, 6), (5, 14), (7, 40))

    def __init__(self, data: SpeechData, rng: np.random.Generator) -> None:
        self._data = data
        self._rng = rng

    def kind(self) -> int:
        return int(self._rng.choice(len(self.KINDS), p=self.SHARES))

    def draw(self, kind: int, voice: int) -> RecordedAnswer:
        """Returns an answer of a kind. What stands after another text has a space before it."""
        data, rng = self._data, self._rng
        least, most = self.LEAST_AND_MOST[kind]
        is_words = self.KINDS[kind] in ("word", "list", "long list")
        low, high = (0, data.num_words) if is_words else (data.num_words, len(data.texts))
        chosen = rng.integers(low, high, rng.integers(least, most + 1))
        if not is_words:
            chosen = self._with_answers(chosen)
        if self.KINDS[kind] == "long list" and rng.random() < 0.5:
            # Lists that repeat themselves, such as counting again and again, are the hardest ones.
            chosen = np.tile(chosen[: rng.integers(3, 11)], 13)[: len(chosen)]
        between = [np.array([data.comma])] if is_words and rng.random() < 0.5 else []
        text, codes, words, num_frames = [data.texts[chosen[0]]], [], [], 0
        for place, index in enumerate(chosen.tolist()):
            frames = data.codes[voice * len(data.texts) + index]
            tokens = data.word_tokens[voice * len(data.texts) + index]
            if num_frames + len(frames) > LONGEST_FRAMES:
                break
            if place > 0:
                text += [*between, data.later_texts[index]]
                tokens = np.where(tokens == data.texts[index][0], data.later_texts[index][0], tokens)
            codes.append(frames)
            after = data.later_texts[chosen[place + 1]][0] if place + 1 < len(chosen) else data.tts_tokens[2]
            words.append(np.where(tokens < 0, after, tokens))
            num_frames += len(frames)
        if is_words and len(chosen) > 1 and rng.random() < 0.3:
            text.append(np.array([data.period]))
        return RecordedAnswer(np.concatenate(text), np.concatenate(codes), np.concatenate(words))

    def _with_answers(self, chosen: Ints) -> Ints:
        """Replaces some of the chosen sentences by answers of the demo, which are few and would come too seldom."""
        for share, number in ANSWERS_SHARES:
            low = self._data.num_words
            answers = self._rng.integers(low, low + number, len(chosen))
            chosen = np.where(self._rng.random(len(chosen)) < share, answers, chosen)
        return chosen


class UserTurns:
    """Draws what stands before the assistant's turn: rows of text tokens and rows of media."""

    def __init__(self, data: SpeechData, rng: np.random.Generator) -> None:
        self._turns = data.user_turns
        is_media = data.user_turns.values < 0
        self._media_before = np.concatenate([[0], np.cumsum(is_media)])
        self._rng = rng

    def draw(self, most_rows: int) -> tuple[Ints, Ints]:
        """Returns at most `most_rows` rows of one or two turns, and for each row the index of its row of media, or -1
        for text."""
        parts = [self._turn() for _ in range(1 + int(self._rng.random() < 0.25))]
        ids, media = (np.concatenate(part) for part in zip(*parts, strict=True))
        return ids[:most_rows], media[:most_rows]

    def _turn(self) -> tuple[Ints, Ints]:
        index = int(self._rng.integers(len(self._turns)))
        first = 0 if index == 0 else int(self._turns.ends[index - 1])
        ids = self._turns[index]
        media = np.where(ids < 0, np.cumsum(ids < 0) - 1 + self._media_before[first], -1)
        return np.maximum(ids, 0), media


@dataclass(slots=True)
class TalkerBatch:
    """Holds the rows of sequences of uneven lengths; what is beyond the end of a sequence has no target. Each tensor
    has shape `(num_sequences, num_rows)`; `codes`, `targets` and `word_tokens` have one more dimension."""

    text: torch.Tensor
    media: torch.Tensor
    """Gives the row of media that stands in place of text, -1 for none."""
    special: torch.Tensor
    """Gives the codec's special token on a row, -1 for none."""
    codes: torch.Tensor
    """Gives the codes of the frame on a row, -1 for none."""
    targets: torch.Tensor
    """Gives the codes of the next frame; after the last one the first code is CODEC_EOS and the others IGNORED."""
    word_tokens: torch.Tensor
    """Gives the tokens of the next frame's word and of the one after it; IGNORED where no frame comes next."""


class TalkerBatches:
    """Draws batches, the same ones for the same seed."""

    def __init__(self, data: SpeechData, seed: int) -> None:
        self._data = data
        self._rng = np.random.default_rng((seed, 0x7A1C))
        self._answers = Answers(data, self._rng)
        self._users = UserTurns(data, self._rng)

    def draw(self, is_list: bool = False) -> TalkerBatch:
        """Returns answers of one kind, or short lists, with about `ROWS_PER_STEP` rows together."""
        kind = Answers.KINDS.index("list") if is_list else self._answers.kind()
        # A long prompt now and then, because most prompts with media are long.
        most_rows = int(self._rng.choice((8, 24, 64, 400), p=(0.3, 0.35, 0.25, 0.1)))
        sequences: list[_Rows] = []
        longest = 0
        while True:
            voice = int(self._rng.integers(len(SPEAKER_TO_ID)))
            said = self._answers.draw(kind, voice)
            sequence = self._rows(said, voice, *self._users.draw(most_rows))
            longest = max(longest, len(sequence.text))
            if sequences and longest * (len(sequences) + 1) > ROWS_PER_STEP:
                return _padded(sequences)
            sequences.append(sequence)

    def _rows(self, said: RecordedAnswer, voice: int, user_ids: Ints, user_media: Ints) -> _Rows:
        pad, first, end = self._data.tts_tokens.tolist()
        num_frames = len(said.codes)
        trailing = np.concatenate([said.text[1:], [end], np.full(num_frames, pad)])[:num_frames]
        text = np.concatenate([user_ids, self._data.header, [pad] * 4, [first], said.text[:1], trailing])
        speaker = list(SPEAKER_TO_ID.values())[voice]
        specials = [NO_THINK, THINK_BOS, THINK_EOS, speaker, CODEC_PAD, CODEC_BOS]
        num_prompt = len(text) - num_frames
        special = np.full(len(text), -1)
        special[num_prompt - len(specials) : num_prompt] = specials
        codes = np.full((len(text), NUM_CODEBOOKS), -1)
        codes[num_prompt:] = self._disturbed(said.codes)
        targets = np.full((len(text), NUM_CODEBOOKS), IGNORED)
        targets[num_prompt - 1 : -1] = said.codes
        targets[-1, 0] = CODEC_EOS
        media = np.full(len(text), -1)
        media[: len(user_media)] = user_media
        word_tokens = np.full((len(text), 2), IGNORED)
        word_tokens[num_prompt - 1 : -1] = said.word_tokens
        return _Rows(text, media, special, codes, targets, word_tokens)

    def _disturbed(self, codes: Ints) -> Ints:
        """Returns the codes with some frames replaced by frames from anywhere."""
        every = self._data.codes.values
        is_replaced = self._rng.random(len(codes)) < self._rng.uniform(0, MOST_REPLACED)
        others = every[self._rng.integers(0, len(every), len(codes))]
        return np.where(is_replaced[:, None], others, codes)


@dataclass(slots=True)
class _Rows:
    text: Ints
    media: Ints
    special: Ints
    codes: Ints
    targets: Ints
    word_tokens: Ints


def _padded(sequences: list[_Rows]) -> TalkerBatch:
    longest = max(len(one.text) for one in sequences)

    def stacked(name: str, filler: int) -> torch.Tensor:
        arrays = [getattr(one, name) for one in sequences]
        every = np.full((len(arrays), longest, *arrays[0].shape[1:]), filler)
        for row, array in zip(every, arrays, strict=True):
            row[: len(array)] = array
        return torch.from_numpy(every)

    return TalkerBatch(
        stacked("text", 0),
        stacked("media", -1),
        stacked("special", -1),
        stacked("codes", -1),
        stacked("targets", IGNORED),
        stacked("word_tokens", IGNORED),
    )


class TalkerLessons(nn.Module):
    """Holds the talker, and what it sees of the thinker, which does not learn."""

    embeddings: torch.Tensor
    media_rows: torch.Tensor

    def __init__(self, talker: Any, embeddings: torch.Tensor, media_rows: torch.Tensor) -> None:
        super().__init__()
        self.talker = talker
        self.word_heads = nn.Linear(talker.config.text_config.hidden_size, 2 * len(embeddings))
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("media_rows", media_rows, persistent=False)

    def rows(self, batch: TalkerBatch) -> torch.Tensor:
        """Returns the input rows. Has shape `(num_sequences, num_rows, hidden)`."""
        talker = self.talker
        rows: torch.Tensor = talker.text_projection(self.embeddings)[batch.text]
        is_media = batch.media >= 0
        if is_media.any():
            shown = talker.hidden_projection(self.media_rows[batch.media[is_media]])
            rows = rows.masked_scatter(is_media[..., None], shown)
        first = torch.where(batch.special >= 0, batch.special, batch.codes[..., 0])
        tables = [talker.model.codec_embedding, *talker.code_predictor.model.codec_embedding]
        for ids, table in zip((first, *batch.codes.unbind(-1)[1:]), tables, strict=True):
            rows = rows + table(ids.clamp_min(0)) * (ids >= 0)[..., None]
        return rows

    def losses(self, batch: TalkerBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the losses of the talker, of its code predictor, and of the words' tokens."""
        hidden = self.talker.model(inputs_embeds=self.rows(batch), use_cache=False).last_hidden_state
        is_said = batch.targets[..., 0] >= 0
        hidden, targets = hidden[is_said], batch.targets[is_said]
        first = cross_entropy(self.talker.codec_head(hidden), targets[:, 0])
        word_logits = self.word_heads(hidden).unflatten(-1, (2, -1)).flatten(0, 1)
        words = cross_entropy(word_logits, batch.word_tokens[is_said].flatten(), ignore_index=IGNORED)
        is_shown = (targets[:, 1] >= 0) & (torch.rand(len(targets), device=targets.device) < PREDICTED_SHARE)
        others = self._predictor_loss(hidden[is_shown], targets[is_shown])
        return first, others, words

    def _predictor_loss(self, hidden: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        predictor = self.talker.code_predictor
        tables = [self.talker.model.codec_embedding, *predictor.model.codec_embedding]
        shown = [table(codes[:, at]) for at, table in enumerate(tables[:-1])]
        states = predictor.model(inputs_embeds=torch.stack([hidden, *shown], 1), use_cache=False).last_hidden_state
        logits = [head(states[:, at + 1]) for at, head in enumerate(predictor.lm_head)]
        return cross_entropy(torch.stack(logits, 1).flatten(0, 1), codes[:, 1:].flatten())


def new_talker(thinker: dict[str, Any], seed: int) -> Any:
    """Returns the talker with new weights. transformers leaves the experts of a talker without any and its routers at
    zero, so every parameter gets its value here."""
    torch.manual_seed(seed)
    talker = Qwen3OmniMoeTalkerForConditionalGeneration(Qwen3OmniMoeTalkerConfig(**talker_config(thinker)))
    with torch.no_grad():
        for name, parameter in talker.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            elif "codec_embedding" in name:
                parameter.normal_(0, EMBEDDING_STD)
            elif name.endswith("mlp.gate.weight"):
                parameter.normal_(0, ROUTER_STD)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return talker


def train_talker(
    data: SpeechData,
    thinker: dict[str, Any],
    embeddings: torch.Tensor,
    seed: int,
    num_steps: int,
    device: torch.device,
    quiet: bool = False,
) -> Any:
    """Returns the talker after `num_steps`, on the CPU in float32. `thinker` is the thinker's config, `embeddings` its
    table of text embeddings."""
    talker = new_talker(thinker, seed)
    lessons = TalkerLessons(talker, embeddings.float(), torch.from_numpy(data.media_rows)).to(device).train()
    optimizers = Optimizers(lessons, PEAK_RATE, num_steps, {})
    batches = TalkerBatches(data, seed)
    smooth = [0.0, 0.0, 0.0]
    with tqdm(range(num_steps), desc="talker", mininterval=5, disable=quiet) as bar:
        for step in bar:
            batch = batches.draw(is_list=step < LISTS_SHARE * num_steps)
            moved = TalkerBatch(*(getattr(batch, name).to(device) for name in TalkerBatch.__slots__))
            losses = lessons.losses(moved)
            torch.stack(losses).sum().backward()
            torch.nn.utils.clip_grad_norm_(lessons.parameters(), GRADIENT_NORM)
            optimizers.step()
            if step % 10 == 0:
                values = [float(loss.detach()) for loss in losses]
                smooth = [0.9 * old + 0.1 * new for old, new in zip(smooth, values, strict=True)] if step else values
                bar.set_postfix(first=f"{smooth[0]:.3f}", others=f"{smooth[1]:.3f}", words=f"{smooth[2]:.3f}")
    return talker.cpu().eval()
