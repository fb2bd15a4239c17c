"""Puts the tokens of one choice in order over all attempts: it drops duplicates and holds tokens behind a gap.

Indexes count generated tokens from 0 over all attempts: a migrated attempt continues where the former one stopped.
Tokens of a former attempt are as good as those of the new one, because a draw depends on (seed, choice, index) alone.
The module knows nothing of text or stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from fabric.messages import TokenLogprobs


class Ending(NamedTuple):
    """An `Ending` is the point at which a choice ends, as the worker reports it."""

    num_tokens: int
    reason: str


class TokenOrder:
    """A `TokenOrder` holds the tokens of one choice. The caller checks which attempt a frame belongs to."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        """Holds the token ids that are contiguous from index 0."""
        self.logprobs: list[TokenLogprobs] = []
        """Holds one entry per token, if the worker sends log-probabilities."""
        self._held: dict[int, tuple[int, TokenLogprobs | None]] = {}
        self._ending: Ending | None = None

    def push(self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> list[int]:
        """Takes a frame and returns the tokens that it made contiguous. Drops tokens after the ending."""
        for index, (token_id, scored) in enumerate(zip_longest(token_ids, logprobs), first_index):
            if index >= len(self.token_ids) and index not in self._held and not self._is_beyond(index):
                self._held[index] = token_id, scored
        fresh: list[int] = []
        while len(self.token_ids) in self._held:
            token_id, scored = self._held.pop(len(self.token_ids))
            self.token_ids.append(token_id)
            if scored is not None:
                self.logprobs.append(scored)
            fresh.append(token_id)
        return fresh

    def end(self, num_tokens: int, reason: str) -> None:
        """Sets the ending that a frame or the terminal event reports. Repeating it is harmless."""
        self._ending = Ending(num_tokens, reason)

    def restart(self) -> None:
        """Prepares for a new attempt: drops tokens that are held behind a gap, and an ending that was never reached."""
        self._held.clear()
        self._ending = None

    @property
    def reached(self) -> Ending | None:
        """Returns the ending once every token up to it is there, otherwise None."""
        ending = self._ending
        return ending if ending is not None and len(self.token_ids) >= ending.num_tokens else None

    @property
    def num_missing(self) -> int:
        """Counts the tokens that are known to exist but have not arrived; it is 0 without an ending or a gap."""
        last = max(self._held, default=-1) + 1
        if self._ending is not None:
            last = max(last, self._ending.num_tokens)
        return max(0, last - len(self.token_ids) - len(self._held))

    def _is_beyond(self, index: int) -> bool:
        return self._ending is not None and index >= self._ending.num_tokens
