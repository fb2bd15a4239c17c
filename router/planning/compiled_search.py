"""Calls `route_search.c`, which makes the whole choice of a plan in one call, and turns its answer into terms.

Most of a plan's time would be calls from Python otherwise, because each array and each call costs about a microsecond.
So a request goes to C as two strings of bytes and the answer comes back as one list of numbers; the columns of the
members stay where they are. The scratch of the search is kept from one call to the next, one for each thread.

The module knows nothing of how a route is chosen: `route_plan` explains that and has the same search in Python.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fabric.c_library import load_c_library
from fabric.c_structures import address_of
from fabric.contracts import MediaItem, NoCapacity
from router.planning.member_columns import MAX_SILENCE_S, ClusterColumns, SlotColumns
from router.planning.plan_types import CandidateTerms, Chance, ItemTerms, PlanSettings, QueryHints, RouteQuery

MAX_TRIALS = 320
"""Limits the assignments that the search tries for one worker. A request of eight pictures needs about 100."""
EXPLORED = 1.25
"""An exploring plan takes any worker whose score is at most this many times the best one."""


class FoundRoute(NamedTuple):
    """Holds what a search found."""

    winner: CandidateTerms
    alternatives: tuple[CandidateTerms, ...]
    lower_bound_s: float
    is_explored: bool
    num_near: int
    num_workers: int
    """Counts the workers that could have served the request."""


def search(
    query: RouteQuery, columns: ClusterColumns, hints: QueryHints, now: float, settings: PlanSettings, chance: Chance
) -> FoundRoute | None:
    """Returns the route that `RouteSearch` finds in Python. Returns None if there is no compiler, or if no worker can
    get all the media that it lacks. Raises NoCapacity if no worker is available."""
    library = load_library()
    if library is None:
        return None
    workers, encoders, media = columns.workers, columns.encoders, _flattened(query, columns, hints)
    question = _packed(query, columns, hints, now, settings, chance, media.counts)
    memory = _MEMORY
    memory.reserve_answer(_HEAD + (settings.num_alternatives + 1) * (_TERMS + _ITEM * media.num_items))
    while True:
        status = library.search_route(
            ctypes.byref(workers.described(library)),
            ctypes.byref(encoders.described(library)),
            question,
            media.numbers,
            memory.scratch_at,
            memory.num_bytes,
            memory.answer_at,
        )
        if status <= 0:
            break
        memory.reserve_scratch(status)
    if status == _NO_WORKER:
        raise NoCapacity("no worker is available")
    if status == _NO_ENCODER:
        return None
    return _found(query, columns, media, memory.answer.tolist())


# ------------------------------------------------------------ the question


def _packed(
    query: RouteQuery,
    columns: ClusterColumns,
    hints: QueryHints,
    now: float,
    settings: PlanSettings,
    chance: Chance,
    counts: Sequence[int],
) -> bytes:
    """Returns `Question` of `route_search.c`. The arrays that it points to must outlive the call of C."""
    return _QUESTION.pack(
        now,
        settings.stale_after_s,
        MAX_SILENCE_S,
        query.token_count,
        columns.context_scale_tokens,
        next((run.offset for run in query.placeholders if run.length > 0), query.token_count),
        address_of(hints.depths),
        0 if hints.promised_tokens is None else address_of(hints.promised_tokens),
        settings.tolerance,
        settings.affinity_limit_s,
        settings.exploration,
        EXPLORED,
        chance.tie_break,
        chance.explore,
        min(settings.num_alternatives, _MAX_ALTERNATIVES),
        MAX_TRIALS,
        query.priority,
        query.feature_row_bytes,
        len(columns.encoders.rates),
        len(columns.links),
        *counts,
        address_of(columns.patterns.pattern_of_worker),
        address_of(columns.patterns.classes),
        address_of(columns.links),
    )


class _FlatMedia(NamedTuple):
    """Holds the media of a query as numbers. A medium that occurs twice is encoded, and lands, once."""

    num_items: int
    """Counts the different media."""
    counts: tuple[int, int, int, int, int, int, int]
    numbers: bytes
    occurrences: Sequence[tuple[MediaItem, int]] = ()
    """Holds each item of the query with the number of its medium."""


def _flattened(query: RouteQuery, columns: ClusterColumns, hints: QueryHints) -> _FlatMedia:
    """Returns the media, and the slots of members that the request must not use, in the order of `Media` in C."""
    barred: list[list[int]] = [[], []]
    for member_id in query.excluded:
        for slots, members in zip(barred, (columns.workers, columns.encoders), strict=True):
            if (slot := members.member_to_slot.get(member_id)) is not None:
                slots.append(slot)
    if not query.media:
        numbers = array("q", barred[0] + barred[1]).tobytes()
        return _FlatMedia(0, (0, 0, 0, len(barred[0]), len(barred[1]), 0, 0), numbers)
    rows, hash_to_number, index_to_number = columns.modality_to_row, dict[str, int](), dict[int, int]()
    items: list[int] = []
    tokens: list[int] = []
    runs: list[int] = []
    kept: list[int] = []
    ready: list[int] = []
    ready_s: list[float] = []
    occurrences = []
    for item in query.media:
        number = hash_to_number.setdefault(item.mm_hash, len(hash_to_number))
        index_to_number[item.index] = number
        occurrences.append((item, number))
        if 4 * number < len(items):
            continue
        items += (rows.get(item.modality, 0), item.cost, item.num_levels, len(item.unit_tokens))
        tokens += item.unit_tokens
        for slot, seconds in hints.encoder_ready.get(item.mm_hash, ()):
            ready += (number, slot)
            ready_s.append(seconds)
        for slot in hints.worker_kept.get(item.mm_hash, ()):
            kept += (number, slot)
    for run in query.placeholders:
        runs += (run.offset, run.length, index_to_number.get(run.item, -1), run.unit)
    num_items = len(hash_to_number)
    numbers = array("q", items + tokens + runs + barred[0] + barred[1] + kept + ready).tobytes()
    return _FlatMedia(
        num_items,
        (num_items, len(tokens), len(runs) // 4, len(barred[0]), len(barred[1]), len(kept) // 2, len(ready_s)),
        numbers + array("d", ready_s).tobytes() if ready_s else numbers,
        occurrences,
    )


# ------------------------------------------------------------ the answer

_HEAD, _TERMS, _ITEM = 6, 10, 10
"""These are the numbers of values in an answer: ahead of the candidates, for each candidate, and for each of its
media."""


def _found(query: RouteQuery, columns: ClusterColumns, media: _FlatMedia, values: list[float]) -> FoundRoute:
    lower_bound_s, is_explored, num_near, num_workers, is_landed, num_candidates = values[:_HEAD]
    num_values = _ITEM * media.num_items if is_landed else 0
    candidates, at = [], _HEAD
    for _ in range(int(num_candidates)):
        slot, held, covered, queue_s, prefill_s, held_s, last_s, ttft_s, delivery_s, released_s = values[
            at : at + _TERMS
        ]
        at += _TERMS
        member = columns.workers.members[int(slot)]
        assert member is not None, "a usable slot has a member"
        candidates.append(
            CandidateTerms(
                member.member_id,
                int(covered),
                int(query.token_count - covered),
                queue_s,
                prefill_s,
                held_s,
                last_s,
                ttft_s,
                _item_terms(query, columns.encoders, media, values[at : at + num_values], held) if is_landed else (),
                delivery_s,
                released_s,
            )
        )
        at += num_values
    return FoundRoute(
        candidates[0], tuple(candidates[1:]), lower_bound_s, is_explored > 0.0, int(num_near), int(num_workers)
    )


def _item_terms(
    query: RouteQuery, encoders: SlotColumns, media: _FlatMedia, values: list[float], held: float
) -> tuple[ItemTerms, ...]:
    """Returns the terms of the items that a worker lacks, in order of index. Of the items with one content, the first
    one has the costs."""
    found: list[ItemTerms] = []
    seen: set[int] | None = None
    if len(media.occurrences) > media.num_items:  # The worker may hold an item whose twin it lacks.
        seen, ends = set(), {run.item: run.end for run in query.placeholders if run.length > 0}
    for item, number in media.occurrences:
        at = _ITEM * number
        if values[at] < 0.0:
            continue
        slot, is_ready, wait_s, decode_wait_s, decode_s, device_s, encode_s, transfer_s, landing_s, num_bytes = values[
            at : at + _ITEM
        ]
        encoder = encoders.members[int(slot)]
        assert encoder is not None, "an able slot has a member"
        if seen is not None:
            if ends.get(item.index, held + 1.0) <= held:
                continue
            if number in seen:
                found.append(ItemTerms.twin(item, encoder.member_id, landing_s))
                continue
            seen.add(number)
        found.append(
            ItemTerms(
                item.index,
                item.mm_hash,
                encoder.member_id,
                is_ready > 0.0,
                wait_s,
                decode_wait_s,
                decode_s,
                device_s,
                encode_s,
                transfer_s,
                landing_s,
                item.cost,
                int(num_bytes),
                item.modality,
                num_units=len(item.unit_tokens),
            )
        )
    return tuple(found)


# ------------------------------------------------------------ the C library

_NO_WORKER, _NO_ENCODER, _MAX_ALTERNATIVES = -1, -2, 15
_QUESTION = struct.Struct("6d2P 6d2q 4q7q 3P")
"""Packs `Question` of `route_search.c`: its request, its choice, its counts and its arrays."""


class _Memory(threading.local):
    """Keeps the scratch and the answer of a thread's searches. Both grow to what the largest one needed."""

    def __init__(self) -> None:
        self.answer, self.answer_at = np.zeros(0), 0
        self.reserve_scratch(1 << 16)

    def reserve_scratch(self, num_bytes: int) -> None:
        # The system gives memory to the pages that are written only, and few rows of landings are.
        self.scratch = np.empty(num_bytes, np.uint8)
        self.scratch_at, self.num_bytes = address_of(self.scratch), num_bytes

    def reserve_answer(self, num_values: int) -> None:
        if num_values > len(self.answer):
            self.answer = np.zeros(num_values)
            self.answer_at = address_of(self.answer)


_MEMORY = _Memory()


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Returns `route_search.c` as a library, or None if there is no compiler."""
    library = load_c_library(Path(__file__).with_name("route_search.c"))
    if library is not None:
        pointer, number, seconds, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_char_p
        library.search_route.argtypes = [pointer, pointer, text, text, pointer, number, pointer]
        library.search_route.restype = number
        library.device_waits.argtypes = [pointer, seconds, seconds, seconds, number, pointer, pointer]
        library.device_waits.restype = None
        library.land_rows.argtypes = [pointer, number, pointer, pointer, number, *[pointer] * 3]
        library.land_rows.restype = None
        library.improve.argtypes = [*[pointer] * 4, seconds, seconds, pointer, number, *[pointer] * 3]
        library.improve.restype = seconds
    return library
