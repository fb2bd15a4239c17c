"""Makes the models and the media that benches use.

The checkpoints of a given size are random and serve speed only: the weights are meaningless, and shapes and dtypes are
real. One more checkpoint is the demo model with a limit of frames that covers a whole video. The videos and pictures
differ, so that no cache has them. The module knows nothing of what is measured.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

VOCAB = 32_000
IMAGE_SIDE = 448
IMAGE_TOKENS = 256
NUM_FRAMES = 120
"""A film has this many frames."""
_PATCH = 28
_IMAGE_ID = 2_048
"""The token `<image>` has this id, the first one after the demo tokenizer's own tokens."""
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 13,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "eos_token_id": 0,
}
_QWEN_TOKENS = {
    "vision_start_token_id": 2044,
    "vision_end_token_id": 2045,
    "image_token_id": 2046,
    "video_token_id": 2047,
}
_QWEN_PIXELS: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": _PATCH // 2,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": IMAGE_SIDE * IMAGE_SIDE,
}
_TEMPLATE = """{%- for message in messages -%}
{{- message.role ~ ': ' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}
{{- part.text if part.type == 'text' else '<image>' -}}
{%- endfor -%}{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{{- 'assistant: ' -}}
"""


# ------------------------------------------------------------ checkpoints


def qwen2_180m() -> Path:
    """Makes a Qwen2 of about 180M random parameters in bfloat16, with the demo model's tokenizer. The checkpoint is
    seeded and cached."""
    return _cached("bench-qwen2-180m-2", _write_qwen2)


def qwen2_7b() -> Path:
    """Makes a Qwen2 with the layers of Qwen2.5-7B and the small vocabulary of the other checkpoints: 6.8 billion random
    parameters in bfloat16, 13 GB. The checkpoint is seeded and cached."""
    return _cached("bench-qwen2-7b-1", _write_qwen2_7b)


def llava_180m() -> Path:
    """Makes a LLaVA with the same language model behind a small CLIP tower (12M parameters); a picture of 448 pixels is
    one tile of 256 tokens. LLaVA was chosen because its processor also runs in transformers without torchvision.
    The checkpoint is seeded and cached."""
    return _cached("bench-llava-180m-1", _write_llava)


def qwen2_5_vl_180m() -> Path:
    """Makes a model with the same language model and M-RoPE behind a Qwen2.5-VL tower of the size of LLaVA's tower; a
    picture of 448 pixels is 1,024 patches and 256 tokens. vLLM's own server runs it too. The checkpoint
    is seeded and cached."""
    return _cached("bench-qwen2.5-vl-180m-1", _write_qwen2_5_vl)


def qwen2_5_vl_small() -> Path:
    """Makes a Qwen2.5-VL of one layer of random parameters on each side, which takes a few milliseconds where the demo
    model takes tens. A picture of 224 x 224, and a pair of frames, is 256 patches and 64 tokens; a picture of 448 x 448
    is four times as much. The checkpoint is seeded and cached."""
    return _cached("bench-qwen2.5-vl-small-1", _write_small_qwen2_5_vl)


def model_of_long_films(directory: Path) -> Path:
    """Makes a copy of the demo checkpoint in `directory`, by links, that uses up to 120 frames of a video; the demo's
    own limit is 32."""
    from deploy.demo.build import demo_checkpoint

    for file in demo_checkpoint().iterdir():
        if file.name == "video_preprocessor_config.json":
            settings = json.loads(file.read_text()) | {"max_frames": NUM_FRAMES}
            (directory / file.name).write_text(json.dumps(settings))
        else:
            (directory / file.name).symlink_to(file)
    return directory


def qwen2_5_vl_config(directory: Path) -> Path:
    """Writes the config files of a Qwen2.5-VL with features of 4,096 numbers, for plans alone; there are no weights."""
    from transformers import Qwen2_5_VLConfig

    sizes = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
    text = _TEXT | sizes | {"rope_parameters": rope, "bos_token_id": None, "pad_token_id": None}
    config = Qwen2_5_VLConfig(text_config=text, vision_config={"out_hidden_size": 4096}, **_QWEN_TOKENS)
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(directory)
    pixels = _QWEN_PIXELS | {"max_pixels": 896 * 896}
    (directory / "preprocessor_config.json").write_text(json.dumps(pixels))
    return directory


def llava_1_5_config(directory: Path) -> Path:
    """Writes the config files of a LLaVA-1.5 behind CLIP-L/14 at 336 pixels, for plans alone; there are no weights."""
    from transformers import CLIPVisionConfig, LlavaConfig

    vision = CLIPVisionConfig(hidden_size=1024, num_attention_heads=16, image_size=336, patch_size=14)
    config = LlavaConfig(vision_config=vision)
    config.architectures = ["LlavaForConditionalGeneration"]
    config.save_pretrained(directory)
    processor = {
        "patch_size": 14,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    pixels = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 336},
        "crop_size": {"height": 336, "width": 336},
    }
    (directory / "processor_config.json").write_text(json.dumps(processor))
    (directory / "preprocessor_config.json").write_text(json.dumps(pixels))
    return directory


# ------------------------------------------------------------ media


def picture(seed: int) -> bytes:
    """Makes a PNG of noise, 96 x 96."""
    pixels = np.random.default_rng(seed).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def film() -> bytes:
    """Makes an MP4 of 120 frames of 256 x 256, at 30 frames per second."""
    import av

    frames = np.random.default_rng(0).integers(0, 256, (4, 256, 256, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=30)
        stream.width = stream.height = 256
        stream.pix_fmt = "yuv420p"
        for number in range(NUM_FRAMES):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frames[number % 4], format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def another(film: bytes, number: int) -> bytes:
    """Returns the same video as a different file, which no cache has: a box of free space follows (ISO 14496-12,
    8.1.2)."""
    return film + struct.pack(">I4sQ", 16, b"free", number)


# ------------------------------------------------------------ writing checkpoints


def _cached(name: str, write: Callable[[Path], None]) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / name
    if (home / "config.json").is_file():
        return home
    draft = home.with_name(f"{name}.{os.getpid()}")
    write(draft)
    draft.replace(home)
    return home


def _write_qwen2(directory: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**_TEXT)).to(torch.bfloat16).save_pretrained(directory)
    _write_tokenizer(directory)


def _write_qwen2_7b(directory: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM._from_config(Qwen2Config(**_TEXT | sizes), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    _write_tokenizer(directory)


def _write_llava(directory: Path) -> None:
    import torch
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen2Config

    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=6,
        image_size=IMAGE_SIDE,
        patch_size=_PATCH,
        projection_dim=384,
    )
    config = LlavaConfig(
        vision_config=vision, text_config=Qwen2Config(**_TEXT), image_token_index=_IMAGE_ID, tie_word_embeddings=True
    )
    LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(directory)
    _write_tokenizer(directory)
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": _PATCH,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
    }
    pixels = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": IMAGE_SIDE},
        "crop_size": {"height": IMAGE_SIDE, "width": IMAGE_SIDE},
    }
    (directory / "processor_config.json").write_text(json.dumps(processor))
    (directory / "preprocessor_config.json").write_text(json.dumps(pixels))


def _write_qwen2_5_vl(
    directory: Path, vision_sizes: dict[str, Any] | None = None, text_sizes: dict[str, Any] | None = None
) -> None:
    """Writes the checkpoint with the demo's tokenizer and template unchanged, because they include the tokens of Qwen's
    pictures."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from deploy.demo.build import demo_checkpoint

    torch.manual_seed(0)
    text = _TEXT | (text_sizes or {})
    vision = {
        "depth": 6,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_heads": 6,
        "out_hidden_size": text["hidden_size"],
        "patch_size": _PATCH // 2,
        "fullatt_block_indexes": [2, 5],
        **(vision_sizes or {}),
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    text |= {"rope_parameters": rope, "bos_token_id": None, "pad_token_id": None}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **_QWEN_TOKENS)
    Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(demo_checkpoint() / name, directory / name)
    tokenizer = json.loads((demo_checkpoint() / "tokenizer_config.json").read_text())
    tokenizer |= {"processor_class": "Qwen2_5_VLProcessor"}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (directory / "preprocessor_config.json").write_text(json.dumps(_QWEN_PIXELS))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "pad_token_id": 0}))


def _write_small_qwen2_5_vl(directory: Path) -> None:
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 1, "fullatt_block_indexes": [0]}
    sizes = {"vocab_size": 2_048, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 8192}
    _write_qwen2_5_vl(directory, vision, sizes | heads)
    frames = {"video_processor_type": "Qwen2VLVideoProcessor", "size": {"shortest_edge": 56**2, "longest_edge": 224**2}}
    (directory / "video_preprocessor_config.json").write_text(
        json.dumps(_QWEN_PIXELS | frames | {"max_pixels": 224**2})
    )


def _write_tokenizer(directory: Path) -> None:
    """Writes the demo's tokenizer with the token `<image>` added, and a template that any server can render. It leaves
    out the settings of the demo's processor."""
    from deploy.demo.build import demo_checkpoint

    shutil.copyfile(demo_checkpoint() / "tokenizer.json", directory / "tokenizer.json")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    image = {"id": _IMAGE_ID, "content": "<image>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({**image, **flags})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((demo_checkpoint() / "tokenizer_config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("processor_class", "extra_special_tokens")}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "pad_token_id": 0}))
