"""Implements grammars with llguidance. A grammar is compiled once per text. A guide then follows a sequence token by
token and sets one bit for each token that may come next.

Compiling may take a tenth of a second and must run in a separate thread; following takes microseconds. This module
knows nothing of sequences or logits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from fabric.contracts import InvalidRequest
from modalities.text import CompileLimits, TextCodec, token_bytes

MAX_CACHED = 128
"""Limits the compiled grammars that are kept; the least recently used grammar is dropped first."""

DEFAULT_LIMITS = CompileLimits()


class GrammarCompiler:
    """Compiles grammars for one tokenizer. It is thread-safe. It builds the tokenizer's trie at first use, which takes
    a second for 150,000 tokens."""

    def __init__(self, codec: TextCodec, vocab_size: int, limits: CompileLimits = DEFAULT_LIMITS) -> None:
        """Creates a compiler. `vocab_size` is the width of the logits; ids above the tokenizer's own ids are never
        allowed. `limits` must be those of the routers."""
        self._limits = limits
        self._codec = codec
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, grammar: str) -> GrammarGuide:
        """Returns a guide at the beginning of `grammar`, which is written in llguidance's own notation. The call
        blocks. Raises InvalidRequest if the grammar can't be used or if the model has no end-of-sequence token."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                matcher = self._compiled[grammar] = self._matcher(grammar)
                if len(self._compiled) > MAX_CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return GrammarGuide(matcher.deep_copy())

    def _matcher(self, grammar: str) -> LLMatcher:
        if not self._codec.eos_token_ids:
            raise InvalidRequest("the model has no end-of-sequence token, which structured output needs")
        if self._tokenizer is None:
            vocabulary = TokenizerWrapper(_Vocabulary(self._codec, self._vocab_size))
            self._tokenizer = LLTokenizer(vocabulary, eos_token=list(self._codec.eos_token_ids))
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits.of_library())
        if matcher.is_error():
            raise InvalidRequest(f"the grammar can't be used: {matcher.get_error()[:200]}", param="structured_outputs")
        return matcher


class GrammarGuide:
    """Implements `llm_workers.scheduling.step_plan.Guide` with llguidance. At the end of the grammar, only the
    end-of-sequence tokens are allowed."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fork(self) -> GrammarGuide:
        return GrammarGuide(self._matcher.deep_copy())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Moves the guide past these tokens. A token that the grammar does not allow breaks the guide permanently, and
        `write_mask` then returns False. Tokens after the end of the grammar (end-of-sequence tokens that were ignored)
        change nothing."""
        for token_id in token_ids:
            if self._matcher.is_stopped():
                return
            self._matcher.consume_token(token_id)

    def write_mask(self, words: npt.NDArray[np.int32]) -> bool:
        assert words.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return not self._matcher.is_error()


class _Vocabulary:
    """Presents the tokenizer in the form that llguidance reads."""

    def __init__(self, codec: TextCodec, vocab_size: int) -> None:
        self.eos_token_id = codec.eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = [token_bytes(codec, token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(codec.special_token_ids)
        self._codec = codec

    def __call__(self, text: bytes | str) -> list[int]:
        """Returns the ids of text inside an answer, which has no blank put before it."""
        return self._codec.encode_output(text if isinstance(text, str) else text.decode(errors="replace"))
