"""Reads what a checkpoint says about its text: chat template, names of special tokens, end-of-turn ids.

Does not know tokenizers or Jinja. Each function raises ConfigError for a file that can't be used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from fabric.errors import ConfigError


def chat_template(model_dir: Path) -> str:
    """Of chat_template.jinja, chat_template.json or tokenizer_config.json, the first that has one."""
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(model_dir / name).get("chat_template")
        if isinstance(template, list):  # named templates, an older form
            template = {named["name"]: named["template"] for named in template}.get("default")
        if isinstance(template, str):
            return template
    raise ConfigError(f"{model_dir.name}: no chat template (chat_template.jinja or tokenizer_config.json)")


def special_token_names(model_dir: Path) -> dict[str, str]:
    """`eos_token` and the like -> the token's text, from tokenizer_config.json."""
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
    """From generation_config.json, else config.json (top, then the text model's part), without repeats."""
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
    """Empty if the file is absent."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name} is not a JSON object")
    return content
