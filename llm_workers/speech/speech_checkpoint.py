"""Loads what speaks from a checkpoint of Qwen3-Omni: the talker and code2wav, each without the other parts.

Of the thinker, only the table of its token embeddings is read, because the talker reads text through it. Weights are
loaded as other parts of checkpoints are (`modalities.families.causal_lm`): a weight that is missing or left over
refuses the checkpoint. This module knows nothing of how the parts compute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fabric.contracts import ConfigError
from llm_workers.compute import register_attention
from llm_workers.speech.code2wav_network import Code2WavNetwork
from llm_workers.speech.code2wav_stage import Code2WavStage
from llm_workers.speech.talker_network import TalkerNetwork
from llm_workers.speech.talker_options import TalkerDefaults
from llm_workers.speech.talker_prompt import TalkerRows, TalkerTokens
from llm_workers.speech.talker_stage import TalkerSettings, TalkerStage
from modalities.checkpoint_files import read_json_if_present, read_quantisation
from modalities.checkpoint_tensors import open_tensors
from modalities.families.causal_lm.language_model import PartNames, load_part, read_pretrained_config
from modalities.registry import REGISTRY
from modalities.torch_dtypes import torch_dtype

_MODEL_TYPE = "qwen3_omni_moe"
_TEXT_EMBEDDINGS = "thinker.model.embed_tokens.weight"
_NUM_SUPPRESSED = 1024
"""Counts the ids at the end of the talker's vocabulary that are not codes and are never drawn, except for the end of
speech. The number is that of transformers' `generate`."""
_EXPERTS = "grouped_mm"
"""Names the implementation of experts in transformers that computes all of them in one product, as for the thinker."""


def load_talker(
    model_dir: Path, device: str, dtype: str, pool: tuple[int, int], attention: str = "auto"
) -> TalkerStage:
    """Loads the stage that makes codec frames. `pool` is the (num_blocks, block_size) of its KV, and `attention` the
    name of the attention's backend. Raises ConfigError if the checkpoint has no talker that Weft can run."""
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerForConditionalGeneration

    config = read_speech_config(model_dir)
    talker = config.talker_config
    generation = read_json_if_present(model_dir / "generation_config.json")
    tokens, vocab_size = _tokens(config, generation), talker.text_config.vocab_size
    settings = TalkerSettings(
        new_rows=lambda prompt, speaker: TalkerRows(prompt, tokens, speaker),
        codec_ends=frozenset([tokens.codec_eos]),
        suppressed=[
            code for code in range(max(0, vocab_size - _NUM_SUPPRESSED), vocab_size) if code != tokens.codec_eos
        ],
        prompt_codes=frozenset(),
        defaults=TalkerDefaults.of(talker.speaker_id, generation),
        family=REGISTRY.load_family(model_dir),
    )
    _register_expert_names()
    names = PartNames({r"^talker\.": ""}, (r"^thinker\.", r"^code2wav\."))
    kind, place = Qwen3OmniMoeTalkerForConditionalGeneration, (device, dtype)
    part = load_part(kind, model_dir, talker, names, place, register_attention())
    part.model.set_experts_implementation(_EXPERTS)
    network = TalkerNetwork(part, _text_embeddings(model_dir).to(device, torch_dtype(dtype)))
    return TalkerStage(network, settings, pool, attention)


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


def _register_expert_names() -> None:
    """Tells transformers how the weights of a talker's experts are named in checkpoints. It knows that for the whole
    model only, and would look for the joined weights in a talker that is loaded alone. The call is idempotent and holds
    for this process."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    name = "Qwen3OmniMoeTalkerForConditionalGeneration"
    register_checkpoint_conversion_mapping(name, get_checkpoint_conversion_mapping(_MODEL_TYPE), overwrite=True)


def _tokens(config: Any, generation: Any) -> TalkerTokens:
    talker = config.talker_config
    ends = generation.get("eos_token_id") or ()
    return TalkerTokens(
        im_start=config.im_start_token_id,
        user=config.user_token_id,
        assistant=config.assistant_token_id,
        tts_pad=config.tts_pad_token_id,
        tts_bos=config.tts_bos_token_id,
        tts_eos=config.tts_eos_token_id,
        text_ends=frozenset([config.im_end_token_id, *([ends] if isinstance(ends, int) else ends)]),
        codec_heads=(talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id),
        codec_pad=talker.codec_pad_id,
        codec_bos=talker.codec_bos_id,
        codec_eos=talker.codec_eos_token_id,
    )


def _text_embeddings(model_dir: Path) -> torch.Tensor:
    """Returns the thinker's table of embeddings, and reads no other weight. Raises ConfigError if it is missing."""
    with open_tensors(model_dir, [f"^(?!{_TEXT_EMBEDDINGS}$)"], read_quantisation(model_dir)) as tensors:
        if _TEXT_EMBEDDINGS not in tensors:
            raise ConfigError(f"{model_dir} lacks {_TEXT_EMBEDDINGS}, through which the talker reads text")
        found: torch.Tensor = tensors[_TEXT_EMBEDDINGS][...]
    return found
