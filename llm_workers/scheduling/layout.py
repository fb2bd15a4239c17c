"""Describes where media stand in a prompt: the runs of placeholder tokens, the units (separate parts of a medium's
features) whose rows replace them, and which units must have landed.

The choices of one request share one layout. It knows no state: the inbox knows which units are here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from fabric.errors import FeatureMismatch, ProtocolError
from fabric.ids import UnitKey
from fabric.messages import GenerateRequest, MediaItem, PlaceholderRange
from kv_index.block_hashing import keys_of_blocks
from llm_workers.scheduling.plan import Splice


class UnitSpan(NamedTuple):
    """A `UnitSpan` is a unit and the end of its last run, over all occurrences in the prompt."""

    unit: UnitKey
    end: int


class PromptLayout:
    """Holds the runs of placeholders of one prompt. The constructor raises ProtocolError for placeholders that
    contradict the prompt or its media, and FeatureMismatch if the request promises two sizes for one unit."""

    def __init__(self, request: GenerateRequest) -> None:
        self._runs = request.placeholders
        self._media = request.media
        self._cache_salt = request.cache_salt
        _check_runs(self._runs, self._media, len(request.token_ids))
        self._run_ends = [run.end for run in self._runs]
        self._run_units = [UnitKey(self._media[run.item].mm_hash, run.unit) for run in self._runs]
        self.unit_to_tokens = _unit_tokens(self._media, self._run_units)
        spans: dict[UnitKey, UnitSpan] = {}
        for run, unit in zip(self._runs, self._run_units, strict=True):
            spans[unit] = UnitSpan(unit, run.end)
        self._unit_to_runs: dict[UnitKey, list[PlaceholderRange]] = {}
        for run, unit in zip(self._runs, self._run_units, strict=True):
            self._unit_to_runs.setdefault(unit, []).append(run)
        self._spans = tuple(spans.values())
        self._spans_by_end = sorted(self._spans, key=lambda span: span.end)
        self._span_ends = [span.end for span in self._spans_by_end]

    def units_after(self, position: int) -> list[UnitKey]:
        """Returns the units with a run that ends after `position`, in the order in which the prompt reaches them."""
        return [span.unit for span in self._spans if span.end > position]

    def next_read(self, unit: UnitKey, position: int) -> int:
        """Returns the index at which the unit's first run that ends after `position` begins; there must be one."""
        runs = self._unit_to_runs[unit]
        return runs[bisect_right(runs, position, key=lambda run: run.end)].offset

    def units_completed(self, start: int, end: int) -> list[UnitKey]:
        """Returns the units whose last run ends in `(start, end]`."""
        first = bisect_right(self._span_ends, start)
        return [span.unit for span in self._spans_by_end[first : bisect_right(self._span_ends, end)]]

    def runs_between(self, start: int, end: int) -> list[tuple[PlaceholderRange, UnitKey]]:
        """Returns the runs that overlap `[start, end)`, in order, each with its unit."""
        found = []
        for index in range(bisect_right(self._run_ends, start), len(self._runs)):
            if self._runs[index].offset >= end:
                break
            found.append((self._runs[index], self._run_units[index]))
        return found

    def splices(self, start: int, end: int) -> tuple[Splice, ...]:
        """Returns the rows to splice into a chunk `[start, end)`."""
        splices = []
        for run, unit in self.runs_between(start, end):
            first, last = max(start, run.offset), min(end, run.end)
            splices.append(Splice(first - start, last - first, unit, run.row + first - run.offset))
        return tuple(splices)

    def block_keys(self, first: int, last: int, block_size: int) -> dict[int, list[bytes]]:
        """Returns the extra keys of the hashes of blocks `[first, last)`, for those blocks that have any, by the
        block's index counted from `first`. Looks only at the runs near these blocks."""
        begin = bisect_right(self._run_ends, first * block_size)
        if begin == len(self._runs) and first:
            return {}  # All runs end before these blocks; this holds for all blocks of generated tokens.
        end = bisect_left(self._runs, last * block_size, lo=begin, key=lambda run: run.offset)
        return keys_of_blocks(first, last, block_size, self._runs[begin:end], self._media, self._cache_salt)


def _check_runs(runs: tuple[PlaceholderRange, ...], media: tuple[MediaItem, ...], num_tokens: int) -> None:
    end = 0
    for run in runs:
        if run.offset < end or run.length < 1 or run.end > num_tokens:
            raise ProtocolError(f"placeholders [{run.offset}, {run.end}) overlap or leave the prompt of {num_tokens}")
        if not 0 <= run.item < len(media) or media[run.item].index != run.item:
            raise ProtocolError(
                f"placeholders [{run.offset}, {run.end}) name media item {run.item}, which is not there"
            )
        units = media[run.item].unit_tokens
        if not 0 <= run.unit < len(units) or run.row < 0 or run.row + run.length > units[run.unit]:
            raise ProtocolError(f"placeholders [{run.offset}, {run.end}) take rows that item {run.item} has not")
        end = run.end


def _unit_tokens(media: tuple[MediaItem, ...], units: list[UnitKey]) -> dict[UnitKey, int]:
    """Returns the promised number of rows of every unit that the prompt uses. Raises FeatureMismatch if one unit is
    promised with two sizes."""
    promised: dict[UnitKey, int] = {}
    for item in media:
        for unit, num_tokens in zip(item.unit_keys(), item.unit_tokens, strict=True):
            if promised.setdefault(unit, num_tokens) != num_tokens:
                raise FeatureMismatch(f"one medium with {promised[unit]} and with {num_tokens} tokens", param=item.part)
    return {unit: promised[unit] for unit in units}
