"""Walks through grammars of tool calls at random, on a tokenizer of bytes with the special tokens of the formats."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from llm_workers.sampling import GrammarCompiler
from llm_workers.scheduling.step_plan import Guide
from modalities.answers import AnswerParser, AnswerPiece, ToolCallArguments, ToolCallStart, ToolSpec, join_pieces
from modalities.text import LETTER_TO_BYTE, ChatTemplate, TextCodec

EOS = 256
SPECIALS = (
    *("<|eos|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "[THINK]", "[/THINK]", "<sp_call>"),
    *("<|python_start|>", "<|python_end|>"),
)
WORDS = ('{"name": "', '", "arguments": {"', "<tool_call>\n", "</tool_call>", "<parameter=", "</think>\n\n", '"}')
"""These are tokens of several bytes, which cross the borders of a grammar's parts."""
SPECIAL_TOKEN_IDS = {text: EOS + index for index, text in enumerate(SPECIALS)}
WIDTH = EOS + len(SPECIALS) + len(WORDS)

WEATHER = ToolSpec(
    "get_weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 6},
            "days": {"type": "integer", "minimum": 0, "maximum": 14},
            "unit": {"enum": ["c", "f"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
)
REFERRED = ToolSpec(
    "get_when",
    "",
    {
        "type": "object",
        "properties": {
            "when": {"$ref": "#/$defs/When"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
            "code": {"type": "string", "pattern": "^[a-c]{2,3}$"},
            "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
            "is_new": {"type": "boolean"},
        },
        "required": ["when", "code"],
        "additionalProperties": False,
        "$defs": {
            "When": {
                "type": "object",
                "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
                "required": ["hour"],
                "additionalProperties": False,
            }
        },
    },
)
EMPTY = ToolSpec("stop", "Stops.", {})
TOOLS = (WEATHER, REFERRED, EMPTY)


def walk_codec(words: Sequence[str], template: str = "") -> TextCodec:
    tokenizer = Tokenizer(models.BPE(vocab=dict(LETTER_TO_BYTE), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in words])
    return TextCodec(tokenizer, ChatTemplate(template, {}, datetime.now), (EOS,))


CODEC = walk_codec(WORDS)
COMPILER = GrammarCompiler(CODEC, WIDTH)
COMPILER_OF_BYTES = GrammarCompiler(walk_codec(()), WIDTH)
"""Follows any text byte by byte. With longer tokens, a guide allows only one way to tokenise text that the grammar
forces."""


def flaw_of(grammar: str) -> str:
    """Returns what llguidance finds wrong with a grammar, or an empty text."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return "\n".join(messages) if is_error else ""


class Walk(NamedTuple):
    text: str
    has_ended: bool


def walk(grammar: str, seed: int, prefix: tuple[str, ...] = (), num_tokens: int = 1500) -> Walk:
    """Returns a text that the grammar allows, drawn token by token behind the parts of `prefix`. Printable tokens are
    drawn more often than others, and the end of the text by chance wherever it is allowed."""
    rng = random.Random(seed)
    guide = COMPILER.compile(grammar)
    data = b""
    forced = _tokens(prefix)
    for num_drawn in range(num_tokens):
        tokens = tokens_allowed(guide)
        assert tokens, f"the guide broke after {data!r}"
        if num_drawn < len(forced):
            token = forced[num_drawn]
            assert token in tokens, f"{data!r} can't go on with {_bytes(token)!r}"
        elif EOS in tokens and (len(tokens) == 1 or rng.random() < 0.3):
            return Walk(data.decode(), True)
        else:
            others = [token for token in tokens if token != EOS]
            plain = [token for token in others if token > EOS or 32 < token < 127]
            token = rng.choice(plain if plain and rng.random() < 0.9 else others)
        data += _bytes(token)
        guide.advance([token])
    return Walk(data.decode(errors="replace"), False)


def tokens_allowed(guide: Guide) -> list[int]:
    """Returns the ids of the tokens that may come next, of which a broken guide has none."""
    words = np.full(-(-WIDTH // 32), -1, dtype=np.int32)
    is_whole = guide.write_mask(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist() if is_whole else []


def _bytes(token: int) -> bytes:
    if token < EOS:
        return bytes([token])
    text = CODEC.token_text(token)
    assert text is not None
    return text.encode()


def _tokens(parts: Sequence[str]) -> list[int]:
    return [
        token for part in parts for token in ([SPECIAL_TOKEN_IDS[part]] if part in SPECIAL_TOKEN_IDS else part.encode())
    ]


def is_allowed(grammar: str, parts: Sequence[str]) -> bool:
    """Says whether the grammar allows the parts, and the end behind them. A part that is a special token's text is this
    token; every other part is bytes."""
    guide = COMPILER_OF_BYTES.compile(grammar)
    for token in [*_tokens(parts), EOS]:
        if token not in tokens_allowed(guide):
            return False
        guide.advance([token])
    return True


def parse(parser: AnswerParser, parts: Sequence[str]) -> list[AnswerPiece]:
    """Returns the joined pieces of a text that comes in these parts."""
    return join_pieces([piece for part in parts for piece in parser.push(part)] + parser.flush())


def calls_in(pieces: list[AnswerPiece]) -> list[tuple[str, str]]:
    """Returns the name and the arguments' text of each call, in order."""
    names = [piece.name for piece in pieces if isinstance(piece, ToolCallStart)]
    texts = [""] * len(names)
    for piece in pieces:
        if isinstance(piece, ToolCallArguments):
            texts[piece.index] += piece.text
    return list(zip(names, texts, strict=True))
