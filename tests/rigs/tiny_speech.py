"""Makes tiny random parts of Qwen3-Omni that speak, whose layers all matter to the result.

The initial values of transformers hide mistakes: layer scales of 0.01 and gammas of 1e-6 make the context of code2wav
invisible, its convolutions make an output of 1e-6, and the talker's experts are not initialised at all. So every weight
is drawn here, and scales and gammas are 1.
"""

from __future__ import annotations

from typing import Any

import torch
from family_row import spread
from modalities_files import AUDIO_CONFIG, TEXT_CONFIG, TOKENS, VISION_CONFIG
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

CODE2WAV_CONFIG: dict[str, Any] = {
    "codebook_size": 32,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "sliding_window": 7,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_quantizers": 3,
    "upsample_rates": [4, 3, 2],
    "upsampling_ratios": [2, 2],
    "decoder_dim": 16,
}


def tiny_code2wav(**changes: Any) -> Qwen3OmniMoeCode2Wav:
    """Returns a random code2wav in evaluation mode, whose output has a level of 0.2."""
    torch.manual_seed(0)
    model = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**(CODE2WAV_CONFIG | changes))).eval()
    set_code2wav(model)
    return model


@torch.no_grad()
def set_code2wav(model: Qwen3OmniMoeCode2Wav) -> None:
    """Draws all weights of `model`, and scales its last convolution so that nothing is clipped."""
    for module in model.modules():
        if isinstance(module, torch.nn.Conv1d):
            fan_in = module.weight.shape[1] * module.weight.shape[2]
            module.weight.normal_(0, 0.7 * fan_in**-0.5)
        elif isinstance(module, torch.nn.ConvTranspose1d):
            fan_in = module.weight.shape[0] * module.weight.shape[2] // module.stride[0]
            module.weight.normal_(0, 0.7 * fan_in**-0.5)
        elif isinstance(module, torch.nn.Linear):
            module.weight.normal_(0, module.weight.shape[1] ** -0.5)
        elif isinstance(module, torch.nn.Embedding):
            module.weight.normal_(0, 1)
    for name, parameter in model.named_parameters():
        if name.endswith((".scale", ".gamma")):
            parameter.fill_(1)
        elif name.endswith((".alpha", ".beta")):
            parameter.normal_(-0.5, 0.2)
    last = model.decoder[-1].conv
    seen: list[torch.Tensor] = []
    hook = last.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(torch.randint(0, model.config.codebook_size, (1, model.config.num_quantizers, 30)))
    hook.remove()
    gain = 0.2 / seen[0].std()
    last.weight.mul_(gain)
    last.bias.copy_((last.bias - seen[0].mean()) * gain)


TOKENS_OF_CHAT = {
    "im_start_token_id": 120,
    "im_end_token_id": 121,
    "system_token_id": 122,
    "user_token_id": 123,
    "assistant_token_id": 124,
    "tts_pad_token_id": 125,
    "tts_bos_token_id": 126,
    "tts_eos_token_id": 127,
}
NEWLINE = 119
NUM_CODES = 32
TALKER_CONFIG: dict[str, Any] = {
    "num_code_groups": 3,
    "thinker_hidden_size": 64,
    "accept_hidden_layer": 2,
    "spatial_merge_size": 2,
    "codec_eos_token_id": NUM_CODES,
    "codec_pad_id": NUM_CODES + 1,
    "codec_bos_id": NUM_CODES + 2,
    "codec_nothink_id": NUM_CODES + 3,
    "codec_think_bos_id": NUM_CODES + 4,
    "codec_think_eos_id": NUM_CODES + 5,
    "speaker_id": {"ethan": NUM_CODES + 6, "chelsie": NUM_CODES + 7},
    "text_config": {
        "vocab_size": NUM_CODES + 1024,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": TEXT_CONFIG["rope_parameters"],
    },
    "code_predictor_config": {
        "vocab_size": NUM_CODES,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_code_groups": 3,
    },
}


def tiny_omni() -> Qwen3OmniMoeForConditionalGeneration:
    """Returns a random whole Qwen3-Omni in evaluation mode: thinker, talker and code2wav."""
    media = {**TOKENS, "position_id_per_seconds": 13}
    config = Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": dict(TEXT_CONFIG),
            "vision_config": dict(VISION_CONFIG),
            "audio_config": dict(AUDIO_CONFIG),
            **media,
        },
        talker_config=TALKER_CONFIG | media,
        code2wav_config=dict(CODE2WAV_CONFIG),
        **TOKENS_OF_CHAT,
    )
    torch.manual_seed(0)
    model = spread(Qwen3OmniMoeForConditionalGeneration(config))
    set_code2wav(model.code2wav)
    with torch.no_grad():  # Some answers then end before their limit.
        model.talker.codec_head.weight[NUM_CODES] *= 2
    # The reference computes the talker's positions from the thinker's settings, and does not find them in its config.
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    return model
