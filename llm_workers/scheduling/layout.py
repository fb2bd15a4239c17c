"""Where media stand in a prompt: runs of placeholders, the units they take rows of, and what must have landed.

One layout per request, shared by its choices. Knows no state: which units are there is the inbox's.
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
    """A unit, and where its last run ends, over all occurrences."""

    unit: UnitKey
    end: int


class PromptLayout:
    """Raises ProtocolError for placeholders that contradict the prompt or its media, FeatureMismatch if the request
    promises two sizes for one unit."""

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

    @property
    def longest_run(self) -> int:
        return max((run.length for run in self._runs), default=0)

    def units_after(self, position: int) -> list[UnitKey]:
        """Units with a run that ends behind `position`, in the order in which the prompt reaches them."""
        return [span.unit for span in self._spans if span.end > position]

    def next_read(self, unit: UnitKey, position: int) -> int:
        """Where the first run of the unit that ends behind `position` begins; there must be one."""
        runs = self._unit_to_runs[unit]
        return runs[bisect_right(runs, position, key=lambda run: run.end)].offset

    def units_completed(self, start: int, end: int) -> list[UnitKey]:
        """Units whose last run ends in `(start, end]`."""
        first = bisect_right(self._span_ends, start)
        return [span.unit for span in self._spans_by_end[first : bisect_right(self._span_ends, end)]]

    def runs_between(self, start: int, end: int) -> list[tuple[PlaceholderRange, UnitKey]]:
        """Runs that overlap `[start, end)`, in order."""
        found = []
        for index in range(bisect_right(self._run_ends, start), len(self._runs)):
            if self._runs[index].offset >= end:
                break
            found.append((self._runs[index], self._run_units[index]))
        return found

    def splices(self, start: int, end: int) -> tuple[Splice, ...]:
        """Rows to splice into a chunk `[start, end)`."""
        splices = []
        for run, unit in self.runs_between(start, end):
            first, last = max(start, run.offset), min(end, run.end)
            splices.append(Splice(first - start, last - first, unit, run.row + first - run.offset))
        return tuple(splices)

    def run_around(self, position: int) -> PlaceholderRange | None:
        """The run that `position` lies strictly inside of: a step that ended there would cut it."""
        index = bisect_right(self._run_ends, position)
        if index < len(self._runs) and self._runs[index].offset < position:
            return self._runs[index]
        return None

    def block_keys(self, first: int, last: int, block_size: int) -> dict[int, list[bytes]]:
        """Extra keys of the hashes of blocks `[first, last)` that have any, by their index counted from `first`; only
        the runs near them are looked at."""
        begin = bisect_right(self._run_ends, first * block_size)
        if begin == len(self._runs) and first:
            return {}  # behind the last medium, as every generated block is
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
    """Promised rows of every unit that the prompt takes."""
    promised: dict[UnitKey, int] = {}
    for item in media:
        for unit, num_tokens in zip(item.unit_keys(), item.unit_tokens, strict=True):
            if promised.setdefault(unit, num_tokens) != num_tokens:
                raise FeatureMismatch(f"one medium with {promised[unit]} and with {num_tokens} tokens", param=item.part)
    return {unit: promised[unit] for unit in units}
