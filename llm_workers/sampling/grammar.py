"""Keeps the compiled grammars of a worker within a budget of memory, and follows them. A guide follows a sequence token
by token and sets one bit for each token that may come next.

Compiling may take a tenth of a second and runs in threads of its own; following takes microseconds. This module knows
nothing of sequences or logits.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from fabric.contracts import InvalidRequest, Overloaded
from llm_workers.worker_config import WorkerConfig
from modalities.text import CompiledGrammar, CompileLimits, GrammarTokenizer, TextCodec

MAX_CACHED = 128
"""Limits the compiled grammars that are kept; the least recently used grammar is dropped first."""
MAX_REFUSED = 1024
"""Limits the refusals that are remembered."""
MAX_WAITING = 64
"""Limits the grammars that wait for a thread or are compiled."""
NUM_THREADS = 2

DEFAULT_LIMITS = CompileLimits()
DEFAULT_CONFIG = WorkerConfig()


class GrammarMemory:
    """A `GrammarMemory` sums up the memory of all grammars that are alive: those that are kept, and those that some
    guide still follows. It is thread-safe."""

    def __init__(self, max_bytes: int, max_steps: int) -> None:
        self._max_bytes = max_bytes
        self._max_steps = max_steps
        self._lock = threading.Lock()
        self._alive: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()

    def add(self, grammar: CompiledGrammar) -> None:
        with self._lock:
            self._alive.add(grammar)

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(grammar.num_bytes for grammar in self._alive)

    @property
    def is_over(self) -> bool:
        return self.num_bytes > self._max_bytes

    def may_go_on(self, grammar: CompiledGrammar) -> bool:
        """Returns whether a grammar may be followed any further. It may not once its lexer has taken more than the
        limit, or once all grammars together are over the budget and it has more than an equal share of it."""
        if grammar.num_steps > self._max_steps:
            return False
        return not self.is_over or grammar.num_bytes * len(self._alive) <= self._max_bytes


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps them. It is thread-safe. One grammar is compiled once at a time,
    whatever the number of requests that wait for it, and different grammars do not wait for each other unless all
    threads are taken. What was refused is remembered, and a grammar that nobody waits for any more is not begun."""

    def __init__(
        self,
        codec: TextCodec,
        vocab_size: int,
        limits: CompileLimits = DEFAULT_LIMITS,
        max_bytes: int = DEFAULT_CONFIG.grammar_bytes,
    ) -> None:
        """Creates a compiler. `vocab_size` is the width of the logits; ids above the tokenizer's own ids are never
        allowed. `limits` must be those of the routers. `max_bytes` is the budget of all grammars that are alive."""
        self._tokenizer = GrammarTokenizer(codec, vocab_size, limits)
        self._limits = limits
        self._memory = GrammarMemory(max_bytes, limits.max_lexer_steps)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._lock = threading.RLock()
        """Protects the three fields below; no grammar is compiled under it. Work that ends takes it again."""
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._waited_for: dict[str, _SharedWork] = {}

    @property
    def num_bytes(self) -> int:
        """Estimates the memory of all grammars that are alive, from above."""
        return self._memory.num_bytes

    @property
    def num_waiting(self) -> int:
        """Returns how many grammars are compiled or wait for it."""
        return len(self._waited_for)

    async def guide(self, grammar: str) -> GrammarGuide:
        """Returns a guide at the beginning of `grammar`, which is written in llguidance's own notation. A cancelled
        call leaves the queue. Raises InvalidRequest without a `param` if the grammar can't be used or if the model has
        no end-of-sequence token, and Overloaded if too many grammars wait or are in use."""
        shared = self._join(grammar)
        try:
            # The work belongs to all requests that wait for it, so the end of one of them does not end it.
            compiled = await asyncio.shield(asyncio.wrap_future(shared.work))
        finally:
            self._leave(shared)
        return GrammarGuide(compiled, compiled.matcher(), self._memory)

    def compile(self, grammar: str) -> GrammarGuide:
        """Does the same in a call that blocks."""
        shared = self._join(grammar)
        try:
            compiled = shared.work.result()
        finally:
            self._leave(shared)
        return GrammarGuide(compiled, compiled.matcher(), self._memory)

    def close(self) -> None:
        """Drops the grammars that wait. It is idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ waiting

    def _join(self, grammar: str) -> _SharedWork:
        with self._lock:
            shared = self._waited_for.get(grammar)
            if shared is None:
                if len(self._waited_for) >= MAX_WAITING:
                    raise Overloaded(f"{MAX_WAITING} grammars wait to be compiled, which is the limit")
                shared = self._waited_for[grammar] = _SharedWork(self._threads.submit(self._found, grammar))
                shared.work.add_done_callback(lambda _: self._end(grammar))
            shared.num_waiting += 1
            return shared

    def _leave(self, shared: _SharedWork) -> None:
        with self._lock:
            shared.num_waiting -= 1
            if not shared.num_waiting:
                shared.work.cancel()  # This has no effect on work that has begun.

    def _end(self, grammar: str) -> None:
        with self._lock:
            self._waited_for.pop(grammar, None)

    # ------------------------------------------------------------ in a thread

    def _found(self, grammar: str) -> CompiledGrammar:
        """Returns the grammar that is kept, or compiles it and keeps it. A lexer that has taken half of its steps is
        not used again: its next answer would have to end early."""
        digest = blake2b(grammar.encode(errors="surrogatepass")).digest()
        with self._lock:
            kept = self._compiled.get(grammar)
            reason = self._refused.get(digest)
        if kept is not None and 2 * kept.count_steps() <= self._limits.max_lexer_steps:
            with self._lock:
                if grammar in self._compiled:
                    self._compiled.move_to_end(grammar)
            return kept
        if reason is None:
            try:
                return self._keep(grammar, self._tokenizer.compile(grammar))
            except InvalidRequest as error:
                reason = error.message
                with self._lock:
                    self._refused[digest] = reason
                    if len(self._refused) > MAX_REFUSED:
                        self._refused.popitem(last=False)
        raise InvalidRequest(f"the grammar can't be used: {reason}")

    def _keep(self, grammar: str, compiled: CompiledGrammar) -> CompiledGrammar:
        """Keeps a grammar, and drops those that were not used for the longest time until all fit. Raises Overloaded if
        running requests alone take the budget."""
        self._memory.add(compiled)
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > 1 and (len(self._compiled) > MAX_CACHED or self._memory.is_over):
                self._compiled.popitem(last=False)
            if not self._memory.is_over:
                return compiled
            del self._compiled[grammar]
        raise Overloaded("the grammars of running requests take all memory that this worker has for grammars")


@dataclass(slots=True, eq=False)
class _SharedWork:
    """A `_SharedWork` is the compiling of one grammar, for all requests that wait for it."""

    work: Future[CompiledGrammar]
    num_waiting: int = 0


class GrammarGuide:
    """Implements `llm_workers.scheduling.step_plan.Guide` with llguidance. At the end of the grammar, only the
    end-of-sequence tokens are allowed."""

    def __init__(self, grammar: CompiledGrammar, matcher: LLMatcher, memory: GrammarMemory) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._memory = memory

    def fork(self) -> GrammarGuide:
        return GrammarGuide(self._grammar, self._matcher.deep_copy(), self._memory)

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
        if self._grammar.note_mask() and not self._memory.may_go_on(self._grammar):
            words[:] = 0
            return False
        return not self._matcher.is_error()
