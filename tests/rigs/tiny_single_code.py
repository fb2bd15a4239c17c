"""Makes a tiny random whole Qwen2.5-Omni: thinker, talker with one code per frame, and token2wav with two voices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from family_row import spread
from family_rows_qwen_vl import AUDIO25, QWEN2_5_OMNI, TEXT, VISION25
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

NUM_CODES = 40
CODEC_PAD, CODEC_BEGIN, CODEC_END, CODEC_MASK = range(NUM_CODES, NUM_CODES + 4)
TEXT_PAD, TEXT_BEGIN, TEXT_END = 125, 126, 127
TALKER_CONFIG: dict[str, Any] = {
    "vocab_size": NUM_CODES + 6,
    "tts_text_start_token_id": TEXT_BEGIN,
    "tts_text_end_token_id": TEXT_END,
    "tts_text_pad_token_id": TEXT_PAD,
    "tts_codec_start_token_id": CODEC_BEGIN,
    "tts_codec_end_token_id": CODEC_END,
    "tts_codec_pad_token_id": CODEC_PAD,
    "tts_codec_mask_token_id": CODEC_MASK,
    "embedding_size": TEXT["hidden_size"],
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_parameters": TEXT["rope_parameters"],
}
DIT_CONFIG = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "emb_dim": 16,
    "block_size": 6,
    "look_ahead_layers": [1],
    "look_backward_layers": [0],
    "num_embeds": NUM_CODES,
    "mel_dim": 16,
    "enc_emb_dim": 12,
    "enc_dim": 8,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_attention_channels": 8,
    "enc_se_channels": 8,
}
BIGVGAN_CONFIG = {
    "mel_dim": 16,
    "upsample_initial_channel": 16,
    "upsample_rates": [5, 3, 2],
    "upsample_kernel_sizes": [11, 7, 4],
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": [[1, 3, 5]],
}


def tiny_single_code(vocab_size: int = TEXT["vocab_size"], **media_ids: int) -> Any:
    """Returns the model in evaluation mode. When it is saved, a file with its voices is saved beside it. `media_ids`
    replaces ids of the thinker's config that stand for media."""
    thinker = QWEN2_5_OMNI.build().config.to_dict() | media_ids
    media = {key: thinker[key] for key in thinker if key.endswith(("token_index", "_start_token_id", "_end_token_id"))}
    text = TEXT | {"vocab_size": vocab_size}
    config = Qwen2_5OmniConfig(
        thinker_config=thinker | {"text_config": text, "vision_config": VISION25, "audio_config": AUDIO25},
        talker_config=TALKER_CONFIG | media,
        token2wav_config={"dit_config": DIT_CONFIG, "bigvgan_config": BIGVGAN_CONFIG},
    )
    torch.manual_seed(0)
    model = spread(Qwen2_5OmniForConditionalGeneration(config))
    with torch.no_grad():
        for parameter in model.token2wav.parameters():
            parameter.mul_(0.5)
        model.talker.codec_head.weight[[CODEC_PAD, CODEC_END]] *= 0.7
        # The reference would draw ids that are no codes, and its decoding would fail on them.
        model.talker.codec_head.weight[[CODEC_BEGIN, *range(CODEC_MASK, NUM_CODES + 6)]] = 0
    voices = {
        name: {"bos_token": TEXT_BEGIN - index, "cond": torch.randn(1, 12), "ref_mel": torch.randn(1, 20, 16)}
        for index, name in enumerate(("Chelsie", "Ethan"))
    }
    save = model.save_pretrained

    def save_pretrained(path: Path, *arguments: Any, **options: Any) -> None:
        save(path, *arguments, **options)
        torch.save(voices, Path(path) / "spk_dict.pt")

    model.save_pretrained = save_pretrained
    return model
