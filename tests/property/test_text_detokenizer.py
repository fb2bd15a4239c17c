"""Checks that streamed text equals the text of one decoding, for any ids in any pieces."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.demo.build import write_all_but_weights
from modalities.text import IncrementalDetokenizer, TextCodec


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    model_dir: Path = tmp_path_factory.mktemp("text")
    write_all_but_weights(model_dir)
    return TextCodec.load(model_dir)


# The first 256 ids are single bytes, which are mostly broken UTF-8. The ids above 1525 are special, and those above
# 1535 do not exist.
IDS = st.lists(st.one_of(st.integers(0, 255), st.integers(0, 1540)), max_size=40)


@settings(max_examples=400, deadline=None)
@given(IDS, st.lists(st.integers(1, 5), max_size=40))
def test_pushes_and_flush_join_to_what_decode_says(codec: TextCodec, ids: list[int], sizes: list[int]) -> None:
    stream, text, position = IncrementalDetokenizer(codec), "", 0
    for size in [*sizes, len(ids)]:
        text += stream.push(ids[position : position + size])
        position += size
    assert text + stream.flush() == codec.decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30))
def test_valid_text_never_shows_half_a_character(codec: TextCodec, text: str) -> None:
    ids = codec.encode(text)
    whole = codec.decode(ids)
    stream, shown = IncrementalDetokenizer(codec), ""
    for token_id in ids:
        shown += stream.push([token_id])
        assert whole.startswith(shown)
    assert shown == whole
    assert stream.flush() == ""
