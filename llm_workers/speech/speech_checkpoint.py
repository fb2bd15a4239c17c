"""Loads what speaks from a checkpoint of Qwen3-Omni or Qwen2.5-Omni: the talker and code2wav, without the other parts.

Of the thinker, only the table of its token embeddings is read, because the talker reads text through it (and its last
norm in Qwen2.5-Omni). Weights are loaded as other parts of checkpoints are (`modalities.families.causal_lm`): a weight
that is missing or left over refuses the checkpoint. This module knows nothing of how the parts compute.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fabric.contracts import ConfigError
from llm_workers.compute import register_attention
from llm_workers.speech.code2wav_network import Code2WavNetwork
from llm_workers.speech.code2wav_stage import Code2WavStage
from llm_workers.speech.single_code_network import SingleCodeNetwork
from llm_workers.speech.single_code_prompt import SingleCodeRows, SingleCodeTokens
from llm_workers.speech.talker_network import TalkerNetwork
from llm_workers.speech.talker_options import TalkerDefaults
from llm_workers.speech.talker_prompt import TalkerRows, TalkerTokens
from llm_workers.speech.talker_stage import SpeechNetwork, TalkerSettings, TalkerStage
from llm_workers.speech.token2wav_stage import SpokenVoice, Token2WavStage
from modalities.checkpoint_files import read_json_if_present, read_quantisation
from modalities.checkpoint_tensors import open_tensors
from modalities.families.causal_lm.language_model import PartNames, load_part, read_pretrained_config
from modalities.registry import REGISTRY
from modalities.speech_traits import QWEN2_5_OMNI, QWEN2_5_VOICE, QWEN3_OMNI, VOICES_FILE
from modalities.torch_dtypes import torch_dtype

_TEXT_EMBEDDINGS = "thinker.model.embed_tokens.weight"
_NUM_SUPPRESSED = 1024
"""Counts the ids at the end of the talker's vocabulary that are not codes and are never drawn, except for the end of
speech. The number is that of transformers' `generate`."""
_LAST_NORM = "thinker.model.norm.weight"
_EXPERTS = "grouped_mm"
"""Names the implementation of experts in transformers that computes all of them in one product, as for the thinker."""


def load_talker(
    model_dir: Path, device: str, dtype: str, pool: tuple[int, int], attention: str = "auto"
) -> TalkerStage:
    """Loads the stage that makes codec frames. `pool` is the (num_blocks, block_size) of its KV, and `attention` the
    name of the attention's backend. Raises ConfigError if the checkpoint has no talker that Weft can run."""
    config = read_speech_config(model_dir)
    load = _load_qwen3_talker if config.model_type == QWEN3_OMNI else _load_qwen2_5_talker
    network, settings = load(model_dir, config, (device, dtype))
    return TalkerStage(network, settings, pool, attention)


def _load_qwen3_talker(model_dir: Path, config: Any, place: tuple[str, str]) -> tuple[SpeechNetwork, TalkerSettings]:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerForConditionalGeneration

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
    part = load_part(Qwen3OmniMoeTalkerForConditionalGeneration, model_dir, talker, names, place, register_attention())
    part.model.set_experts_implementation(_EXPERTS)
    (embeddings,) = _thinker_weights(model_dir, [_TEXT_EMBEDDINGS], place)
    return TalkerNetwork(part, embeddings), settings


def _load_qwen2_5_talker(model_dir: Path, config: Any, place: tuple[str, str]) -> tuple[SpeechNetwork, TalkerSettings]:
    from transformers import Qwen2_5OmniTalkerForConditionalGeneration

    talker = config.talker_config
    generation = read_json_if_present(model_dir / "generation_config.json")
    tokens = SingleCodeTokens(
        text_end=talker.tts_text_end_token_id,
        text_pad=talker.tts_text_pad_token_id,
        codec_pad=talker.tts_codec_pad_token_id,
        codec_begin=talker.tts_codec_start_token_id,
    )
    ends = frozenset([talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id])
    num_codes = config.token2wav_config.dit_config.num_embeds
    marks = {name: int(voice["bos_token"]) for name, voice in _voices(model_dir).items()}
    settings = TalkerSettings(
        new_rows=lambda prompt, mark: SingleCodeRows(prompt, tokens, mark),
        codec_ends=ends,
        # transformers bars the begin mark alone; other ids that are no codes would end its decoding with an error.
        suppressed=[code for code in range(num_codes, talker.vocab_size) if code not in ends],
        prompt_codes=frozenset([talker.tts_codec_mask_token_id, tokens.codec_pad, tokens.codec_begin]),
        defaults=TalkerDefaults.of(
            marks, generation, top_k=40, top_p=0.8, max_codec_frames=4096, usual_voice=QWEN2_5_VOICE
        ),
        family=REGISTRY.load_family(model_dir),
    )
    names = PartNames({r"^talker\.": ""}, (r"^thinker\.", r"^token2wav\."))
    part = load_part(Qwen2_5OmniTalkerForConditionalGeneration, model_dir, talker, names, place, register_attention())
    embeddings, norm = _thinker_weights(model_dir, [_TEXT_EMBEDDINGS, _LAST_NORM], place)
    epsilon = config.thinker_config.text_config.rms_norm_eps
    return SingleCodeNetwork(part, embeddings, (norm, epsilon)), settings


def load_code2wav(
    model_dir: Path, device: str, dtype: str, left_context_frames: int | None = None
) -> Code2WavStage | Token2WavStage:
    """Loads the stage that makes samples. Qwen2.5-Omni's always computes in float32, as in transformers, and has no
    left context. Raises ConfigError if the checkpoint has no code2wav that Weft can run."""
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    config = read_speech_config(model_dir)
    if config.model_type == QWEN2_5_OMNI:
        return _load_token2wav(model_dir, config, device)
    names = PartNames({r"^code2wav\.": ""}, (r"^thinker\.", r"^talker\."))
    part = load_part(Qwen3OmniMoeCode2Wav, model_dir, config.code2wav_config, names, (device, dtype), "sdpa")
    return Code2WavStage(Code2WavNetwork(part), left_context_frames)


def read_speech_config(model_dir: Path) -> Any:
    """Returns the config of a whole omni model. Raises ConfigError if the checkpoint is of another model or has no
    talker."""
    config: Any = read_pretrained_config(model_dir)
    if config.model_type not in (QWEN3_OMNI, QWEN2_5_OMNI):
        raise ConfigError(
            f"{model_dir} is a {config.model_type}; Weft makes speech with {QWEN3_OMNI} and {QWEN2_5_OMNI} only"
        )
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
    register_checkpoint_conversion_mapping(name, get_checkpoint_conversion_mapping(QWEN3_OMNI), overwrite=True)


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


def _thinker_weights(model_dir: Path, names: Sequence[str], place: tuple[str, str]) -> list[torch.Tensor]:
    """Returns weights of the thinker by name, and reads no other of them. Raises ConfigError if one is missing."""
    device, dtype = place
    others = [f"^(?!({'|'.join(map(re.escape, names))})$)"]
    with open_tensors(model_dir, others, read_quantisation(model_dir)) as tensors:
        if missing := [name for name in names if name not in tensors]:
            raise ConfigError(f"{model_dir} lacks {missing[0]}, which the talker needs to read the thinker's text")
        return [tensors[name][...].to(device, torch_dtype(dtype)) for name in names]


def _load_token2wav(model_dir: Path, config: Any, device: str) -> Token2WavStage:
    from transformers import Qwen2_5OmniToken2WavModel

    names = PartNames({r"^token2wav\.": ""}, (r"^thinker\.", r"^talker\."))
    place = (device, "float32")
    part = load_part(Qwen2_5OmniToken2WavModel, model_dir, config.token2wav_config, names, place, "sdpa")
    voices = {
        name: SpokenVoice(*(voice[key].to(device, torch.float32) for key in ("cond", "ref_mel")))
        for name, voice in _voices(model_dir).items()
    }
    default = QWEN2_5_VOICE if QWEN2_5_VOICE in voices else next(iter(voices))
    return Token2WavStage(part, voices, default)


def _voices(model_dir: Path) -> dict[str, Any]:
    """Returns the voices of Qwen2.5-Omni by their names in lower case, from a file of their own. Raises ConfigError."""
    path = model_dir / VOICES_FILE
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigError(f"can't read the voices in {path}: {error}") from error
    if not found:
        raise ConfigError(f"{path} has no voices")
    return {str(name).lower(): voice for name, voice in found.items()}
