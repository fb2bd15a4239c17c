"""Implements `weft node clean`: lists the models that this node has downloaded, and removes those that may go.

Without an option that says what may stay, it removes nothing. A model that a process reads always stays. The module
knows nothing of how models come onto a node.
"""

from __future__ import annotations

import argparse
from typing import Any

from deploy.commands.terminal import console, duration, table, write
from deploy.config_file import load_config
from deploy.config_values import parse_bytes
from deploy.models import CachedModel, CleaningRule, cached_models, default_cache_dir, remove, superfluous
from fabric.contracts import ConfigError

DAY_S = 86_400.0


def clean_node(arguments: argparse.Namespace, now_s: float) -> int:
    """Runs `weft node clean`. `now_s` is the wall time. Raises ConfigError for an option that has no meaning."""
    configured = None if arguments.config is None else load_config(arguments.config).model.cache_dir
    root = arguments.cache_dir or configured or default_cache_dir()
    rule = _rule(arguments)
    models = cached_models(root) if root.is_dir() else []
    output = console()
    if not models:
        write(output, f"no model was downloaded into {root}")
        return 0
    going = {model.folder for model in superfluous(models, rule, now_s)}
    gone = [model for model in models if model.folder in going and (arguments.dry_run or remove(root, model))]
    word = "would go" if arguments.dry_run else "removed"
    states = [word if model in gone else "in use" if model.is_read or model.folder in going else "" for model in models]
    rows: list[tuple[Any, ...]] = [
        (model.name, _gigabytes(model), f"{_age(now_s - model.opened_at_s)} ago", state)
        for model, state in zip(models, states, strict=True)
    ]
    write(output, table(("MODEL", "SIZE", "OPENED", "STATE"), rows, ("SIZE",)))
    num_bytes = sum(model.num_bytes for model in gone)
    if rule == CleaningRule():
        write(output, "\nsay what may stay with --max-bytes SIZE or --unused-days DAYS; nothing was removed")
    else:
        write(output, f"\n{word}: {len(gone)} of {len(models)} models, {num_bytes / 1e9:.1f} GB, from {root}")
    return 0


def _rule(arguments: argparse.Namespace) -> CleaningRule:
    max_bytes: int | None = None
    if arguments.max_bytes is not None:
        text = arguments.max_bytes
        try:
            parsed = parse_bytes(text)
        except ValueError as error:
            raise ConfigError(f"--max-bytes: {error}") from error
        assert isinstance(parsed, int), "a text becomes a number"
        max_bytes = parsed
    days = arguments.unused_days
    if days is not None and not days >= 0:
        raise ConfigError(f"--unused-days is {days:g}, but it must be 0 or more")
    return CleaningRule(max_bytes, None if days is None else days * DAY_S)


def _gigabytes(model: CachedModel) -> str:
    return f"{model.num_bytes / 1e9:.1f} GB"


def _age(seconds: float) -> str:
    days = max(seconds, 0.0) / DAY_S
    return f"{days:.0f} days" if days >= 2 else duration(max(seconds, 0.0))
