"""Reads a checkpoint's files for text: its tokenizer, its chat template, the names of its special tokens, and its
end-of-turn ids.

The tokenizer is a `tokenizers.Tokenizer`, built from tokenizer.json or from Qwen's vocab.json and merges.txt. The chat
template is returned as source, and this module knows nothing of Jinja. Each function raises ConfigError for a file that
can't be used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from fabric.contracts import ConfigError
from modalities.checkpoint_files import read_json_if_present


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Loads the tokenizer and switches off truncation and padding, which a file may ask for. Raises ConfigError if it
    can't be loaded."""
    file = model_dir / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else _from_vocabulary(model_dir)
    except ConfigError:
        raise
    except Exception as error:  # The library `tokenizers` raises Exception itself, nothing narrower.
        raise ConfigError(f"{model_dir.name}: the tokenizer can't be loaded: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_vocabulary(model_dir: Path) -> Tokenizer:
    """Builds the tokenizer of a Qwen checkpoint that has no tokenizer.json. Raises ConfigError for other
    checkpoints."""
    config = read_json_if_present(model_dir / "tokenizer_config.json")
    if config.get("tokenizer_class") not in QWEN_CLASSES:
        raise ConfigError(
            f"{model_dir.name}: there is no tokenizer.json, and without it tokenizer_class must be one of "
            f"{', '.join(QWEN_CLASSES)}, not {config.get('tokenizer_class')!r}"
        )
    model = BPE.from_file(str(model_dir / "vocab.json"), str(model_dir / "merges.txt"))
    tokenizer = qwen_tokenizer(model)
    added = config.get("added_tokens_decoder")
    for token_id, entry in sorted((added if isinstance(added, Mapping) else {}).items(), key=lambda item: int(item[0])):
        tokenizer.add_tokens([AddedToken(**{key: entry[key] for key in ADDED_TOKEN_FIELDS if key in entry})])
        if (found := tokenizer.token_to_id(entry["content"])) != int(token_id):
            raise ConfigError(
                f"{model_dir.name}: the token {entry['content']} must have the id {token_id}, but it has {found}"
            )
    return tokenizer


# ------------------------------------------------------------ Qwen's tokenizer

QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
# This is PRETOKENIZE_REGEX of transformers/models/qwen2/tokenization_qwen2.py.
QWEN_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def qwen_tokenizer(model: BPE) -> Tokenizer:
    """Returns a tokenizer with Qwen's normaliser, pre-tokenizer and decoder around a BPE model."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT_PATTERN), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# ------------------------------------------------------------ the settings


def chat_template(model_dir: Path) -> str:
    """Returns the chat template. It comes from the first of chat_template.jinja, chat_template.json and
    tokenizer_config.json that contains one; ConfigError is raised if none does."""
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json_if_present(model_dir / name).get("chat_template")
        if isinstance(template, list):  # An older form is a list of named templates.
            template = {named["name"]: named["template"] for named in template}.get("default")
        if isinstance(template, str):
            return template
    raise ConfigError(
        f"{model_dir.name}: there is no chat template in chat_template.jinja, chat_template.json or "
        "tokenizer_config.json"
    )


def special_token_names(model_dir: Path) -> dict[str, str]:
    """Returns the special tokens of tokenizer_config.json: a mapping from names such as `eos_token` to their texts."""
    config = read_json_if_present(model_dir / "tokenizer_config.json")
    extra = config.get("extra_special_tokens")
    named = {**config, **(extra if isinstance(extra, Mapping) else {})}
    names = {}
    for name, value in named.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            names[name] = text
    return names


def eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Returns the end-of-turn ids without repeats. They come from generation_config.json or else from config.json (its
    top level, then the text model's part)."""
    config = read_json_if_present(model_dir / "config.json")
    for source in (read_json_if_present(model_dir / "generation_config.json"), config, *_text_configs(config)):
        ids = source.get("eos_token_id")
        if isinstance(ids, int):
            return (ids,)
        if isinstance(ids, list) and ids and all(isinstance(item, int) for item in ids):
            return tuple(dict.fromkeys(ids))
    raise ConfigError(f"{model_dir.name}: neither generation_config.json nor config.json has an eos_token_id")


def _text_configs(config: Mapping[str, object]) -> list[Mapping[str, object]]:
    thinker = config.get("thinker_config")
    owners = [config, *([thinker] if isinstance(thinker, Mapping) else [])]
    return [text for owner in owners if isinstance(text := owner.get("text_config"), Mapping)]
