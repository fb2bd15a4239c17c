"""Limits what compiling and following a grammar may cost, for routers, which compile every grammar before a worker sees
it, and for workers, which follow it. Both count alike, so a grammar that a router lets pass is not refused by a worker.

The module knows nothing of what a grammar says.
"""

from __future__ import annotations

from dataclasses import dataclass

from llguidance import LLParserLimits


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """A `CompileLimits` counts steps and sizes, never time, so that the same grammar is refused on every machine. The
    library's own limits bound the time for a mask to about 15 ms."""

    max_symbols: int = 50_000
    """Limits the symbols of the compiled grammar. A small schema of unions within intersections may have very many."""
    max_lexer_fuel: int = 200_000
    """Limits the steps in which the regular expressions of a grammar are built."""
    max_lexer_states: int = 50_000
    """Limits the states of the lexer, which are made while tokens are drawn. A state takes 1 to 2 kB."""
    max_lexer_steps: int = 4_000_000
    """Limits the steps in which a lexer is built and extended, from compiling on and while tokens are drawn. A step
    takes up to 16 bytes of memory, which stays as long as the grammar."""

    def of_library(self, max_symbols: int | None = None) -> LLParserLimits:
        """Returns the limits as llguidance takes them, with fewer symbols if `max_symbols` says so. Its errors are
        verbose, because only these tell the steps of a lexer; they are never shown to clients as they are."""
        return LLParserLimits(
            initial_lexer_fuel=self.max_lexer_fuel,
            max_grammar_size=self.max_symbols if max_symbols is None else max_symbols,
            max_lexer_states=self.max_lexer_states,
            verbose_errors=True,
        )
