"""Compiles each grammar as workers do, before a worker sees it, and remembers what came of it.

`check_grammar` finds most flaws without a tokenizer, and names what is wrong. What is left is how much the lexer takes,
which depends on the tokens of the model. A grammar that passes here is not refused by a worker, whose threads serve all
tenants.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from hashlib import blake2b

from fabric.contracts import InvalidRequest
from modalities.text import GrammarTokenizer, TextCodec
from router.prompt.generation_options import check_grammar, unusable
from router.router_config import GrammarLimits

MAX_CHECKED = 4096
"""Limits the grammars whose check is remembered."""


class GrammarChecks:
    """A `GrammarChecks` belongs to one router and one model. It is thread-safe. It keeps no compiled grammar."""

    def __init__(self, codec: TextCodec, vocab_size: int, limits: GrammarLimits) -> None:
        """`vocab_size` and `limits.compiling` must be those of the workers."""
        self._limits = limits
        self._tokenizer = GrammarTokenizer(codec, vocab_size, limits.compiling)
        self._lock = threading.Lock()
        self._digest_to_reason: OrderedDict[bytes, str] = OrderedDict()
        """Maps the digest of a grammar to the reason why it is refused, or to an empty text."""

    def check(self, grammar: str, param: str) -> None:
        """Raises InvalidRequest, with `param` as the field of the request that is wrong, if workers would refuse the
        grammar. May take half a second the first time."""
        if not grammar:
            return
        digest = blake2b(grammar.encode(errors="surrogatepass")).digest()
        with self._lock:
            reason = self._digest_to_reason.get(digest)
        if reason is None:
            check_grammar(grammar, param, self._limits)
            reason = self._compiled(grammar)
        with self._lock:
            self._digest_to_reason[digest] = reason
            self._digest_to_reason.move_to_end(digest)
            if len(self._digest_to_reason) > MAX_CHECKED:
                self._digest_to_reason.popitem(last=False)
        if reason:
            raise unusable(param, reason)

    def _compiled(self, grammar: str) -> str:
        try:
            self._tokenizer.compile(grammar)
        except InvalidRequest as error:
            return error.message
        return ""
