"""Makes files for tests of `modalities`: pictures in many forms, and a checkpoint directory without weights."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.25, 0.2],
    "feature_size": 16,
}
VIDEO_PREPROCESSOR = {
    key: value for key, value in PREPROCESSOR.items() if key not in ("image_processor_type", "feature_size")
} | {"min_frames": 4, "max_frames": 768}
TEXT_CONFIG = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0, 2, 3],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
VISION_CONFIG = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1, 2],
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
AUDIO_CONFIG = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "output_dim": 64,
    "downsample_hidden_size": 16,
    "num_mel_bins": 16,
    "n_window": 50,
    "n_window_infer": 100,
}
TOKENS = {
    "image_token_id": 101,
    "video_token_id": 102,
    "audio_token_id": 103,
    "audio_start_token_id": 104,
    "vision_start_token_id": 105,
    "vision_end_token_id": 106,
    "audio_end_token_id": 107,
}


def thinker_config(text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the config.json of a tiny thinker, with changes to its parts."""
    return {
        "architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"],
        "text_config": TEXT_CONFIG | (text or {}),
        "vision_config": VISION_CONFIG | (vision or {}),
        "audio_config": AUDIO_CONFIG,
        **TOKENS,
    }


def write_config(model_dir: Path, config: dict[str, Any], preprocessor: dict[str, Any] | None = None) -> Path:
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(config))
    (model_dir / "preprocessor_config.json").write_text(json.dumps(preprocessor or PREPROCESSOR))
    return model_dir


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Returns noise in `mode`. A picture of mode `P` has one transparent colour when it is saved as PNG."""
    rng = np.random.default_rng(seed)
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 65536, (height, width), dtype=np.uint16))
    if mode in ("1", "P"):
        grey = Image.fromarray(rng.integers(0, 256, (height, width), dtype=np.uint8))
        image = grey.convert("1") if mode == "1" else grey.quantize(16)
        if mode == "P":
            image.info["transparency"] = 3
        return image
    num_channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    noise = rng.integers(0, 256, height * width * num_channels, dtype=np.uint8)
    return Image.frombytes(mode, (width, height), noise.tobytes())


def encode(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def oriented(image: Image.Image, orientation: int, file_format: str = "JPEG", **options: Any) -> bytes:
    """Returns a file of the picture with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image, file_format, exif=exif, **options)


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
