"""Loads what speaks from a checkpoint of Qwen3-Omni: the talker and code2wav, each without the other parts.

Of the thinker, only the table of its token embeddings is read, because the talker reads text through it. Weights are
loaded as other parts of checkpoints are (`modalities.families.causal_lm`): a weight that is missing or left over
refuses the checkpoint. This module knows nothing of how the parts compute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fabric.contracts import ConfigError
from llm_workers.speech.code2wav_network import Code2WavNetwork
from llm_workers.speech.code2wav_stage import Code2WavStage
from modalities.families.causal_lm.language_model import PartNames, load_part, read_pretrained_config

_MODEL_TYPE = "qwen3_omni_moe"


def load_code2wav(model_dir: Path, device: str, dtype: str, left_context_frames: int | None = None) -> Code2WavStage:
    """Loads the stage that makes samples. Raises ConfigError if the checkpoint has no code2wav that Weft can run."""
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    config = read_speech_config(model_dir)
    names = PartNames({r"^code2wav\.": ""}, (r"^thinker\.", r"^talker\."))
    part = load_part(Qwen3OmniMoeCode2Wav, model_dir, config.code2wav_config, names, (device, dtype), "sdpa")
    return Code2WavStage(Code2WavNetwork(part), left_context_frames)


def read_speech_config(model_dir: Path) -> Any:
    """Returns the config of a whole Qwen3-Omni. Raises ConfigError if the checkpoint is of another model or has no
    talker."""
    config: Any = read_pretrained_config(model_dir)
    if config.model_type != _MODEL_TYPE:
        raise ConfigError(f"{model_dir} is a {config.model_type}; Weft makes speech with {_MODEL_TYPE} only")
    if not config.enable_audio_output:
        raise ConfigError(f"{model_dir} has no talker: its config says enable_audio_output: false")
    return config
