"""Reads from a checkpoint what a cluster must know of its speech before any weight is loaded: the voices, the sample
rate, and which rows of the thinker the talker takes, of which layer and at which positions.

Qwen3-Omni's talker takes the rows of media; Qwen2.5-Omni's takes those of all positions. The module imports no torch.
It knows nothing of how speech is made.
"""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric.contracts import ConfigError

QWEN3_OMNI = "qwen3_omni_moe"
"""Is the `model_type` of a whole Qwen3-Omni."""
QWEN2_5_OMNI = "qwen2_5_omni"
"""Is the `model_type` of a whole Qwen2.5-Omni."""
VOICES_FILE = "spk_dict.pt"
"""Names the file with the voices of Qwen2.5-Omni, a dict by their names that `torch.save` wrote."""
QWEN2_5_VOICE = "chelsie"
"""Names the voice of Qwen2.5-Omni that speaks if a request names none, as in transformers."""
SAMPLE_RATE = 24_000
"""Is the sample rate of both families, whose configs do not state it."""
DEFAULT_RATES = {"upsample_rates": (8, 5, 4, 3), "upsampling_ratios": (2, 2)}
"""Holds transformers' defaults of `code2wav_config`; their product is the samples of one codec frame."""
DEFAULT_ACCEPTED_LAYER = 18
"""Is transformers' default of `talker_config.accept_hidden_layer`."""
DEFAULT_REPEATS = 2
"""Is transformers' default of `token2wav_config.dit_config.repeats`, the mel frames of a code."""
DEFAULT_MEL_RATES = (5, 3, 2, 2, 2, 2)
"""Holds transformers' default of `token2wav_config.bigvgan_config.upsample_rates`; their product is the samples of one
mel frame."""
DEFAULT_NUM_LAYERS = 28
"""Is transformers' default of the layers of Qwen2.5-Omni's thinker."""

_UNPICKLING_ERRORS = (
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    AttributeError,
    TypeError,
    ValueError,
)
"""Lists what `pickle` raises on bytes that are no pickle."""


@dataclass(frozen=True, slots=True)
class SpeechTraits:
    """Holds what a checkpoint says about its speech."""

    voices: tuple[str, ...]
    """Lists the voices in lower case, the first of which speaks by default."""
    sample_rate: int
    frame_s: float
    """Is how long a codec frame plays, in seconds."""
    row_layer: int
    """Is the index of the thinker's layer whose output the talker takes."""
    needs_all_rows: bool
    """Says whether the talker takes that output at all positions that the thinker has computed, those of generated
    tokens included, or at those of media alone."""


def read_speech_traits(model_dir: Path) -> SpeechTraits:
    """Returns the traits of a checkpoint that speaks. Raises ConfigError, saying why, if it does not."""
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    kind = config.get("model_type")
    if kind not in (QWEN3_OMNI, QWEN2_5_OMNI) or "talker_config" not in config:
        raise ConfigError(
            f"stages is set, but {model_dir.name} is a {kind} without a talker; Weft makes speech with a whole "
            f"{QWEN3_OMNI} or {QWEN2_5_OMNI} only"
        )
    if config.get("enable_audio_output") is False:
        raise ConfigError(f"stages is set, but {model_dir.name} says enable_audio_output: false")
    return _qwen3_traits(model_dir, config) if kind == QWEN3_OMNI else _qwen2_5_traits(model_dir, config)


def _qwen3_traits(model_dir: Path, config: dict[str, Any]) -> SpeechTraits:
    talker: dict[str, Any] = config["talker_config"]
    voices = tuple(str(name).lower() for name in talker.get("speaker_id") or {})
    if not voices:
        raise ConfigError(f"stages is set, but {model_dir.name} names no voice (talker_config.speaker_id)")
    accepted = int(talker.get("accept_hidden_layer", DEFAULT_ACCEPTED_LAYER))
    if accepted < 1:
        raise ConfigError(f"talker_config.accept_hidden_layer is {accepted}, but Weft stores rows of layers from 1 on")
    code2wav: dict[str, Any] = config.get("code2wav_config") or {}
    num_samples = math.prod(math.prod(code2wav.get(name, default)) for name, default in DEFAULT_RATES.items())
    # transformers counts hidden states from the embeddings on, so number 1 is the output of layer 0.
    return SpeechTraits(voices, SAMPLE_RATE, num_samples / SAMPLE_RATE, accepted - 1, needs_all_rows=False)


def _qwen2_5_traits(model_dir: Path, config: dict[str, Any]) -> SpeechTraits:
    token2wav: dict[str, Any] = config.get("token2wav_config") or {}
    dit, vocoder = token2wav.get("dit_config") or {}, token2wav.get("bigvgan_config") or {}
    num_samples = dit.get("repeats", DEFAULT_REPEATS) * math.prod(vocoder.get("upsample_rates", DEFAULT_MEL_RATES))
    thinker: dict[str, Any] = (config.get("thinker_config") or {}).get("text_config") or {}
    last = int(thinker.get("num_hidden_layers", DEFAULT_NUM_LAYERS)) - 1
    voices = _voice_names(model_dir)
    return SpeechTraits(voices, SAMPLE_RATE, num_samples / SAMPLE_RATE, last, needs_all_rows=True)


def _voice_names(model_dir: Path) -> tuple[str, ...]:
    """Returns the voices of Qwen2.5-Omni in lower case, the usual one first. Raises ConfigError."""
    path = model_dir / VOICES_FILE
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as file:
                found = _NameReader(file).load()
        names = [str(name).lower() for name in found]
    except (OSError, StopIteration, zipfile.BadZipFile, *_UNPICKLING_ERRORS) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"stages is set, but the voices in {path} can't be read: {reason}") from error
    if not names:
        raise ConfigError(f"stages is set, but {path} has no voice")
    return tuple(sorted(names, key=lambda name: name != QWEN2_5_VOICE))


class _NameReader(pickle.Unpickler):
    """A `_NameReader` reads the keys of a dict that `torch.save` wrote. Tensors become None: nothing that the file
    names is imported or called."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        return _nothing

    def persistent_load(self, pid: Any) -> None:
        return None


def _nothing(*arguments: object) -> None:
    """Stands for all classes and functions that a pickled file names."""
