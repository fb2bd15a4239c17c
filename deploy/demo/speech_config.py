"""Holds the configuration of the demo's voice: the talker, code2wav, and the whole model around the thinker.

The functions return plain dictionaries as they stand in the checkpoint's config.json. The module does not know torch or
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploy.demo.tokenizer import TTS_BOS, TTS_EOS, TTS_PAD, Vocabulary

ARCHITECTURE = "Qwen3OmniMoeForConditionalGeneration"
SAMPLE_RATE = 24_000
UPSAMPLE_RATES = (8, 5, 4, 3)
UPSAMPLING_RATIOS = (2, 2)
FRAME_SAMPLES = 1920
"""Counts the samples of one codec frame, 80 ms: the product of all rates and ratios."""
LOST_SAMPLES = 555
"""Counts the samples by which an output of code2wav is shorter than its frames. Each transposed convolution of the
decoder trims one stride of its own at the end, which is a number of samples at the end of all."""

NUM_CODEBOOKS = 4
CODEBOOK_SIZE = 256
# transformers suppresses the last 1,024 ids of the talker except the end of speech, so the special ids stand there.
NUM_RESERVED = 1024
CODEC_PAD, CODEC_BOS, CODEC_EOS, NO_THINK, THINK_BOS, THINK_EOS = range(CODEBOOK_SIZE, CODEBOOK_SIZE + 6)
SPEAKER_TO_ID = {"ethan": CODEBOOK_SIZE + 6, "chelsie": CODEBOOK_SIZE + 7}
"""Maps each voice to its id. The first name is the one that transformers takes where none is given."""
ACCEPT_HIDDEN_LAYER = 2
"""Names the layer of the thinker whose outputs at the positions of media the talker sees; the thinker has four."""

TALKER_GENERATION: Mapping[str, Any] = {"talker_do_sample": False, "talker_repetition_penalty": 1.0}
"""Holds what stands in generation_config.json for the talker: the most likely codes, and no penalty for codes that come
again, because the frames of a word that is said twice are the same."""
CODE2WAV_HIDDEN = 128
TALKER_HIDDEN = 128
SLIDING_WINDOW = 8


def code2wav_config() -> dict[str, Any]:
    return {
        "model_type": "qwen3_omni_moe_code2wav",
        "codebook_size": CODEBOOK_SIZE,
        "num_quantizers": NUM_CODEBOOKS,
        "hidden_size": CODE2WAV_HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "sliding_window": SLIDING_WINDOW,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "layer_scale_initial_scale": 0.1,
        "decoder_dim": 192,
        "upsample_rates": list(UPSAMPLE_RATES),
        "upsampling_ratios": list(UPSAMPLING_RATIOS),
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def talker_config(thinker: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the talker for a thinker's config."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return {
        "model_type": "qwen3_omni_moe_talker",
        "text_config": {
            "model_type": "qwen3_omni_moe_talker_text",
            "vocab_size": CODEBOOK_SIZE + NUM_RESERVED,
            "hidden_size": TALKER_HIDDEN,
            "intermediate_size": 256,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            **heads,
        },
        "code_predictor_config": {
            "model_type": "qwen3_omni_moe_talker_code_predictor",
            "vocab_size": CODEBOOK_SIZE,
            "hidden_size": TALKER_HIDDEN,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_code_groups": NUM_CODEBOOKS,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            **heads,
        },
        "num_code_groups": NUM_CODEBOOKS,
        "thinker_hidden_size": thinker["text_config"]["hidden_size"],
        "accept_hidden_layer": ACCEPT_HIDDEN_LAYER,
        "codec_pad_id": CODEC_PAD,
        "codec_bos_id": CODEC_BOS,
        "codec_eos_token_id": CODEC_EOS,
        "codec_nothink_id": NO_THINK,
        "codec_think_bos_id": THINK_BOS,
        "codec_think_eos_id": THINK_EOS,
        "speaker_id": SPEAKER_TO_ID,
        "audio_token_id": thinker["audio_token_id"],
        "image_token_id": thinker["image_token_id"],
        "video_token_id": thinker["video_token_id"],
        "vision_start_token_id": thinker["vision_start_token_id"],
        "audio_start_token_id": thinker["audio_start_token_id"],
        "position_id_per_seconds": thinker["position_id_per_seconds"],
        "spatial_merge_size": thinker["vision_config"]["spatial_merge_size"],
    }


def whole_config(thinker: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the config of the whole model around a thinker's config."""
    token_to_id = vocabulary.special_token_to_id
    inner = {key: value for key, value in thinker.items() if key != "transformers_version"}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3_omni_moe",
        "dtype": "bfloat16",
        "enable_audio_output": True,
        "thinker_config": {**inner, "architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"]},
        "talker_config": talker_config(thinker),
        "code2wav_config": code2wav_config(),
        "im_start_token_id": token_to_id["<|im_start|>"],
        "im_end_token_id": token_to_id["<|im_end|>"],
        "tts_pad_token_id": token_to_id[TTS_PAD],
        "tts_bos_token_id": token_to_id[TTS_BOS],
        "tts_eos_token_id": token_to_id[TTS_EOS],
        "system_token_id": vocabulary.role_to_id["system"],
        "user_token_id": vocabulary.role_to_id["user"],
        "assistant_token_id": vocabulary.role_to_id["assistant"],
    }
