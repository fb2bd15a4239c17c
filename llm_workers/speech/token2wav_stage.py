"""Implements the stage that turns codes of Qwen2.5-Omni into samples: `Token2WavStage`, of the kind `generation`.

It runs transformers' own `Qwen2_5OmniToken2WavModel`: a diffusion transformer makes a mel spectrogram in several steps,
and BigVGAN makes samples of it. In each of these steps, frames look at frames before and after them, so that a sample
depends on codes far away; the first sample is known when the last code is there. So this stage waits for the last chunk
and decodes each request as a whole. The noise from which the diffusion begins depends on the request's seed alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fabric.contracts import InvalidRequest, ProtocolError, StageKey, StageRequest
from llm_workers.stages import StageChunk, StageOutput, StageSpan


@dataclass(frozen=True, slots=True)
class SpokenVoice:
    """A `SpokenVoice` is how a voice sounds, from the checkpoint's `spk_dict.pt`."""

    conditioning: torch.Tensor
    """Has shape `(1, speaker_width)`."""
    reference_mel: torch.Tensor
    """Has shape `(1, num_mel_frames, mel_dim)`."""


class Token2WavStage:
    """Implements `StageModel` over a `Qwen2_5OmniToken2WavModel`. Only the engine's thread may call it."""

    def __init__(self, part: Any, name_to_voice: Mapping[str, SpokenVoice], default_voice: str) -> None:
        """Takes a loaded model in float32. The names of voices are in lower case."""
        self._part, self._name_to_voice, self._default_voice = part, name_to_voice, default_voice
        self._num_codes: int = part.code2wav_dit_model.config.num_embeds
        self._key_to_request: dict[StageKey, _WholeRequest] = {}

    @property
    def num_states(self) -> int:
        """Returns how many requests are open."""
        return len(self._key_to_request)

    def open(self, request: StageRequest) -> None:
        """Takes a request in. Raises InvalidRequest for an unknown voice."""
        if request.key in self._key_to_request:
            raise ProtocolError(f"the request {request.key} is open already")
        voice = str(request.options.get("voice", self._default_voice)).lower()
        if voice not in self._name_to_voice:
            known = ", ".join(self._name_to_voice)
            raise InvalidRequest(f"there is no voice {voice!r}; this model has {known}", param="audio.voice")
        seed = int(request.options.get("seed", zlib.crc32(request.request_id.encode())))
        self._key_to_request[request.key] = _WholeRequest(self._name_to_voice[voice], seed)

    def receive(self, chunk: StageChunk) -> None:
        """Takes the next codes, int64 `(num_frames, 1)`. Raises ProtocolError if they do not continue the request."""
        request = self._key_to_request[chunk.key]
        codes: Any = chunk.payload.get("codes", np.empty((0, 1), dtype=np.int64))
        if not isinstance(codes, np.ndarray) or codes.ndim != 2 or codes.shape[1] != 1 or codes.dtype.kind not in "iu":
            raise ProtocolError(f"the codes of {chunk.key} must be integers, one for each frame")
        if len(codes) and chunk.payload.get("first_frame") != len(request.codes):
            raise ProtocolError(f"the codes of {chunk.key} do not start at frame {len(request.codes)}")
        if codes.size and not 0 <= int(codes.min()) <= int(codes.max()) <= self._num_codes:
            raise ProtocolError(f"the codes of {chunk.key} must be in [0, {self._num_codes}]")
        request.codes = np.concatenate([request.codes, codes[:, 0].astype(np.int64)])
        request.is_last = chunk.is_last

    def num_units_ready(self, key: StageKey) -> int:
        """Returns the number of codes when all have come, and 0 before."""
        request = self._key_to_request[key]
        return len(request.codes) if request.is_last else 0

    def execute(self, spans: Sequence[StageSpan]) -> Mapping[StageKey, StageOutput]:
        """Returns all samples of the requests whose last code is in the batch, and no samples of the others."""
        made = {}
        for span in spans:
            request = self._key_to_request[span.key]
            end = span.start + span.num_units
            is_finished = request.is_last and end == len(request.codes)
            samples = self._decoded(request) if is_finished else np.empty(0, dtype=np.float32)
            request.num_computed = end
            made[span.key] = StageOutput({"samples": samples, "first_sample": 0}, is_finished, len(samples))
        return made

    def is_complete(self, key: StageKey) -> bool:
        request = self._key_to_request[key]
        return request.is_last and request.num_computed == len(request.codes)

    def close(self, key: StageKey) -> None:
        del self._key_to_request[key]

    @torch.inference_mode()
    def _decoded(self, request: _WholeRequest) -> npt.NDArray[np.float32]:
        device = self._part.device
        codes = torch.from_numpy(request.codes)[None].to(device)
        devices = [device] if device.type == "cuda" else []
        # The model takes its noise from the process's generator, which must go on as if this had not been.
        with torch.random.fork_rng(devices):
            torch.manual_seed(request.seed)
            samples = self._part(
                codes, conditioning=request.voice.conditioning, reference_mel=request.voice.reference_mel
            )
        found: npt.NDArray[np.float32] = samples.reshape(-1).float().cpu().numpy()
        return found


@dataclass(slots=True)
class _WholeRequest:
    voice: SpokenVoice
    seed: int
    codes: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    is_last: bool = False
    num_computed: int = 0
