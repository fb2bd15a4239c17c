"""Converts text to token ids and back, without torch or transformers.

`codec` renders conversations with a checkpoint's chat template and tokenises them, so that text from a client never
becomes a control token, which `control_tokens` sees to. `detokenizer` turns the generated ids into text as they arrive,
and ends the text at a stop string. `token_decoding` says what each token adds to a text, and `tokenizer_parts` what a
tokenizer puts around one. `tokenizer_files` reads the files from which these are built, and `sentencepiece_model` the
file tokenizer.model. `grammar_limits` limits what a grammar for structured output may cost, and `compiled_grammars`
compiles one.

The router renders prompts and streams text with them, and workers use the bytes of tokens for structured output. The
folder knows nothing of media, in whose place a prompt has one placeholder token each, and nothing of requests.
"""

from modalities.text.codec import ChatTemplate, TextCodec
from modalities.text.compiled_grammars import CompiledGrammar, GrammarTokenizer, plain_reason
from modalities.text.detokenizer import IncrementalDetokenizer, StopStrings, token_bytes
from modalities.text.grammar_limits import CompileLimits
from modalities.text.token_decoding import LETTER_TO_BYTE
from modalities.text.tokenizer_files import qwen_tokenizer

__all__ = [
    "LETTER_TO_BYTE",
    "ChatTemplate",
    "CompileLimits",
    "CompiledGrammar",
    "GrammarTokenizer",
    "IncrementalDetokenizer",
    "StopStrings",
    "TextCodec",
    "plain_reason",
    "qwen_tokenizer",
    "token_bytes",
]
