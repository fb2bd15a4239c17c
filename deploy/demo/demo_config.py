"""Holds the configuration of the demo model: a thinker of Qwen3-Omni with three and a half million parameters.

The functions return plain dictionaries as they stand in the checkpoint's JSON files. The module does not know torch or
transformers.
"""

from __future__ import annotations

from deploy.demo.tokenizer import END_OF_TEXT, TURN_END, Vocabulary

ARCHITECTURE = "Qwen3OmniMoeThinkerForConditionalGeneration"
HIDDEN_SIZE = 128
PATCH_SIZE = 16
MERGE_SIZE = 2
TEMPORAL_PATCH_SIZE = 2
# The processor scales every picture and frame to about this area, because a model this small sees figures best at one
# size. Between these bounds every square is 160 pixels a side, where five small figures next to each other are
# still distinguishable.
LEAST_PIXELS, MOST_PIXELS = 136**2, 160**2
# The number of matrix rows is a multiple of this, as real checkpoints pad their vocabularies.
VOCAB_MULTIPLE = 64


def text_config(vocabulary: Vocabulary) -> dict[str, object]:
    """Returns the config of the language model: four layers, the second one with experts. The layers find in turn what
    is asked for, where that is, what stands there, and how to say it."""
    return {
        "vocab_size": -(-vocabulary.num_tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1_000_000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0, 2, 3],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        "norm_topk_prob": True,
        "pad_token_id": vocabulary.special_token_to_id[END_OF_TEXT],
        "eos_token_id": vocabulary.special_token_to_id[TURN_END],
    }


def vision_config() -> dict[str, object]:
    """Returns the config of the vision tower. The 784 position embeddings are a grid of 28 x 28 patches, which is 448
    pixels a side."""
    return {
        "depth": 3,
        "hidden_size": HIDDEN_SIZE,
        "num_heads": 4,
        "intermediate_size": 256,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        "out_hidden_size": HIDDEN_SIZE,
        "num_position_embeddings": 784,
        "deepstack_visual_indexes": [0, 1],
    }


def audio_config() -> dict[str, object]:
    return {
        "num_mel_bins": 128,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 256,
        "d_model": HIDDEN_SIZE,
        "output_dim": HIDDEN_SIZE,
        "n_window": 50,
        "n_window_infer": 800,
        "downsample_hidden_size": 32,
    }


def thinker_config(vocabulary: Vocabulary) -> dict[str, object]:
    """Returns the arguments of transformers' Qwen3OmniMoeThinkerConfig."""
    ids = vocabulary.special_token_to_id
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3_omni_moe_thinker",
        "dtype": "bfloat16",
        "text_config": text_config(vocabulary),
        "vision_config": vision_config(),
        "audio_config": audio_config(),
        "audio_token_id": ids["<|audio_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "user_token_id": vocabulary.role_to_id["user"],
        "position_id_per_seconds": 13,
        "tie_word_embeddings": False,
        "pad_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[TURN_END],
    }


def generation_config(vocabulary: Vocabulary) -> dict[str, object]:
    return {
        "do_sample": False,
        "eos_token_id": vocabulary.special_token_to_id[TURN_END],
        "pad_token_id": vocabulary.special_token_to_id[END_OF_TEXT],
    }


def _frames_config(shortest_edge: int, longest_edge: int) -> dict[str, object]:
    """Returns the settings that pictures and videos share. Edges are areas in pixels, as in Qwen's processors."""
    return {
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        "merge_size": MERGE_SIZE,
        "size": {"shortest_edge": shortest_edge, "longest_edge": longest_edge},
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
    }


def preprocessor_config() -> dict[str, object]:
    """Returns the settings of pictures and sounds in one dictionary, because Qwen3-Omni keeps them in one file."""
    return {
        **_frames_config(LEAST_PIXELS, MOST_PIXELS),
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3OmniMoeProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 300,
        "n_samples": 300 * 16_000,
        "nb_max_frames": 300 * 100,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "dither": 0.0,
    }


def video_preprocessor_config() -> dict[str, object]:
    return {
        **_frames_config(LEAST_PIXELS, MOST_PIXELS),
        "video_processor_type": "Qwen2VLVideoProcessor",
        "processor_class": "Qwen3OmniMoeProcessor",
        "do_sample_frames": True,
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 32,
    }


def processor_config() -> dict[str, object]:
    return {"processor_class": "Qwen3OmniMoeProcessor"}
