"""Defines what a simulation is asked to serve, and what became of it: a `SimRequest` goes in, and an `Outcome` comes
out. The module knows nothing of where requests come from, or of how they are served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fabric.contracts import MediaItem, MemberId, PlaceholderRange, RequestId
from loadtest.simulator.cost_tables import CostTable

PAD = 1
"""This token stands at every placeholder position."""
Part = tuple[int, int] | tuple[str, str]
"""A part of a prompt is text (its first token, the number of tokens) or a medium (the name of its kind, its content).
The tokens of a text count up from its first one, so equal parts are equal text."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A `SimRequest` is one request of a simulation."""

    index: int
    arrival_s: float
    """Holds the virtual time of the arrival."""
    kind: str
    """Groups requests in the report: `text`, `image`, `video`, ..."""
    parts: tuple[Part, ...]
    num_output: int
    """Counts the tokens of the answer."""
    first_output: int
    """Holds the first token of the answer; the others follow by counting, so that a later turn can contain it."""
    session: int = -1
    """Holds the number of the conversation; -1 means that the request belongs to none."""

    @property
    def request_id(self) -> RequestId:
        return RequestId(f"r{self.index}")

    def prompt(self, table: CostTable) -> SimPrompt:
        """Returns the prompt, expanded."""
        return expanded(self.parts, table)


@dataclass(frozen=True, slots=True)
class SimPrompt:
    """A `SimPrompt` is a prompt with its placeholders expanded, as the router plans it."""

    token_ids: tuple[int, ...]
    placeholders: tuple[PlaceholderRange, ...]
    media: tuple[MediaItem, ...]


def expanded(parts: Sequence[Part], table: CostTable) -> SimPrompt:
    """Returns the prompt that consists of these parts. Raises ConfigError for a medium that the table does not have."""
    token_ids: list[int] = []
    runs: list[PlaceholderRange] = []
    media: list[MediaItem] = []
    for first, second in parts:
        if isinstance(second, int):
            assert isinstance(first, int)
            token_ids.extend(range(first, first + second))
            continue
        # The same content is another medium in another kind, as a picture and a sound are never the same bytes.
        item = table.kind(str(first)).item(len(media), f"{first}/{second}")
        for unit, length in enumerate(item.unit_tokens):
            runs.append(PlaceholderRange(len(token_ids), length, item.index, unit, 0))
            token_ids.extend([PAD] * length)
        media.append(item)
    return SimPrompt(tuple(token_ids), tuple(runs), tuple(media))


@dataclass(slots=True)
class Outcome:
    """An `Outcome` says what became of one request. Times are seconds from its arrival."""

    index: int
    kind: str
    arrival_s: float
    num_prompt: int
    num_media: int
    num_output: int
    first_token_s: float = -1.0
    """Holds the time to first token; -1 means that there was none."""
    end_s: float = -1.0
    num_tokens: int = 0
    num_attempts: int = 0
    predicted_s: float = 0.0
    """Holds the first attempt's prediction of the time to first token."""
    lower_bound_s: float = 0.0
    num_cached: int = 0
    error: str = ""
    worker_id: str = ""
    encoder_ids: list[MemberId] = field(default_factory=list)

    @property
    def is_served(self) -> bool:
        return not self.error and self.end_s >= 0.0

    @property
    def token_s(self) -> float:
        """Returns the mean time per output token after the first one."""
        return (self.end_s - self.first_token_s) / max(self.num_tokens - 1, 1)
