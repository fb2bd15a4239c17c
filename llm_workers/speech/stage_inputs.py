"""Makes the input of the next stage from what a stage of Qwen3-Omni or Qwen2.5-Omni makes.

A stage config names these functions by import path; the transfer adapter calls them in the engine's thread
(`llm_workers.stages.NextStageInput`). `thinker_to_talker` hands hidden states and tokens on as they come, and while
many requests run a few tokens at a time, with the hidden states that come with them.
`talker_to_code2wav` collects frames: the first chunk is small, so that the sound begins early, and the next ones grow
with what the listener has, up to the usual size. In the sequential pipeline, both return one payload at the end.

The module is pure, and knows nothing of tensors, connectors and keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from llm_workers.stages import ChunkAccumulator, Payload, StageOutput

MOST_CHUNK_TOKENS = 8
"""Limits the tokens of a chunk unless the stage config sets `most_chunk_tokens`."""
_RUNNING_PER_TOKEN, _SENT_PER_TOKEN = 4, 4
"""A chunk has at most one token for each of so many running requests, because each chunk costs time of the thinker and
the talker, and at most one for each of so many tokens before it. The talker makes a frame of sound from each token, so
those before last far longer than the few that are held back."""
CODEC_CHUNK_FRAMES = 25
"""Is the size of the later chunks of frames unless the stage config sets `codec_chunk_frames`: 2 s of sound."""
LEAST_FIRST_FRAMES = 4
"""Is the size of the first chunk while few requests run, unless the stage config sets `initial_codec_chunk_frames`."""
_RUNNING_PER_FRAME = 4
"""With more running requests than this many for each frame of the least first chunk, first chunks grow, because each
chunk is a place in a batch of the next stage."""
_GROWTH = 2
"""A chunk has at most so many times the frames of all chunks before it, so that it is there before those have been
heard if making it takes less than half of the time for which they play."""


def thinker_to_talker(accumulator: ChunkAccumulator, output: StageOutput) -> Payload | None:
    """Returns hidden states of the thinker (`prompt_hidden`) at positions of its sequence (`prompt_hidden_at`), which
    may be those of generated tokens, and generated tokens (`token_ids`, `first_index`)."""
    if output.is_finished or _size(output.values, "token_ids") or _size(output.values, "prompt_hidden"):
        accumulator.held.append(output)
    is_due = accumulator.is_async and _is_due(accumulator)
    if not (is_due or output.is_finished):
        return None
    held = _taken(accumulator)
    payload: dict[str, Any] = {}
    for name in ("prompt_hidden", "prompt_hidden_at", "token_ids"):
        if found := [values[name] for values in held if name in values]:
            payload[name] = np.concatenate(found)
    if first := [values["first_index"] for values in held if "first_index" in values]:
        payload["first_index"] = first[0]
    return payload


def _is_due(accumulator: ChunkAccumulator) -> bool:
    """Returns whether what is held for the talker makes a chunk: rows alone always do, and tokens if there are enough
    of them. The row of a token comes with the token behind it, so it waits as long as that."""
    tokens = [output.values for output in accumulator.held if _size(output.values, "token_ids")]
    if not tokens:
        return bool(accumulator.held)
    most = min(
        int(accumulator.settings.get("most_chunk_tokens", MOST_CHUNK_TOKENS)),
        accumulator.num_running // _RUNNING_PER_TOKEN,
        int(tokens[0]["first_index"]) // _SENT_PER_TOKEN,
    )
    return sum(_size(values, "token_ids") for values in tokens) >= most


def talker_to_code2wav(accumulator: ChunkAccumulator, output: StageOutput) -> Payload | None:
    """Returns `codes`, int64 `(num_frames, num_groups)`, and `first_frame`, once there are enough frames for a
    chunk."""
    if output.num_outputs:
        accumulator.held.append(output)
    num_frames = sum(held.num_outputs for held in accumulator.held)
    is_due = accumulator.is_async and num_frames > 0 and num_frames >= _chunk_frames(accumulator)
    if not (is_due or output.is_finished):
        return None
    held = _taken(accumulator)
    if not held:
        return {}
    return {"codes": np.concatenate(_each(held, "codes")), "first_frame": held[0]["first_frame"]}


def _chunk_frames(accumulator: ChunkAccumulator) -> int:
    """Returns the size of the next chunk in frames, of which at least one is held."""
    settings = accumulator.settings
    size = int(settings.get("codec_chunk_frames", CODEC_CHUNK_FRAMES))
    if accumulator.num_chunks:
        num_sent = int(accumulator.held[0].values["first_frame"])
        return min(size, _GROWTH * num_sent)
    chosen = accumulator.request.options.get("initial_codec_chunk_frames")
    if chosen is not None:
        return min(size, int(chosen))
    least = int(settings.get("initial_codec_chunk_frames", LEAST_FIRST_FRAMES))
    return min(size, max(least, accumulator.num_running // _RUNNING_PER_FRAME))


def _taken(accumulator: ChunkAccumulator) -> list[Payload]:
    """Returns the values of the held outputs, which are then no longer held."""
    held = [output.values for output in accumulator.held]
    accumulator.held.clear()
    return held


def _each(held: Iterable[Payload], name: str) -> Sequence[Any]:
    return [values[name] for values in held]


def _size(values: Payload, name: str) -> int:
    found = values.get(name)
    return len(found) if isinstance(found, np.ndarray) else 0
