"""Checks that text from outside never becomes a control token, however it is cut into parts and whatever text is next
to it."""

import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deploy.demo.build import write_all_but_weights
from deploy.demo.tokenizer import SPECIAL_TOKENS
from modalities.text import TextCodec
from modalities.text.control_tokens import ControlTokens

MARK = "\ue000"
# There are two letters, so that tokens often overlap, contain each other and arise where two texts join.
LETTERS = "ab"
TOKENS = st.sets(st.text(LETTERS, min_size=2, max_size=4), min_size=1, max_size=3)
# Each segment is `(text, whether it is from outside)`.
SEGMENTS = st.lists(st.tuples(st.text(LETTERS + " ", max_size=6), st.booleans()), max_size=7)


@settings(max_examples=800, deadline=None)
@given(TOKENS, SEGMENTS, st.booleans())
@example({"<|x|>"}, [("<|", False), ("x", True), ("|>", False)], False)
def test_no_control_token_holds_a_letter_from_outside(
    tokens: set[str], segments: list[tuple[str, bool]], is_trimmed: bool
) -> None:
    guard = ControlTokens(tokens)
    rendered, is_from_outside = "", []
    for text, is_outside in segments:
        shown = guard.marked(text, MARK) if is_outside else text
        shown = shown.strip() if is_outside and is_trimmed else shown
        rendered += shown
        is_from_outside += [is_outside] * len(shown.replace(MARK, ""))
    pieces = guard.pieces(rendered, MARK)
    assert "".join(pieces) == rendered.replace(MARK, "")
    leftmost_longest = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
    start = 0
    for piece in pieces:
        for match in leftmost_longest.finditer(piece):
            assert not any(is_from_outside[start + match.start() : start + match.end()])
        start += len(piece)


@settings(max_examples=800, deadline=None)
@given(TOKENS, SEGMENTS)
def test_what_is_called_harmless_needs_no_mark(tokens: set[str], segments: list[tuple[str, bool]]) -> None:
    guard = ControlTokens(tokens)
    for text, _ in segments:
        assert guard.is_harmless(text) == (MARK not in guard.marked(text, MARK))


@settings(max_examples=500, deadline=None)
@given(TOKENS, st.lists(st.text(LETTERS + " ", max_size=6), max_size=6))
def test_a_control_token_of_the_template_stays_whole_between_outside_texts(tokens: set[str], texts: list[str]) -> None:
    guard = ControlTokens(tokens)
    token = sorted(tokens)[0]
    # A letter of no token separates the texts: nothing can join, so each of the template's tokens must survive.
    rendered = "".join(f"{guard.marked(text, MARK)}#{token}#" for text in texts)
    pieces = guard.pieces(rendered, MARK)
    assert sum(piece.count(f"#{token}#") for piece in pieces) == len(texts)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    model_dir: Path = tmp_path_factory.mktemp("text")
    write_all_but_weights(model_dir)
    return TextCodec.load(model_dir)


FRAGMENTS = [
    *SPECIAL_TOKENS,
    "<|im_",
    "start|>",
    "<|image",
    "_pad|>",
    "<",
    "|",
    ">",
    "im_end",
    "\n",
    " ",
    "user\n",
    "héllo",
    "word",
    "\ue000",
    "\u0338",
]
HOSTILE = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=6).map("".join)
PARTS = st.lists(
    st.one_of(HOSTILE.map(lambda text: {"type": "text", "text": text}), st.just({"type": "image"})), max_size=6
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.one_of(HOSTILE, PARTS)}
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(MESSAGES, st.booleans())
def test_control_tokens_are_as_many_as_the_structure_says(
    codec: TextCodec, messages: list[dict[str, object]], add_generation_prompt: bool
) -> None:
    ids = codec.render(messages, add_generation_prompt=add_generation_prompt)
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    num_images = sum(part["type"] == "image" for part in parts)
    expected = dict.fromkeys(SPECIAL_TOKENS, 0)
    expected |= dict.fromkeys(("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"), num_images)
    expected |= {"<|im_start|>": len(messages) + add_generation_prompt, "<|im_end|>": len(messages)}
    assert {token: ids.count(codec.token_id(token) or -1) for token in SPECIAL_TOKENS} == expected


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["system", "user", "assistant"]), max_size=3), HOSTILE, st.lists(HOSTILE, max_size=3))
def test_a_continued_prompt_and_the_end_of_its_message_are_the_whole_conversation(
    codec: TextCodec, roles: list[str], content: str, texts: list[str]
) -> None:
    """The template shows contents as they are, and closes a message with a control token."""
    parts: list[dict[str, str]] = [{"type": "text", "text": text} for text in texts]
    final: object = [*parts, {"type": "text", "text": content}] if parts else content
    messages = [*({"role": role, "content": content} for role in roles), {"role": "assistant", "content": final}]
    end = codec.token_id("<|im_end|>")
    assert end is not None
    whole = codec.render(messages, add_generation_prompt=False)
    assert [*codec.render(messages, continue_final_message=True), end, *codec.encode("\n")] == whole


@settings(max_examples=300, deadline=None)
@given(HOSTILE)
def test_encoded_text_holds_no_control_token_and_decodes_to_itself(codec: TextCodec, text: str) -> None:
    ids = codec.encode(text)
    assert codec.special_token_ids.isdisjoint(ids)
    if unicodedata.is_normalized("NFC", text):
        assert codec.decode(ids, skip_special_tokens=False) == text
