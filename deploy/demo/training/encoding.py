"""Encodes conversations as the model's inputs, for training and for measuring: token ids, positions, patches and
spectrograms.

The prompt is the same as that of the chat template and the reference processors (tests compare them). The module knows
no torch model; it uses transformers for the spectrogram alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from tokenizers import Tokenizer

from deploy.demo.drawing.facts import SAMPLE_RATE, ChatTurn, Clip, Picture, Sample, Sound
from modalities.families.qwen3_omni import read_config
from modalities.families.qwen_vl.patches import ImageOptions, patchify, smart_resize
from modalities.families.qwen_vl.prompt_layout import grid_positions

IGNORED = -100
"""A position with this label adds nothing to the loss."""
POSITIONS_PER_SECOND = 13
FRAMES_PER_SECOND = 2.0
_AUDIO_WINDOW = 100  # The audio tower sees this many mel frames at once.
_WINDOW_TOKENS = 13

Grid = tuple[int, int, int]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Encoded:
    """Holds one encoded conversation with its answer."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    """Holds, for each of `ids`, the token itself if it belongs to an assistant's turn, and IGNORED otherwise."""
    last_turn: int = 0
    """Gives the index in `ids` at which the last answer begins."""
    positions: list[Ints] = field(default_factory=list)
    images: list[tuple[Floats, Grid]] = field(default_factory=list)
    videos: list[tuple[Floats, Grid]] = field(default_factory=list)
    sounds: list[Floats] = field(default_factory=list)
    """Holds log-mel spectrograms, each of shape `(128, num_frames)`."""
    next_position: int = 0


class SampleEncoder:
    def __init__(self, model_dir: Path) -> None:
        """Reads the tokenizer and the configs, but no weights."""
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._options: ImageOptions = read_config(model_dir).image
        self._model_dir = model_dir
        self._mel: Callable[..., Mapping[str, Floats]] | None = None
        self._pieces = lru_cache(20_000)(self._encode)

    def encode(self, sample: Sample) -> Encoded:
        """Encodes a conversation with its answer, and sets labels on all of the assistant's turns."""
        out = Encoded()
        for turn in sample.turns:
            self._turn(out, turn)
        out.last_turn = len(out.ids) + len(self._pieces("<|im_start|>assistant\n"))
        self._turn(out, ChatTurn("assistant", (sample.answer,)))
        return out

    def _turn(self, out: Encoded, turn: ChatTurn) -> None:
        self._text(out, f"<|im_start|>{turn.role}\n")
        if turn.role == "assistant":
            self._text(out, "".join(str(part) for part in turn.parts) + "<|im_end|>", is_answer=True)
            self._text(out, "\n")
            return
        text = ""
        for part in turn.parts:
            if isinstance(part, str):
                text += part
                continue
            self._text(out, text)
            text = ""
            if isinstance(part, Picture):
                self._picture(out, part)
            elif isinstance(part, Sound):
                self._sound(out, part)
            else:
                self._clip(out, part)
        self._text(out, text + "<|im_end|>\n")

    def _text(self, out: Encoded, text: str, is_answer: bool = False) -> None:
        ids = self._pieces(text)
        self._tokens(out, ids, is_answer)
        out.positions.append(np.broadcast_to(np.arange(len(ids)) + out.next_position, (3, len(ids))))
        out.next_position += len(ids)

    def picture(self, pixels: npt.NDArray[np.uint8]) -> tuple[Floats, Grid]:
        """Returns the patches and the grid of a picture of shape `(height, width, 3)`."""
        grid = (1, *self._patch_rows(pixels))
        return patchify(self._resized(pixels, grid), self._options), grid

    def clip(self, clip: Clip) -> tuple[Floats, Grid]:
        """Returns the patches and the grid of those frames of a clip that the model sees."""
        frames = clip.frames[sampled_frames(len(clip.frames), clip.fps)]
        grid = (len(frames) // 2, *self._patch_rows(frames[0]))
        return _video_patches([self._resized(frame, grid) for frame in frames], self._options), grid

    def spectrogram(self, samples: Floats) -> Floats:
        """Returns the log-mel spectrogram of a sound. Has shape `(128, num_frames)`."""
        if self._mel is None:
            from transformers import WhisperFeatureExtractor

            self._mel = WhisperFeatureExtractor.from_pretrained(self._model_dir)
        features = self._mel(samples, sampling_rate=SAMPLE_RATE, padding=True, return_tensors="np")
        return np.asarray(features["input_features"][0], dtype=np.float32)

    def _picture(self, out: Encoded, picture: Picture) -> None:
        patches, grid = self.picture(picture.pixels)
        out.images.append((patches, grid))
        self._text(out, "<|vision_start|>")
        self._block(out, "<|image_pad|>", grid_positions(grid, self._options.merge_size, 0))
        self._text(out, "<|vision_end|>")

    def _sound(self, out: Encoded, sound: Sound) -> None:
        num_tokens = self._add_sound(out, sound)
        self._text(out, "<|audio_start|>")
        self._block(out, "<|audio_pad|>", np.broadcast_to(np.arange(num_tokens), (3, num_tokens)))
        self._text(out, "<|audio_end|>")

    def _clip(self, out: Encoded, clip: Clip) -> None:
        patches, grid = self.clip(clip)
        out.videos.append((patches, grid))
        seconds = self._options.temporal_patch_size / FRAMES_PER_SECOND
        seen = grid_positions(grid, self._options.merge_size, int(seconds * POSITIONS_PER_SECOND))
        if clip.sound is None:
            self._text(out, "<|vision_start|>")
            self._block(out, "<|video_pad|>", seen)
            self._text(out, "<|vision_end|>")
            return
        num_heard = self._add_sound(out, clip.sound)
        heard = np.broadcast_to(np.arange(num_heard), (3, num_heard))
        self._text(out, "<|vision_start|><|audio_start|>")
        both = np.concatenate([seen, heard], axis=1)
        order = np.argsort(both[0], kind="stable")
        video_id, audio_id = self._pieces("<|video_pad|>")[0], self._pieces("<|audio_pad|>")[0]
        ids = np.array([video_id] * seen.shape[1] + [audio_id] * num_heard)[order]
        self._tokens(out, ids.tolist(), False)
        out.positions.append(both[:, order] + out.next_position)
        out.next_position += int(both.max()) + 1
        self._text(out, "<|audio_end|><|vision_end|>")

    def _block(self, out: Encoded, pad: str, positions: Ints) -> None:
        self._tokens(out, self._pieces(pad) * positions.shape[1], False)
        out.positions.append(positions + out.next_position)
        out.next_position += int(positions.max()) + 1

    def _tokens(self, out: Encoded, ids: list[int], is_answer: bool) -> None:
        out.ids += ids
        out.labels += ids if is_answer else [IGNORED] * len(ids)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _patch_rows(self, pixels: npt.NDArray[np.uint8]) -> tuple[int, int]:
        height, width = smart_resize(pixels.shape[0], pixels.shape[1], self._options)
        return height // self._options.patch_size, width // self._options.patch_size

    def _resized(self, pixels: npt.NDArray[np.uint8], grid: Grid) -> npt.NDArray[np.uint8]:
        size = (grid[2] * self._options.patch_size, grid[1] * self._options.patch_size)
        if pixels.shape[:2] == size[::-1]:
            return pixels
        return np.asarray(Image.fromarray(pixels).resize(size, resample=self._options.resample))

    def _add_sound(self, out: Encoded, sound: Sound) -> int:
        mel = self.spectrogram(sound.samples)
        out.sounds.append(mel)
        return num_audio_tokens(mel.shape[1])


def sampled_frames(num_frames: int, fps: float) -> Ints:
    """Returns the indices of the frames of a clip that the model sees: two per second, an even number of them, and at
    least four and at most 32 if the clip has so many (the rule of the reference)."""
    wanted = min(max(num_frames / fps * FRAMES_PER_SECOND, 4), 32, num_frames)
    num_sampled = int(wanted // 2) * 2
    return np.arange(0, num_frames, num_frames / num_sampled)[:num_sampled].astype(np.int64)


def num_audio_tokens(num_frames: int) -> int:
    """Returns the number of tokens of a spectrogram: 13 per full window, and for the rest what remains of it after
    three convolutions of stride two."""
    rest = num_frames % _AUDIO_WINDOW
    for _ in range(3):
        rest = (rest + 1) // 2
    return rest + num_frames // _AUDIO_WINDOW * _WINDOW_TOKENS


def _video_patches(frames: list[npt.NDArray[np.uint8]], options: ImageOptions) -> Floats:
    """Returns the patches of pairs of frames, ordered as in the reference. Has shape `(num_patches, 3 * 2 *
    patch**2)`."""
    patch = options.patch_size**2
    # `patchify` fills both frames of a patch with the same picture, so this keeps only one half for each frame.
    halves = [patchify(frame, options).reshape(-1, 3, 2, patch)[:, :, 0] for frame in frames]
    pairs = [np.stack([first, second], axis=2) for first, second in zip(halves[::2], halves[1::2], strict=True)]
    return np.concatenate([pair.reshape(len(pair), -1) for pair in pairs])
