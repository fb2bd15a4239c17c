"""Makes tiny random parts of Qwen3-Omni that speak, whose layers all matter to the result.

The initial values of transformers hide mistakes: layer scales of 0.01 and gammas of 1e-6 make the context of code2wav
invisible, its convolutions make an output of 1e-6, and the talker's experts are not initialised at all. So every weight
is drawn here, and scales and gammas are 1.
"""

from __future__ import annotations

from typing import Any

import torch
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
