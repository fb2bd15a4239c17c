"""Parses command lines: a parser that names the command or option that a misspelled one may mean, which argparse does
only from Python 3.14 on.

The module knows nothing of which commands there are.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn


class WeftParser(argparse.ArgumentParser):
    """A `WeftParser` ends with a message that names what may be meant, where a word is unknown."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"invalid choice: '([^']*)'", message)
        if unknown is not None:
            message = re.sub(r" \(choose from .*\)$", "", message) + self._hint(unknown[1], self.choices())
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parses a whole command line. What is unknown is an error of the command that was chosen; argparse would let
        the first parser say it, which knows no option of a command."""
        found, unknown = self.parse_known_args(words)
        if unknown:
            chosen = self._chosen(words)
            hints = [chosen._hint(word.partition("=")[0], chosen.options()) for word in unknown if word[:1] == "-"]
            chosen.error(f"unknown argument: {' '.join(unknown)}{next(filter(None, hints), '')}")
        return found

    def _chosen(self, words: Iterable[str]) -> WeftParser:
        """Returns the parser of the command that the words name."""
        parser = self
        for word in words:
            parser = parser.commands().get(word, parser)
        return parser

    def _hint(self, word: str, known: Iterable[str]) -> str:
        close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
        return f"; did you mean {close[0]}?" if close else f"; `{self.prog} --help` lists what there is"

    def commands(self) -> dict[str, WeftParser]:
        """Maps the names of the commands below this one to their parsers."""
        return {
            name: parser
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for name, parser in action.choices.items()
        }

    def choices(self) -> list[str]:
        """Returns every word that this parser takes as a choice, those of commands included."""
        return [str(choice) for action in self._actions for choice in action.choices or ()]

    def options(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]
