"""Holds FIXME."""

from modalities.text.codec import TextCodec
from modalities.text.detokenizer import IncrementalDetokenizer, StopStrings, token_bytes
from modalities.text.tokenizer_files import qwen_tokenizer

__all__ = [
    "IncrementalDetokenizer",
    "StopStrings",
    "TextCodec",
    "qwen_tokenizer",
    "token_bytes",
]
