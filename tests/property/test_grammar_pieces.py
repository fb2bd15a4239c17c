"""Checks that structured output works with every kind of tokenizer that checkpoints have: whatever tokens are drawn
from the masks, the text that a client sees obeys the schema."""

from __future__ import annotations

import json
from datetime import datetime
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from piece_tokenizers import KIND_TO_TOKENIZER, LLAMA2_TEMPLATE

from llm_workers.sampling import GrammarCompiler
from llm_workers.sampling.grammar import GrammarGuide
from modalities.text import ChatTemplate, IncrementalDetokenizer, TextCodec

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["the end", "naïve ☃", "a\nb"]},
        "n": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
KINDS = sorted(set(KIND_TO_TOKENIZER) - {"unigram_metaspace"})
"""Holds the kinds whose vocabularies can write every letter."""
MOST_TOKENS = 200
WIDTH = 640
"""Is wider than each vocabulary, as it is in padded checkpoints."""


class Setup:
    """Holds a codec of one kind, its end-of-sequence token, and its compiler."""

    def __init__(self, kind: str) -> None:
        tokenizer = KIND_TO_TOKENIZER[kind]()
        end = tokenizer.token_to_id("<|eot_id|>" if kind == "byte_level" else "</s>")
        assert end is not None
        self.end = end
        self.codec = TextCodec(tokenizer, ChatTemplate(LLAMA2_TEMPLATE, {}, datetime.now), (end,))
        self.compiler = GrammarCompiler(self.codec, WIDTH)


@pytest.fixture(scope="module", params=KINDS)
def setup(request: pytest.FixtureRequest) -> Setup:
    return Setup(request.param)


def allowed(guide: GrammarGuide) -> list[int]:
    words = np.full(WIDTH // 32, -1, dtype=np.int32)
    assert guide.write_mask(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


@settings(deadline=None, max_examples=20)
@given(random=st.randoms(use_true_random=False))
def test_any_tokens_of_the_masks_obey_the_schema(setup: Setup, random: Random) -> None:
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_flexible": False})
    guide, stream, text = setup.compiler.compile(grammar), IncrementalDetokenizer(setup.codec), ""
    ids: list[int] = []
    while len(ids) < MOST_TOKENS:
        token_id = random.choice(allowed(guide))
        if token_id == setup.end:
            break
        assert token_id not in setup.codec.special_token_ids
        assert token_id < setup.codec.vocab_size
        ids.append(token_id)
        guide.advance(ids[-1:])
        text += stream.push(ids[-1:])
    text += stream.flush()
    assert text == setup.codec.decode(ids)
    value = json.loads(text)
    assert value["name"] in SCHEMA["properties"]["name"]["enum"]
    assert all(0 <= number <= 9 for number in value["n"])


def test_the_ids_of_a_text_obey_its_grammar(setup: Setup) -> None:
    """A blank inside a text is part of a token ("▁end"), and a new line is a token of one byte."""
    text = "the end\n☃"
    guide = setup.compiler.compile(LLMatcher.grammar_from_regex("the end\n☃"))
    for token_id in setup.codec.encode(text, is_start=False):
        assert token_id in allowed(guide)
        guide.advance([token_id])
    assert allowed(guide) == [setup.end]
