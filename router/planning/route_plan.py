"""Chooses the route of a request: `plan_route` takes the worker with the earliest first token, each worker with the
encoders that suit it best. `plan_encoding` chooses encoders alone, for items that a worker needs after all.

The score of a worker `w` is the time to first token that it would need. A walk over the spans of the prompt gives it:

    t = time until w can start (its queue: see `predictions`)
    for each span not covered by w's KV prefix:
        text span:   t = t + prefill_w(length, context)
        media unit:  t = max(t, land(unit, w)) + prefill_w(length, context)
    ttft(w) = t + first_token_w

Text ahead of a medium overlaps with the medium's encoding, because `t` advances meanwhile; with no text ahead of it,
the walk is the plain sum of encoding, transfer and prefill. The walk has a closed form, with p the time per weighted
token, so that all workers are scored at once:

    end = max(start + p * all missing tokens, max over units u of (land_u + p * tokens from u's first missing one on))

Workers that lack the same items and have the same links to all encoders share their landing times, which are one row of
`landings`. The functions change nothing and have no clock; chance enters as an argument. The module knows nothing of
how the columns come about, or of how waits and landing times are predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fabric.contracts import MediaItem, MemberId, MmHash, NoCapacity
from router.planning import compiled_search
from router.planning.compiled_search import EXPLORED, MAX_TRIALS, FoundRoute
from router.planning.landing_search import NONE, Improved, LandingGoal, LandingProblem
from router.planning.landings import improve, land_idle, land_rows
from router.planning.member_columns import (
    Bytes,
    ClusterColumns,
    Floats,
    decoder_waits_s,
    idle_pace,
)
from router.planning.plan_types import (
    Assignment,
    CandidateTerms,
    Chance,
    Explanation,
    ItemTerms,
    PairScores,
    PlanSettings,
    QueryHints,
    RoutePlan,
    RouteQuery,
)
from router.planning.predictions import (
    MediaRuns,
    RequestSize,
    WorkerTimes,
    await_landings,
    device_waits,
    worker_times,
)
from router.planning.scored_workers import (
    Ints,
    LackedMedia,
    WorkerLandings,
    WorkerScores,
    alike_rows,
    scored_prompt,
)


def plan_route(
    query: RouteQuery,
    columns: ClusterColumns,
    hints: QueryHints,
    now: float,
    settings: PlanSettings,
    chance: Chance,
) -> RoutePlan:
    """Returns the plan with the earliest predicted first token: a worker, and an encoder for each item that the worker
    lacks. Of workers that are near-equal, it takes one with the fewest open attempts; chance decides among those. `now`
    is on the router's clock.

    Raises NoCapacity if there is no worker, or if no encoder can take a modality; the error then names the modality.
    """
    return RouteSearch(query, columns, hints, now, settings, chance).plan()


def plan_encoding(
    query: RouteQuery,
    worker_id: MemberId,
    item_indexes: Sequence[int],
    columns: ClusterColumns,
    hints: QueryHints,
    now: float,
    settings: PlanSettings,
    chance: Chance,
) -> tuple[ItemTerms, ...]:
    """Returns encoders, chosen by the same landing times, for items that a worker needs after all, because the worker
    has evicted them or an encoder is lost. The terms are in order of index.

    Raises NoCapacity if no encoder can take a modality; the error names the modality.
    """
    return RouteSearch(query, columns, hints, now, settings, chance).plan_encoding(worker_id, frozenset(item_indexes))


def score_pairs(
    query: RouteQuery,
    columns: ClusterColumns,
    hints: QueryHints,
    now: float,
    settings: PlanSettings,
    max_pairs: int,
) -> PairScores:
    """Returns the scores of pairs of a worker and an encoder, the best first, at most `max_pairs`. It takes a tenth of
    a millisecond for each, so it is only for requests that are to be explained.

    Raises NoCapacity as `plan_route` does.
    """
    return RouteSearch(query, columns, hints, now, settings, Chance()).pairs(max_pairs)


class RouteSearch:
    """A `RouteSearch` is one query against the columns at one moment. `plan` searches in C (`compiled_search`), which
    makes the same choice as `search`."""

    def __init__(
        self,
        query: RouteQuery,
        columns: ClusterColumns,
        hints: QueryHints,
        now: float,
        settings: PlanSettings,
        chance: Chance,
    ) -> None:
        self._query, self._columns, self._hints = query, columns, hints
        self._now, self._settings, self._chance = now, settings, chance

    # ------------------------------------------------------------ the plan

    def plan(self) -> RoutePlan:
        """Returns the plan. It searches in C where it can. Raises NoCapacity."""
        query, workers = self._query, self._columns.workers
        found = compiled_search.search(query, self._columns, self._hints, self._now, self._settings, self._chance)
        if found is None:
            found = self.search()
        terms, alternatives = found.winner, found.alternatives
        member = workers.members[workers.member_to_slot[terms.worker_id]]
        assert member is not None, "a usable slot has a member"
        covered: tuple[int, ...] = ()
        if len(terms.items) < len(query.media):
            assigned = {each.item_index for each in terms.items}
            covered = tuple(item.index for item in query.media if item.index not in assigned)
        return RoutePlan(
            attempt_id=query.attempt_id,
            worker_id=member.member_id,
            worker_address=member.address,
            assignments=tuple([Assignment(each.item_index, each.encoder_id) for each in terms.items]),
            covered_items=covered,
            predicted_ttft_s=terms.ttft_s,
            lower_bound_s=min(found.lower_bound_s, terms.ttft_s),
            explanation=Explanation(
                winner=terms,
                runner_up=alternatives[0] if alternatives else None,
                num_workers=found.num_workers,
                num_near_equal=found.num_near,
                alternatives=alternatives,
                is_explored=found.is_explored,
            ),
            planned_at_s=self._now,
        )

    def search(self) -> FoundRoute:
        """Finds the route in Python. Raises NoCapacity."""
        scores = self.score()
        winner, is_explored, num_near = self._choose(scores)
        others = self._next_best(scores, winner)
        best = self._improved(scores, winner)
        if best is not None and not is_explored and scores.landed is not None and scores.landed.problem.num_items > 1:
            winner, best = self._best_improved(scores, winner, best, others)
            others = self._next_best(scores, winner)
        return FoundRoute(
            winner=self._terms(scores, winner, best),
            alternatives=tuple(self._terms(scores, slot, self._as_landed(scores, slot)) for slot in others),
            lower_bound_s=self._lower_bound_s(scores, winner, best),
            is_explored=is_explored,
            num_near=num_near,
            num_workers=int(np.count_nonzero(scores.ttft_s < np.inf)),
        )

    def plan_encoding(self, worker_id: MemberId, item_indexes: frozenset[int]) -> tuple[ItemTerms, ...]:
        """Returns the terms of these items. Raises NoCapacity."""
        media = self._media(item for item in self._query.media if item.index in item_indexes)
        problem = self._problem(media)
        slot = self._columns.workers.member_to_slot.get(worker_id)
        patterns = self._columns.patterns
        if slot is None:  # The links to an unknown worker are those of the most distant class.
            classes = np.full(self._columns.encoders.capacity, len(self._columns.links) - 1, np.uint8)
        else:
            classes = patterns.classes[patterns.pattern_of_worker[slot]]
        lacks = np.ones(problem.num_items, np.uint8)
        rows = land_rows(problem, classes[None, :], lacks[None, :])
        if (rows.encoders == NONE).any():
            raise self._no_encoder(media)
        goal = LandingGoal(0.0, 0.0, np.zeros(problem.num_units))
        return self._item_terms(media, problem, improve(problem, classes, lacks, rows.encoders[0], goal), classes)

    # ------------------------------------------------------------ the scores

    def score(self) -> WorkerScores:
        """Scores all workers that the request may use. Raises NoCapacity."""
        workers, query, prompt = self._columns.workers, self._query, scored_prompt(self._query)
        num = len(workers)
        is_usable = workers.usable(query.excluded, self._now)
        if not is_usable.any():
            raise NoCapacity("no worker is available")
        size = RequestSize(
            query.token_count,
            self._columns.context_scale_tokens,
            self._hints.depths,
            self._hints.promised_tokens,
            prompt.num_text_first,
        )
        times = worker_times(workers, size, self._now, self._settings.stale_after_s)
        end_s, landed = times.start_s + times.own_s, None
        if prompt.last_media_end > 0 and (times.held[is_usable] < prompt.last_media_end).any():
            landed = self._land(times.held)
            rows, row_of_worker = landed.rows.landings_s, landed.row_of_worker
            await_landings(workers, times, self._now, rows, row_of_worker, landed.media.runs, end_s)
            is_usable = is_usable & landed.is_possible
            if not is_usable.any():
                raise self._no_encoder(landed.media)
        ttft_s = end_s + times.last_s + workers.delivery_s[:num]
        ttft_s[~is_usable] = np.inf
        least_own_s = float((times.own_s + times.last_s)[is_usable].min())
        return WorkerScores(times, end_s, ttft_s, least_own_s, landed, self._released_s(times))

    def _released_s(self, times: WorkerTimes) -> Floats | None:
        """Returns what the choice adds to the scores of workers whose queue is too long for a prefix to bind a request
        to them: the time that the prefix saves there. Returns None if it adds nothing."""
        is_full = times.queue_s > self._settings.affinity_limit_s
        if not is_full.any():
            return None
        num_tokens, scale = self._query.token_count, self._columns.context_scale_tokens
        whole = num_tokens * (1.0 + 0.5 * num_tokens / scale)
        released_s: Floats = is_full * times.s_per_token * (whole - times.weighted)
        return released_s

    def _land(self, held: Floats) -> WorkerLandings:
        """Predicts the landings at all workers."""
        patterns, media = self._columns.patterns, self._media(self._query.media)
        problem = self._problem(media)
        lacks = media.ends[None, :] > held[:, None]
        for number, item in enumerate(media.items):
            for slot in self._hints.worker_kept.get(item.mm_hash, ()):
                lacks[slot, number] = False
        if lacks.all():  # The workers differ only in their links.
            row_of_worker, classes = patterns.pattern_of_worker, patterns.classes
            lacks_of_row = np.ones((len(classes), len(media.items)), np.uint8)
        else:
            row_of_worker, first = alike_rows(patterns.pattern_of_worker, lacks)
            classes, lacks_of_row = patterns.classes[patterns.pattern_of_worker[first]], lacks[first].astype(np.uint8)
        rows = land_rows(problem, classes, lacks_of_row)
        is_possible = ~((rows.encoders == NONE) & (lacks_of_row > 0)).any(axis=1)
        return WorkerLandings(media, problem, rows, classes, lacks_of_row, row_of_worker, is_possible[row_of_worker])

    def _choose(self, scores: WorkerScores) -> tuple[int, bool, int]:
        """Returns the slot of the chosen worker, whether it was chosen to explore, and how many were near-equal."""
        settings, chance, workers = self._settings, self._chance, self._columns.workers
        choice_s = scores.ttft_s if scores.released_s is None else scores.ttft_s + scores.released_s
        best_s = float(choice_s.min())
        if chance.explore < settings.exploration:
            near = np.flatnonzero(choice_s <= EXPLORED * best_s)
            return int(near[int(chance.tie_break * len(near))]), True, len(near)
        near = np.flatnonzero(choice_s <= best_s + settings.tolerance * scores.least_own_s)
        if len(near) > 1:
            num_open = workers.num_open[near]
            near = near[num_open == num_open.min()]
        return int(near[int(chance.tie_break * len(near))]), False, len(near)

    def _next_best(self, scores: WorkerScores, winner: int) -> list[int]:
        """Returns the slots of the best other workers, the best first."""
        num = self._settings.num_alternatives + 1
        ordered: list[int] = np.argsort(scores.ttft_s, kind="stable")[:num].tolist()
        usable = [slot for slot in ordered if slot != winner and scores.ttft_s[slot] < np.inf]
        return usable[: self._settings.num_alternatives]

    def pairs(self, max_pairs: int) -> PairScores:
        """Scores every worker with every encoder that could encode all media which the worker lacks, and returns the
        best pairs. A worker that lacks nothing, or that no single encoder can serve, has one score. Raises
        NoCapacity."""
        scores = self.score()
        usable = [slot for slot in np.argsort(scores.ttft_s, kind="stable").tolist() if scores.ttft_s[slot] < np.inf]
        choices = [(slot, encoders) for slot in usable for encoders in self._single_encoders(scores, slot)]
        terms = [self._terms(scores, slot, self._improved(scores, slot, given)) for slot, given in choices[:max_pairs]]
        return PairScores(tuple(sorted(terms, key=lambda each: each.ttft_s)), len(choices))

    def _single_encoders(self, scores: WorkerScores, slot: int) -> list[Ints | None]:
        """Returns the choices that send all media which a worker lacks to one encoder, in the order of the slots."""
        landed = scores.landed
        if landed is None:
            return [None]
        problem, lacks = landed.problem, landed.lacks[landed.row_of_worker[slot]] > 0
        able = problem.is_able[problem.modality[lacks], : problem.num_encoders].all(axis=0)
        single: list[Ints | None] = [
            np.where(lacks, encoder, NONE).astype(np.int64) for encoder in np.flatnonzero(able).tolist()
        ]
        return single if single and lacks.any() else [None]

    def _improved(self, scores: WorkerScores, slot: int, given: Ints | None = None) -> Improved | None:
        """Returns the best encoders that are found for one worker, or the `given` ones with their landings. Returns
        None if it lacks nothing."""
        landed, times = scores.landed, scores.times
        if landed is None:
            return None
        least_s = float(times.start_s[slot] + times.own_s[slot])
        goal = LandingGoal(least_s, float(times.s_per_token[slot]), landed.behind(times, slot))
        row = landed.row_of_worker[slot]
        classes, lacks = landed.classes[row], landed.lacks[row]
        encoders, max_trials = (landed.rows.encoders[row], MAX_TRIALS) if given is None else (given, 0)
        found = improve(landed.problem, classes, lacks, encoders, goal, max_trials)
        end_s = np.full(len(scores.ttft_s), least_s)
        landings_s, rows = found.landings_s[None, :], np.zeros(len(end_s), np.int64)
        slots = range(slot, slot + 1)
        await_landings(self._columns.workers, times, self._now, landings_s, rows, landed.media.runs, end_s, slots)
        return found._replace(end_s=float(end_s[slot]))

    def _best_improved(
        self, scores: WorkerScores, winner: int, best: Improved, others: Sequence[int]
    ) -> tuple[int, Improved]:
        """Improves the encoders of the next workers too, as far as their links or their lacking media differ, because
        more may be gained there than for the winner. Returns the best worker with its encoders."""
        landed, times = scores.landed, scores.times
        assert landed is not None, "the winner lacks media"
        rows, best_s = {int(landed.row_of_worker[winner])}, self._choice_s(scores, winner, best)
        for slot in others:
            row = int(landed.row_of_worker[slot])
            least_s = float(times.start_s[slot] + times.own_s[slot] + times.last_s[slot]) + scores.released_at(slot)
            if row in rows or least_s >= best_s or (improved := self._improved(scores, slot)) is None:
                continue
            rows.add(row)
            if (choice_s := self._choice_s(scores, slot, improved)) < best_s:
                winner, best, best_s = slot, improved, choice_s
        return winner, best

    def _choice_s(self, scores: WorkerScores, slot: int, best: Improved) -> float:
        """Returns the time by which the choice compares a worker with these encoders."""
        end_s = max(float(scores.times.start_s[slot] + scores.times.own_s[slot]), best.end_s)
        last_s = float(scores.times.last_s[slot] + self._columns.workers.delivery_s[slot])
        return end_s + last_s + scores.released_at(slot)

    def _as_landed(self, scores: WorkerScores, slot: int) -> Improved | None:
        """Returns the encoders with which a worker was scored, or None if it lacks nothing."""
        landed = scores.landed
        if landed is None:
            return None
        row = landed.row_of_worker[slot]
        goal = LandingGoal(0.0, 0.0, landed.media.nothing_behind)
        classes, lacks, encoders = landed.classes[row], landed.lacks[row], landed.rows.encoders[row]
        found = improve(landed.problem, classes, lacks, encoders, goal, max_trials=0)
        return found._replace(end_s=float(scores.end_s[slot]))

    def _lower_bound_s(self, scores: WorkerScores, slot: int, best: Improved | None) -> float:
        """Returns the time to first token on this worker with every queue empty and the encoders chosen again for that
        case. If the encoders as they were chosen give less, it returns that."""
        workers, landed = self._columns.workers, scores.landed
        covered, weighted = float(scores.times.covered[slot]), float(scores.times.weighted[slot])
        s_per_token, last_s = idle_pace(workers, slot, int(self._query.token_count - covered), weighted)
        end_s = s_per_token * weighted
        if landed is not None and best is not None:
            row = landed.row_of_worker[slot]
            idle_s = land_idle(landed.problem, landed.classes[row], landed.lacks[row])
            behind_s = s_per_token * landed.behind(scores.times, slot)
            awaited_s = [float(np.maximum.reduce(each + behind_s)) for each in (idle_s, best.landings_s)]
            end_s = max(end_s, min(awaited_s))
        return end_s + last_s + float(workers.delivery_s[slot])

    # ------------------------------------------------------------ media

    def _media(self, items: Iterable[MediaItem]) -> LackedMedia:
        """Returns the different media of some items: a medium that occurs twice is encoded, and lands, once."""
        hash_to_number: dict[MmHash, int] = {}
        unique: list[MediaItem] = []
        index_to_number: dict[int, int] = {}
        for item in items:
            if item.mm_hash not in hash_to_number:
                hash_to_number[item.mm_hash] = len(unique)
                unique.append(item)
            index_to_number[item.index] = hash_to_number[item.mm_hash]
        first_unit = np.cumsum([0, *(len(item.unit_tokens) for item in unique)])
        runs = [run for run in self._query.placeholders if run.length > 0 and run.item in index_to_number]
        ends = np.zeros(len(unique))
        for run in runs:
            number = index_to_number[run.item]
            ends[number] = max(ends[number], run.end)
        num_tokens, scale = self._query.token_count, self._columns.context_scale_tokens
        offsets = np.array([run.offset for run in runs], np.float64)
        rest = num_tokens - offsets
        return LackedMedia(
            items=unique,
            first_unit=first_unit,
            ends=ends,
            runs=MediaRuns(
                unit=np.array([first_unit[index_to_number[run.item]] + run.unit for run in runs], np.int64),
                end=np.array([run.end for run in runs], np.float64),
                behind=rest * (1.0 + (offsets + 0.5 * rest) / scale),
            ),
            index_to_number=index_to_number,
        )

    def _problem(self, media: LackedMedia) -> LandingProblem:
        """Returns the landing problem of some media with the encoders as they are now."""
        encoders, query, now = self._columns.encoders, self._query, self._now
        num, items = len(encoders), media.items
        stale_after_s = self._settings.stale_after_s
        waits = device_waits(encoders, now, stale_after_s, query.priority)
        is_able = encoders.is_able * (encoders.barred_until_s <= now)
        for member_id in query.excluded:
            if (slot := encoders.member_to_slot.get(member_id)) is not None:
                is_able[:, slot] = 0
        ready_s = np.full((len(items), encoders.capacity), -1.0)
        for number, item in enumerate(items):
            for slot, seconds in self._hints.encoder_ready.get(item.mm_hash, ()):
                if now - encoders.report_at_s[slot] <= stale_after_s or not encoders.is_reported[slot]:
                    ready_s[number, slot] = seconds
        shares, nbytes = [], []
        for item in items:
            per_row = query.feature_row_bytes * max(item.num_levels, 1)
            total, done = max(item.num_tokens, 1), 0
            for tokens in item.unit_tokens:
                done += tokens
                shares.append(done / total)
                nbytes.append(tokens * per_row)
        rows = self._columns.modality_to_row
        return LandingProblem(
            num_encoders=num,
            modality=np.array([rows.get(item.modality, 0) for item in items], np.int64),
            cost=np.array([item.cost for item in items], np.float64),
            first_unit=media.first_unit,
            unit_share=np.array(shares, np.float64),
            unit_bytes=np.array(nbytes, np.float64),
            rates=encoders.rates,
            is_able=is_able,
            decoder_free_s=decoder_waits_s(encoders, now, is_long=any(len(item.unit_tokens) > 1 for item in items)),
            num_decoders=encoders.num_decoders.astype(np.int64),
            waits_s=waits.waits_s,
            bin_sizes_s=waits.sizes_s,
            ready_s=ready_s,
            alpha_s=self._columns.links[:, 0].copy(),
            s_per_byte=self._columns.links[:, 1].copy(),
            first=int(self._chance.tie_break * num),
        )

    def _no_encoder(self, media: LackedMedia) -> NoCapacity:
        problem = self._problem(media)
        num_able = np.count_nonzero(problem.is_able[problem.modality, : problem.num_encoders], axis=1).tolist()
        names = sorted({item.modality for item, num in zip(media.items, num_able, strict=True) if not num})
        return NoCapacity(f"no encoder is available for {', '.join(names)}")

    # ------------------------------------------------------------ explanations

    def _terms(self, scores: WorkerScores, slot: int, best: Improved | None) -> CandidateTerms:
        member = self._columns.workers.members[slot]
        assert member is not None, "a scored slot has a member"
        times, landed = scores.times, scores.landed
        items: tuple[ItemTerms, ...] = ()
        end_s = least_s = float(scores.times.start_s[slot] + scores.times.own_s[slot])
        if landed is not None and best is not None:
            end_s = max(end_s, best.end_s)
            classes, held = landed.classes[landed.row_of_worker[slot]], float(scores.times.held[slot])
            items = self._item_terms(landed.media, landed.problem, best, classes, held)
        delivery_s, last_s = float(self._columns.workers.delivery_s[slot]), float(times.last_s[slot])
        return CandidateTerms(
            worker_id=member.member_id,
            covered_tokens=int(scores.times.covered[slot]),
            num_prefill_tokens=int(self._query.token_count - scores.times.covered[slot]),
            queue_s=float(times.queue_s[slot]),
            prefill_s=float(times.shared_s[slot] + scores.times.own_s[slot]),
            held_s=end_s - least_s,
            first_token_s=last_s,
            ttft_s=end_s + last_s + delivery_s,
            items=items,
            delivery_s=delivery_s,
            released_s=scores.released_at(slot),
        )

    def _item_terms(
        self, media: LackedMedia, problem: LandingProblem, best: Improved, classes: Bytes, held: float = -1.0
    ) -> tuple[ItemTerms, ...]:
        """Returns the terms of the items that a worker lacks, in order of index. Of the items with one content, the
        first one has the costs."""
        found: list[ItemTerms] = []
        seen: set[int] = set()
        ends = scored_prompt(self._query).item_to_end if held >= 0.0 else {}
        for item in self._query.media:
            number = media.index_to_number.get(item.index)
            if number is None or best.encoders[number] == NONE or ends.get(item.index, np.inf) <= held:
                continue
            slot = best.encoders[number]
            encoder = self._columns.encoders.members[slot]
            assert encoder is not None, "an able slot has a member"
            units = slice(int(problem.first_unit[number]), int(problem.first_unit[number + 1]))
            landing_s = float(best.landings_s[units].max())
            is_cached = bool(problem.ready_s[number, slot] >= 0.0)
            if number in seen:
                found.append(ItemTerms.twin(item, encoder.member_id, landing_s))
                continue
            seen.add(number)
            stage = best.stages[number]
            found.append(
                ItemTerms(
                    item_index=item.index,
                    mm_hash=item.mm_hash,
                    encoder_id=encoder.member_id,
                    is_cached=is_cached,
                    wait_s=stage.wait_s,
                    decode_wait_s=stage.decode_wait_s,
                    decode_s=stage.decode_s,
                    device_prepare_s=stage.device_s,
                    encode_s=stage.encode_s,
                    transfer_s=landing_s - stage.done_s,
                    landing_s=landing_s,
                    cost=item.cost,
                    num_bytes=int(problem.unit_bytes[units].sum()),
                    modality=item.modality,
                    num_units=len(item.unit_tokens),
                )
            )
        return tuple(found)
