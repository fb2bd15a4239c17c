"""Reads and changes the parts of a `tokenizers.Tokenizer` that decide how text around a cut is tokenised.

SentencePiece-like tokenizers put a "▁" before a text, some of them also after each control token (the legacy
behaviour). `continuing` makes the tokenizer for text that goes on in the middle. `matching_raw_text` and
`is_spelled_by_model` are about control tokens that arise in other ways than by their exact spelling.

The parts are read as JSON, because the library shows few of their options in Python. This module knows nothing of
requests and checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

SPACE, MARK = " ", "\u2581"
UNKNOWN = "\U0010fffd"
"""Is a private letter that is in no vocabulary."""


def continuing(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a tokenizer that puts nothing before a text, removes nothing from its start when it decodes, and is the
    same otherwise. It is the given one if that does neither; else it is a copy."""
    parts = {name: _state(getattr(tokenizer, name)) for name in ("normalizer", "pre_tokenizer", "decoder")}
    changed = {name: _without_prefix(part) for name, part in parts.items()}
    if changed == parts:
        return tokenizer
    return _rebuilt(tokenizer, lambda content: content.update(changed))


def matching_raw_text(tokenizer: Tokenizer, control_tokens: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer that finds every control token in the text as it is written, before normalisation. It is the
    given one if that does so; else it is a copy without the flag `normalized` of these tokens.

    With the flag, letters that only become a control token by normalisation (full-width "＜s＞") would be one. With a
    normaliser that puts a "▁" before the text, the library `tokenizers` takes a control token in the middle of a line
    for letters, and does not leave it out when it decodes. Early versions of Llama's files have the flag."""
    flagged = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.normalized}
    affected = flagged & set(control_tokens)
    if not affected or tokenizer.normalizer is None:
        return tokenizer

    def change(content: dict[str, Any]) -> None:
        for token in content["added_tokens"]:
            token["normalized"] = token["normalized"] and token["content"] not in affected

    return _rebuilt(tokenizer, change)


def is_spelled_by_model(tokenizer: Tokenizer, control_token: str) -> bool:
    """Returns true if the model itself makes the control token out of its letters, as a Unigram model does with every
    entry of its vocabulary. Finding the token in the raw text is then not enough to keep it out of other text. The
    token for unknown letters does not count."""
    token_id = tokenizer.model.token_to_id(control_token)
    if token_id is None or len(control_token) < 2:
        return False
    texts = (control_token, MARK + control_token)
    found = {token.id for text in texts for token in tokenizer.model.tokenize(text)}
    unknown = {token.id for token in tokenizer.model.tokenize(UNKNOWN)}
    return token_id in found - unknown


class AddedIds(NamedTuple):
    """`AddedIds` holds what a tokenizer's post-processor puts around a text."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def added_ids(tokenizer: Tokenizer) -> AddedIds:
    """Returns the ids that the post-processor adds before and after a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    if not plain:
        return AddedIds(tuple(full), ())
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return AddedIds(tuple(full[:start]), tuple(full[start + len(plain) :]))
    return AddedIds((), ())


def _state(part: Any) -> Any:
    """Returns the JSON of a part, or None if there is none."""
    return None if part is None else json.loads(part.__getstate__())


def _rebuilt(tokenizer: Tokenizer, change: Callable[[dict[str, Any]], object]) -> Tokenizer:
    content = json.loads(tokenizer.to_str())
    change(content)
    return Tokenizer.from_str(json.dumps(content))


def _without_prefix(part: Any) -> Any:
    """Returns the JSON of a part without what puts a prefix before a text or removes it."""
    if not isinstance(part, Mapping):
        return part
    kind = part["type"]
    for list_name in ("normalizers", "pretokenizers", "decoders"):
        if kind == "Sequence" and list_name in part:
            kept = [_without_prefix(item) for item in part[list_name]]
            return {**part, list_name: [item for item in kept if item is not None]}
    if kind == "Prepend" or (kind == "Strip" and part.get("start")):  # A normaliser called Strip has other keys.
        return None
    if kind == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if kind == "ByteLevel" else part
