"""Reads media: images, videos and sounds, from the part of a request to pixels, samples and spectrograms.

`plugin` defines the interface of a modality and the rules that all formats share; `image`, `video` and `audio`
implement it and decode. `first_bytes` reads what the beginning of a file declares while the rest is still on its way,
and `image_header` reads the size of an ordinary picture without a library's parser. `containers` opens the files of
videos and sounds and counts their packets, and `mpeg_audio` repairs MP3 files that FFmpeg does not take. `tensor_file`
reads the features of pictures that clients compute. `frame_sampling` chooses the frames of a video and the rows that
remain of them, and `spectrograms` computes log-mel spectrograms.

The router parses and probes parts through the plugins and calls `plan_media`; the families call the rest from their
plans and from `preprocess`, which runs in an encoder's decode processes. The folder knows no model: sizes, rates and
normalisation are arguments. It imports no torch.
"""

from modalities.media.audio import (
    BETA,
    NUM_CROSSINGS,
    AudioPlugin,
    Resampling,
    decode_samples,
    decode_waveform,
    num_samples_at,
    probe_sound,
)
from modalities.media.first_bytes import ENOUGH_BYTES
from modalities.media.frame_sampling import Timeline, VideoRows, sample_frames, step_rows, unit_steps
from modalities.media.image import (
    ImagePlugin,
    Normalisation,
    channel_values,
    decode_image,
    fused_channel_values,
    normalise,
    to_rgb,
)
from modalities.media.plugin import (
    JUDGED_BYTES,
    FirstVerdict,
    JudgesFirstBytes,
    MediaLimits,
    ModalityPlugin,
    ReadsFirstBytes,
    decode_base64,
    decoded_bytes,
    max_file_bytes,
    part_url,
    plan_media,
    take_decode_s,
)
from modalities.media.spectrograms import (
    DYNAMIC_RANGE,
    FLOOR,
    Extent,
    MelOptions,
    extent_of,
    log_mel,
    mel_filters,
    num_mel_frames,
)
from modalities.media.tensor_file import Tensor, features_of, integers_of, num_rows, read_tensors
from modalities.media.video import VideoPlugin, decode_frames, settled_frames

__all__ = [
    "BETA",
    "DYNAMIC_RANGE",
    "ENOUGH_BYTES",
    "FLOOR",
    "JUDGED_BYTES",
    "NUM_CROSSINGS",
    "AudioPlugin",
    "Extent",
    "FirstVerdict",
    "ImagePlugin",
    "JudgesFirstBytes",
    "MediaLimits",
    "MelOptions",
    "ModalityPlugin",
    "Normalisation",
    "ReadsFirstBytes",
    "Resampling",
    "Tensor",
    "Timeline",
    "VideoPlugin",
    "VideoRows",
    "channel_values",
    "decode_base64",
    "decode_frames",
    "decode_image",
    "decode_samples",
    "decode_waveform",
    "decoded_bytes",
    "extent_of",
    "features_of",
    "fused_channel_values",
    "integers_of",
    "log_mel",
    "max_file_bytes",
    "mel_filters",
    "normalise",
    "num_mel_frames",
    "num_rows",
    "num_samples_at",
    "part_url",
    "plan_media",
    "probe_sound",
    "read_tensors",
    "sample_frames",
    "settled_frames",
    "step_rows",
    "take_decode_s",
    "to_rgb",
    "unit_steps",
]
