"""Reads the options of a checkpoint's feature extractor for sounds (transformers' WhisperFeatureExtractor) as plain
JSON.

Missing keys take the values that transformers 5.23 gives them. This module knows nothing of models.
"""

from __future__ import annotations

from pathlib import Path

from fabric.errors import ConfigError
from modalities.json_files import read_feature_extractor
from modalities.mel import MelOptions

_KIND = "WhisperFeatureExtractor"


def read_mel_options(model_dir: Path) -> MelOptions:
    """Returns the options in processor_config.json (nested) or preprocessor_config.json. Raises ConfigError if the
    files are missing or broken, if the extractor is of another kind, and if it adds noise or does not pad with
    silence."""
    options = read_feature_extractor(model_dir)
    kind = options.get("feature_extractor_type", _KIND)
    if kind != _KIND:
        raise ConfigError(f"unsupported feature extractor {kind!r} in {model_dir}")
    if options.get("dither") or options.get("padding_value"):
        raise ConfigError(f"the feature extractor of {model_dir} must pad with silence and add no noise")
    try:
        rate = int(options.get("sampling_rate", 16000))
        found = MelOptions(
            num_bins=int(options.get("feature_size", 80)),
            rate=rate,
            hop=int(options.get("hop_length", 160)),
            window=int(options.get("n_fft", 400)),
            chunk_samples=int(options.get("chunk_length", 30)) * rate,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the feature extractor's config of {model_dir} is broken: {error}") from error
    if min(found.num_bins, found.rate, found.hop, found.chunk_samples) < 1 or found.window < 2:
        raise ConfigError(f"the feature extractor's config of {model_dir} is broken: {found}")
    return found
