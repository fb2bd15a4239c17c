"""Compiles grammars for one tokenizer with llguidance, and counts what a compiled grammar takes.

The library limits how a grammar is built, but not the memory of the lexer that it builds: `(x|y)?` 10,000 times in a
row is 60 kB of text and 230 MB of lexer, and a lexer grows further while tokens are drawn. Both are counted in the
lexer's own steps, which are the same on every machine. Routers and workers compile with the same code, so that both
refuse the same grammars.

The module knows nothing of requests and keeps no grammars.
"""

from __future__ import annotations

import re
import threading

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from fabric.contracts import InvalidRequest
from modalities.text.codec import TextCodec
from modalities.text.detokenizer import token_bytes
from modalities.text.grammar_limits import CompileLimits

BYTES_PER_STEP = 16
BYTES_PER_SYMBOL = 600
BYTES_PER_TEXT_BYTE = 32
BYTES_PER_GRAMMAR = 64 * 1024
"""A compiled grammar takes at most about this much memory per step of its lexer, per symbol, per byte of its text, and
besides (measured with llguidance 1.9: 2 to 14, 490 to 580, and 25 bytes; ADR 85)."""
MASKS_PER_COUNT, MOST_MASKS_PER_COUNT = 16, 128
MANY_STEPS = 10_000
"""A count takes up to a millisecond, most of it for the text of the error that tells it. So the steps are counted each
time so many masks were written, less often if these took few steps. A mask takes at most 200,000 steps, a limit of the
library."""
LEAST_SYMBOLS = 256
"""The number of symbols is not told, so it is found to a factor of four, from this number on."""
TOO_COMPLEX = "it takes too many steps; shorten its regular expressions, or repeat fewer optional parts"
TOO_LARGE = "it is too large once it is compiled; combine fewer alternatives"
_COUNTED_STEPS = re.compile(r'"lexer_cost": (\d+)')
_SIGNS_OF_COMPLEXITY = ("lexer precomputation", "lexer error", "too many", "panic", "limits.")
_SIGNS_OF_SIZE = ("too big", "too large")


class CompiledGrammar:
    """A `CompiledGrammar` is a grammar at its beginning. Matchers that follow it share its lexer, which grows while
    they do. It is thread-safe but for `note_mask`, which belongs to the thread that writes masks."""

    def __init__(self, matcher: LLMatcher, num_fixed_bytes: int) -> None:
        """`num_fixed_bytes` is the memory besides the lexer's."""
        self._matcher = matcher
        self._num_fixed_bytes = num_fixed_bytes
        self.num_steps = 0
        """Is the number of steps that the lexer had taken when they were counted last."""
        self._num_masks_left = self._interval = MASKS_PER_COUNT

    @property
    def num_bytes(self) -> int:
        """Estimates the memory of the grammar, from above, as of the last count."""
        return self._num_fixed_bytes + BYTES_PER_STEP * self.num_steps

    def matcher(self) -> LLMatcher:
        """Returns a matcher at the beginning of the grammar."""
        return self._matcher.deep_copy()

    def note_mask(self) -> bool:
        """Notes that a matcher has written a mask. Counts the steps from time to time, more often while they grow, and
        returns whether it did."""
        self._num_masks_left -= 1
        if self._num_masks_left > 0:
            return False
        former = self.num_steps
        is_calm = self.count_steps() - former <= MANY_STEPS
        self._interval = min(2 * self._interval, MOST_MASKS_PER_COUNT) if is_calm else MASKS_PER_COUNT
        self._num_masks_left = self._interval
        return True

    def count_steps(self) -> int:
        """Counts the steps that the lexer has taken, and returns them. It takes as long as one mask.

        The library tells the count in the error of a matcher only. So a copy consumes a token that may not come."""
        probe = self._matcher.deep_copy()
        try:
            mask = probe.compute_bitmask()
        except ValueError:  # The lexer is exhausted; the error tells the count as well.
            mask = b""
        place = next((place for place, byte in enumerate(mask) if byte != 0xFF), None)
        if place is not None:
            probe.consume_token(8 * place + (~mask[place] & (mask[place] + 1)).bit_length() - 1)
        if counted := _COUNTED_STEPS.search(probe.get_error()):
            self.num_steps = max(self.num_steps, int(counted[1]))
        return self.num_steps


class GrammarTokenizer:
    """A `GrammarTokenizer` compiles grammars for the tokenizer of one model. It is thread-safe: grammars are compiled
    side by side. It builds the tokenizer's trie at first use, which takes a second and 70 MB for 130,000 tokens."""

    def __init__(self, codec: TextCodec, vocab_size: int, limits: CompileLimits) -> None:
        """`vocab_size` is the width of the logits; ids above the tokenizer's own ids are never allowed."""
        self._codec = codec
        self._vocab_size = vocab_size
        self._limits = limits
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, grammar: str) -> CompiledGrammar:
        """Compiles a grammar in llguidance's own notation. The call blocks, without the interpreter's lock. Raises
        InvalidRequest without a `param`, whose message says why the grammar can't be used."""
        tokenizer = self._built()
        try:
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits.of_library())
        except ValueError as error:
            raise InvalidRequest(plain_reason(str(error))) from error
        if matcher.is_error():
            raise InvalidRequest(plain_reason(matcher.get_error()))
        compiled = CompiledGrammar(matcher, self._fixed_bytes(grammar))
        if compiled.count_steps() > self._limits.max_lexer_steps:
            raise InvalidRequest(TOO_COMPLEX)
        return compiled

    def _built(self) -> LLTokenizer:
        if not self._codec.eos_token_ids:
            raise InvalidRequest("the model has no end-of-sequence token, which structured output needs")
        with self._lock:
            if self._tokenizer is None:
                vocabulary = TokenizerWrapper(_Vocabulary(self._codec, self._vocab_size))
                self._tokenizer = LLTokenizer(vocabulary, eos_token=list(self._codec.eos_token_ids))
            return self._tokenizer

    def _fixed_bytes(self, grammar: str) -> int:
        """Estimates the memory of a grammar besides its lexer, from above."""
        num_symbols = LEAST_SYMBOLS
        while num_symbols < self._limits.max_symbols:
            if not LLMatcher.validate_grammar_with_warnings(grammar, limits=self._limits.of_library(num_symbols))[0]:
                break
            num_symbols = min(4 * num_symbols, self._limits.max_symbols)
        num_text_bytes = len(grammar.encode(errors="surrogatepass"))
        return BYTES_PER_GRAMMAR + BYTES_PER_SYMBOL * num_symbols + BYTES_PER_TEXT_BYTE * num_text_bytes


def plain_reason(error: str) -> str:
    """Returns why the library refuses a grammar, in words for clients: without its state, and without the names of its
    own settings."""
    lines = [line.strip() for line in error.partition("<state>")[0].partition("<grammar>")[0].splitlines()]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), (lines or [""])[0])
    if any(sign in reason for sign in _SIGNS_OF_SIZE):
        return TOO_LARGE
    if not reason or any(sign in reason for sign in _SIGNS_OF_COMPLEXITY):
        return TOO_COMPLEX
    return reason[:300]


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
