"""Reads a checkpoint's settings for text: the chat template, the names of special tokens, the end-of-turn ids.

It knows nothing of tokenizers or Jinja. Each function raises ConfigError for a file that can't be used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from fabric.errors import ConfigError


def chat_template(model_dir: Path) -> str:
    """Returns the chat template. It comes from the first of chat_template.jinja, chat_template.json and
    tokenizer_config.json that contains one; ConfigError is raised if none does."""
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(model_dir / name).get("chat_template")
        if isinstance(template, list):  # An older form is a list of named templates.
            template = {named["name"]: named["template"] for named in template}.get("default")
        if isinstance(template, str):
            return template
    raise ConfigError(f"{model_dir.name}: no chat template (chat_template.jinja or tokenizer_config.json)")


def special_token_names(model_dir: Path) -> dict[str, str]:
    """Returns the special tokens of tokenizer_config.json: a mapping from names such as `eos_token` to their texts."""
    config = read_json(model_dir / "tokenizer_config.json")
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
    config = read_json(model_dir / "config.json")
    for source in (read_json(model_dir / "generation_config.json"), config, *_text_configs(config)):
        ids = source.get("eos_token_id")
        if isinstance(ids, int):
            return (ids,)
        if isinstance(ids, list) and ids and all(isinstance(item, int) for item in ids):
            return tuple(dict.fromkeys(ids))
    raise ConfigError(f"{model_dir.name}: no eos_token_id in generation_config.json or config.json")


def _text_configs(config: Mapping[str, object]) -> list[Mapping[str, object]]:
    thinker = config.get("thinker_config")
    owners = [config, *([thinker] if isinstance(thinker, Mapping) else [])]
    return [text for owner in owners if isinstance(text := owner.get("text_config"), Mapping)]


def read_json(path: Path) -> dict[str, object]:
    """Returns the JSON object in the file, which is empty if the file is absent."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name} is not a JSON object")
    return content
