"""Builds a `tokenizers.Tokenizer` from a checkpoint: tokenizer.json, or Qwen's vocab.json and merges.txt.

It knows nothing of chat templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from fabric.errors import ConfigError
from modalities.text.checkpoint import read_json

QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
# This is PRETOKENIZE_REGEX of transformers/models/qwen2/tokenization_qwen2.py.
QWEN_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Loads the tokenizer and switches off truncation and padding, which a file may ask for. Raises ConfigError if it
    can't be loaded."""
    file = model_dir / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else _from_vocabulary(model_dir)
    except ConfigError:
        raise
    except Exception as error:  # The library raises Exception itself, nothing narrower.
        raise ConfigError(f"{model_dir.name}: the tokenizer can't be loaded: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def qwen_tokenizer(model: BPE) -> Tokenizer:
    """Returns a tokenizer with Qwen's normaliser, pre-tokenizer and decoder around a BPE model."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT_PATTERN), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _from_vocabulary(model_dir: Path) -> Tokenizer:
    """Builds the tokenizer of a Qwen checkpoint that has no tokenizer.json. Raises ConfigError for other
    checkpoints."""
    config = read_json(model_dir / "tokenizer_config.json")
    if config.get("tokenizer_class") not in QWEN_CLASSES:
        raise ConfigError(f"{model_dir.name}: no tokenizer.json, and tokenizer_class is not one of {QWEN_CLASSES}")
    model = BPE.from_file(str(model_dir / "vocab.json"), str(model_dir / "merges.txt"))
    tokenizer = qwen_tokenizer(model)
    added = config.get("added_tokens_decoder")
    for token_id, entry in sorted((added if isinstance(added, Mapping) else {}).items(), key=lambda item: int(item[0])):
        tokenizer.add_tokens([AddedToken(**{key: entry[key] for key in ADDED_TOKEN_FIELDS if key in entry})])
        if tokenizer.token_to_id(entry["content"]) != int(token_id):
            raise ConfigError(f"{model_dir.name}: {entry['content']} can't take the id {token_id}")
    return tokenizer
