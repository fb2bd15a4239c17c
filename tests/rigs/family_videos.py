"""Draws the videos of the suite, silent and with sound, and runs transformers' processors of the Qwen families on media
of all kinds, for rows of the family table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import reference_videos
import torch
from chat_media import picture
from family_row import FILM, MODALITY_TO_SAMPLE, Medium, Processed, pictures
from family_rows_audio import samples_of
from lossless_files import RATE, mkv
from sound_files import noise
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

FPS = 4
MEL_ATOL = 2e-4


def frames_of(medium: Medium) -> np.ndarray:
    """Returns the frames of a video. `size` is the size of a frame; its width also determines the number of frames."""
    ground = np.asarray(picture(medium.seed).resize(medium.size))
    return np.stack([np.roll(ground, 9 * index, axis=1) for index in range(8 + medium.size[0] % 3 * 2)])


def film(medium: Medium) -> bytes:
    frames = frames_of(medium)
    return mkv(frames, FPS, noise(len(frames) * RATE // FPS, medium.seed))


MODALITY_TO_SAMPLE["video"] = lambda medium: mkv(frames_of(medium), FPS)
MODALITY_TO_SAMPLE[FILM] = film


class SoundRules(NamedTuple):
    """Describes how a family's processor reads sounds."""

    padding: str | bool
    num_tokens: Any
    """Maps a number of mel frames to the number of rows."""


class VideoRules(NamedTuple):
    video_processor: str = "Qwen2VLVideoProcessor"
    seconds_key: str = ""
    """Names the argument of `generate` that holds the seconds from one row of a video to the next."""
    is_measured: bool = False
    """If this is true, the seconds follow from the frames that were sampled; otherwise from the rate that was
    requested."""
    sound_rules: SoundRules | None = None


def process(directory: Path, media: Sequence[tuple[str, bytes]], video_rules: VideoRules) -> Processed:
    """Processes pictures, videos and sounds, and returns the results in the order of the media."""
    inputs: dict[str, Any] = {}
    kind_to_made: dict[str, list[tuple[int, np.ndarray]]] = {"image": [], "video": [], "audio": []}
    if seen := pictures(media):
        processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
        made = processor(seen, return_tensors="pt")
        inputs |= dict(made)
        counts = made["image_grid_thw"].prod(-1).tolist()
        parts = made["pixel_values"].split(counts)
        kind_to_made["image"] = [(count // 4, part.numpy()) for count, part in zip(counts, parts, strict=True)]
    if videos := [data for kind, data in media if kind in ("video", FILM)]:
        looks = [_look(directory, data, video_rules) for data in videos]
        inputs |= {
            "pixel_values_videos": torch.cat([look.patches for look in looks]),
            "video_grid_thw": torch.tensor([look.grid for look in looks]),
        }
        if video_rules.seconds_key:
            inputs[video_rules.seconds_key] = torch.tensor([_row_seconds(look, video_rules) for look in looks])
        kind_to_made["video"] = [(len(look.patches) // 4, look.patches.numpy()) for look in looks]
    if heard := [data for kind, data in media if kind in ("audio", FILM)]:
        assert video_rules.sound_rules is not None
        more, kind_to_made["audio"] = _listen(directory, heard, video_rules.sound_rules)
        inputs |= more
    if any(kind == FILM for kind, _ in media):
        inputs["use_audio_in_video"] = True
    order = [item for kind, _ in media for item in (("video", "audio") if kind == FILM else (kind,))]
    kind_to_waiting = {kind: iter(made) for kind, made in kind_to_made.items()}
    in_order = [next(kind_to_waiting[kind]) for kind in order]
    atol = MEL_ATOL if heard else 0.0
    return Processed(inputs, [num for num, _ in in_order], [values for _, values in in_order], atol, tuple(order))


def features(model: Any, processed: Processed) -> list[torch.Tensor]:
    """Returns the reference's features of each medium. Features of sounds have one level."""
    inputs, found = processed.inputs, {}
    for kind, values, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        if values in inputs:
            made = getattr(model, f"get_{kind}_features")(inputs[values], inputs[grid], return_dict=True)
            levels = [made.pooler_output, *(getattr(made, "deepstack_features", None) or ())]
            found[kind] = iter([torch.stack(one) for one in zip(*levels, strict=True)])
    if "input_features" in inputs:
        made = model.get_audio_features(
            inputs["input_features"], feature_attention_mask=inputs["feature_attention_mask"]
        )
        counts = [num for num, kind in zip(processed.num_tokens, processed.modalities, strict=True) if kind == "audio"]
        found["audio"] = iter([one[None] for one in made.last_hidden_state.split(counts)])
    return [next(found[kind]) for kind in processed.modalities]


def _look(directory: Path, data: bytes, video_rules: VideoRules) -> reference_videos.Looked:
    processor = reference_videos.load(directory, video_rules.video_processor)
    return reference_videos.look(processor, *reference_videos.decoded(data))


def _row_seconds(look: reference_videos.Looked, video_rules: VideoRules) -> float:
    """Returns the seconds from one row to the next: by Qwen2_5_VLProcessor's formula if `is_measured`, otherwise by
    that of the omni processors."""
    return 2 / (look.metadata.sampled_fps if video_rules.is_measured else 2.0)


def _listen(
    directory: Path, files: Sequence[bytes], sound_rules: SoundRules
) -> tuple[dict[str, torch.Tensor], list[tuple[int, np.ndarray]]]:
    """Runs the extractor on each file alone, because in a batch the silence after a shorter sound changes the features
    at its end."""
    extractor = WhisperFeatureExtractor.from_pretrained(directory)
    found = []
    for data in files:
        made = extractor(
            samples_of(data),
            sampling_rate=RATE,
            padding=sound_rules.padding,
            return_attention_mask=True,
            return_tensors="pt",
        )
        found.append(made["input_features"][0, :, made["attention_mask"][0].bool()].T)
    padded = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    lengths = torch.tensor([len(mel) for mel in found])
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).int()
    inputs = {"input_features": padded.transpose(1, 2), "feature_attention_mask": mask}
    return inputs, [(int(sound_rules.num_tokens(len(mel))), mel.numpy()) for mel in found]
