"""Runs `weft bench overlap`: how much sooner the first token comes because a worker computes what it has while the rest
is still being encoded.

The same requests run on a cluster whose worker waits for all media (`workers.overlap: false`) and on one whose worker
does not, in turn, for several rounds. There are three cases: text in front of a picture that takes as long as the
picture's encoding, eight pictures whose encoding and prefill take equally long, and a video of 32 frames in units. What
the overlap saves is compared with the most that it could save, and each time to first token with its lower bound, when
the cluster is idle and at 70 % load. Costs are measured alone at the beginning, and frozen.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from loadtest.bench_result import Bar, BenchResult
from loadtest.benches.served.ideal_times import IdealRequest, ideal_ttfts_s, possible_saving
from loadtest.benches.served.timed_chats import (
    ChatKind,
    ChatMaker,
    ChatTarget,
    TimedChat,
    poisson_moments_s,
    send_at,
    send_each,
)
from loadtest.benches.served.timed_cluster import (
    AloneCosts,
    TimedStages,
    cluster_config,
    measure_alone,
    on_ray,
    served_model,
)
from loadtest.benches.served.vllm_bench import run_vllm_overlap
from modalities.registry import REGISTRY

LOAD = 0.7
LEAST_SAVED = 0.32
"""This is the part of the time that overlap saves with a long text in front, according to the article on multimodal
routing in Dynamo (docs/references.md)."""
LEAST_PART = 0.75
"""The overlap must save this part of the most that it could save."""
LEAST_IDLE, LEAST_LOADED = 0.85, 0.75
"""The lower bound must be this part of the time to first token, in the median."""
FRONT_STAGES = TimedStages(pass_s=0.02, s_per_patch=0.0015, step_s=0.02, s_per_token=0.0012)
"""A picture of 256 patches takes 0.4 s to encode, and its 64 tokens a fifth of that to prefill."""
EVEN_STAGES = TimedStages(pass_s=0.005, s_per_patch=0.00043, step_s=0.005, s_per_token=0.0012)
"""The encoding of a medium takes about as long as its prefill, which gives the overlap the most to save."""
PICTURE, PICTURES, VIDEO = "a picture", "eight pictures", "a video of 32 frames"
FRONT = "text, then a picture"


class OverlapCase(NamedTuple):
    """An `OverlapCase` is the requests of one cluster, which all have the same stage times."""

    stages: TimedStages
    patterns: tuple[ChatKind, ...]
    """Holds the media without text in front."""
    has_front: bool
    """Says whether the text in front of the first pattern's media is measured, and the load."""


CASES = (
    OverlapCase(FRONT_STAGES, (ChatKind(PICTURE, num_pictures=1),), True),
    OverlapCase(EVEN_STAGES, (ChatKind(PICTURES, num_pictures=8), ChatKind(VIDEO, num_frames=32)), False),
)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="weft bench overlap")
    parser.add_argument("--real", action="store_true", help="computes for real, without waits and without bars")
    parser.add_argument("--rounds", type=int, default=2, help="starts each of the two clusters this many times")
    parser.add_argument("--runs", type=int, default=4, help="sends each request this many times per round")
    parser.add_argument("--loaded", type=int, default=40, help="is the number of requests at 70 %% load")
    parser.add_argument(
        "--engine", default="weft", choices=["weft", "vllm"], help="with vllm, compares with a vLLM that holds requests"
    )
    return parser.parse_args(arguments)


def run(arguments: Sequence[str] = ()) -> BenchResult:
    chosen = options(arguments)
    if chosen.engine == "vllm":
        return run_vllm_overlap(chosen)
    findings = []
    model_dir = served_model(is_real=chosen.real)
    hidden_size = REGISTRY.load_family(model_dir).shape.hidden_size
    for case in CASES:
        finding = OverlapFinding(case, PICTURE_SIDE_REAL if chosen.real else PICTURE_SIDE)
        for number in range(chosen.rounds):
            for is_on in (True, False):
                config = cluster_config(model_dir, None if chosen.real else case.stages, workers={"overlap": is_on})
                maker = ChatMaker(config.model.name or model_dir.name, model_dir, seed=2 * number + is_on + 1)
                num_loaded = chosen.loaded if is_on and number == 0 else 0
                measure = partial(finding.measure, maker, hidden_size, chosen.runs, num_loaded, is_on)
                on_ray(config, measure)
        findings.append(finding)
    return overlap_result(findings, is_real=chosen.real)


PICTURE_SIDE, PICTURE_SIDE_REAL = 224, 448
"""These are the sides of a picture of 256 patches, and of one of 1,024 for the model that computes for real."""


@dataclass
class OverlapFinding:
    """Collects what the clusters of one case have shown."""

    case: OverlapCase
    picture_side: int = PICTURE_SIDE
    costs: AloneCosts | None = None
    num_words: int = 0
    """Counts the words of a text that takes as long to prefill as the first pattern's media take to encode."""
    with_overlap: list[TimedChat] = field(default_factory=list)
    without_overlap: list[TimedChat] = field(default_factory=list)
    loaded: list[TimedChat] = field(default_factory=list)
    load: float = 0.0
    """Holds the share of the time in which the busier of encoder and worker had work, by the frozen costs."""

    async def measure(
        self, maker: ChatMaker, hidden_size: int, num_runs: int, num_loaded: int, is_on: bool, target: ChatTarget
    ) -> None:
        """Sends the requests to a cluster; the first cluster's costs count for all. `is_on` says whether its worker
        overlaps."""
        patterns = self.patterns()
        if self.costs is None:
            self.costs = await measure_alone(target, maker, patterns, hidden_size)
            media = self.costs.media[patterns[0].name]
            self.num_words = max(1, self.costs.num_tokens_of(media.unit_s * media.num_units) - NUM_HEAD_TOKENS)
        else:
            await send_each(target, maker, [ChatKind("warm-up", num_words=16), *patterns])
        chats = await send_each(target, maker, self.kinds() * num_runs)
        (self.with_overlap if is_on else self.without_overlap).extend(chats)
        if num_loaded and self.case.has_front:
            await self._load(target, maker, num_loaded)

    def patterns(self) -> list[ChatKind]:
        return [each._replace(picture_side=self.picture_side) for each in self.case.patterns]

    def kinds(self) -> list[ChatKind]:
        """Returns the kinds of request that are compared."""
        front = [self._front(self.num_words)] if self.case.has_front else []
        return front or self.patterns()

    def _front(self, num_words: int) -> ChatKind:
        return self.patterns()[0]._replace(name=FRONT, num_words=num_words)

    async def _load(self, target: ChatTarget, maker: ChatMaker, num: int) -> None:
        """Sends texts of several lengths in front of pictures, so often that the busier stage has work for 70 % of the
        time."""
        assert self.costs is not None
        rng = np.random.default_rng(0)
        kinds = [self._front(int(words)) for words in rng.integers(self.num_words // 4, self.num_words + 1, num)]
        sample = [self.ideal(chat) for chat in await send_each(target, maker, kinds[:2])]
        scale = statistics.mean(kind.num_words for kind in kinds) / statistics.mean(k.num_words for k in kinds[:2])
        work_s = max(sample[0].encode_s, scale * statistics.mean(one.prefill_s for one in sample))
        moments_s = poisson_moments_s(num, LOAD / work_s, seed=1)
        self.loaded = await send_at(target, maker, kinds, moments_s)
        ideals = [self.ideal(chat) for chat in self.loaded]
        span_s = max(chat.sent_s for chat in self.loaded) - min(chat.sent_s for chat in self.loaded)
        self.load = max(sum(one.encode_s for one in ideals), sum(one.prefill_s for one in ideals)) / max(span_s, 1e-9)

    # ------------------------------------------------------------ what it means

    def ideal(self, chat: TimedChat) -> IdealRequest:
        assert self.costs is not None
        pattern = self.case.patterns[0].name if chat.kind.name == FRONT else chat.kind.name
        return self.costs.ideal(chat, pattern, chat.sent_s)

    def saved(self, name: str) -> float:
        """Returns which part of the time to first token the overlap has saved."""
        on, off = (_median_s(chats, name) for chats in (self.with_overlap, self.without_overlap))
        return 1.0 - on / off

    def bound_s(self, name: str) -> float:
        """Returns the lower bound of the time to first token of these requests, which are alike."""
        return statistics.median(self.ideal(chat).bound_s() for chat in self.with_overlap if chat.kind.name == name)

    def possible(self, name: str) -> float:
        """Returns which part it could have saved: all that the time without overlap is longer than the bound. So no
        request can save more, whatever the time without overlap contains besides encoding and prefill."""
        return 1.0 - self.bound_s(name) / _median_s(self.without_overlap, name)

    def possible_by_formula(self, name: str) -> float:
        """Returns which part overlap saves of encoding and prefill alone, if all units are equal."""
        one = self.ideal(next(each for each in self.with_overlap if each.kind.name == name))
        return possible_saving(len(one.units), one.encode_s, one.prefill_s, one.spans[0].prefill_s)

    def efficiencies(self) -> list[float]:
        """Returns lower bound / actual for each request that met no other one. A value above 1 shows that the bound is
        none."""
        return [self.ideal(chat).bound_s() / chat.ttft_s for chat in self.with_overlap]

    def loaded_efficiencies(self) -> list[float]:
        """Returns the same for the requests under load; the bound is that of a cluster that loses no time and serves in
        order of arrival, so a request that is served out of that order may beat it."""
        ideals_s = ideal_ttfts_s([self.ideal(chat) for chat in self.loaded])
        return [min(1.0, ideal_s / chat.ttft_s) for ideal_s, chat in zip(ideals_s, self.loaded, strict=True)]


NUM_HEAD_TOKENS = 12
"""This is about the number of the template's tokens before and after a text."""


def _median_s(chats: Sequence[TimedChat], name: str) -> float:
    return statistics.median(chat.ttft_s for chat in chats if chat.kind.name == name)


def overlap_result(findings: Sequence[OverlapFinding], *, is_real: bool) -> BenchResult:
    """Makes the table, and the bars unless the cluster has computed for real."""
    rows = [
        [
            "request",
            "alone: encode ms",
            "prefill ms",
            "TTFT off ms",
            "on ms",
            "bound ms",
            "saved",
            "possible",
            "part of it",
            "formula",
        ]
    ]
    bars: list[Bar] = []
    for finding in findings:
        for kind in finding.kinds():
            name = kind.name
            one = finding.ideal(next(each for each in finding.with_overlap if each.kind.name == name))
            saved, possible = finding.saved(name), finding.possible(name)
            rows.append(
                [
                    name,
                    f"{1000 * one.encode_s:.0f}",
                    f"{1000 * one.prefill_s:.0f}",
                    f"{1000 * _median_s(finding.without_overlap, name):.0f}",
                    f"{1000 * _median_s(finding.with_overlap, name):.0f}",
                    f"{1000 * finding.bound_s(name):.0f}",
                    f"{saved:.1%}",
                    f"{possible:.1%}",
                    f"{saved / possible:.2f}",
                    f"{finding.possible_by_formula(name):.1%}",
                ]
            )
            if name == FRONT:
                bars.append(Bar(f"{name}: time to first token saved", saved, LEAST_SAVED, "share"))
            if name == PICTURES:
                possible = max(possible, 0.4375)
            bars.append(Bar(f"{name}: saved / possible", saved / possible, LEAST_PART, "share"))
    idle = [value for finding in findings for value in finding.efficiencies()]
    bars.append(Bar("lower bound / actual, idle, median", statistics.median(idle), LEAST_IDLE, "share"))
    notes = [_notes(finding) for finding in findings]
    notes.append(f"The largest lower bound / actual of a request that met no other one is {max(idle):.3f}.")
    for finding in findings:
        if finding.loaded:
            values = finding.loaded_efficiencies()
            bars.append(
                Bar(f"lower bound / actual, {LOAD:.0%} load, median", statistics.median(values), LEAST_LOADED, "share")
            )
            empty = statistics.median(finding.ideal(chat).bound_s() / chat.ttft_s for chat in finding.loaded)
            notes.append(
                f"Under load, {len(finding.loaded)} requests kept the busier stage at {finding.load:.0%}; their bound "
                f"contains the work ahead of them. Against empty queues the median is {empty:.2f}."
            )
    if is_real:
        notes += [f"{bar.name}: {bar.value:.3f} (real compute has no bar)" for bar in bars]
        return BenchResult(rows, [], notes, "real")
    return BenchResult(rows, bars, notes)


def _notes(finding: OverlapFinding) -> str:
    assert finding.costs is not None
    costs = finding.costs
    media = "; ".join(
        f"{name}: ready after {1000 * each.ready_s:.0f} ms, {each.num_units} units of {1000 * each.unit_s:.0f} ms, "
        f"landed {1000 * each.transfer_s:.1f} ms later"
        for name, each in costs.media.items()
    )
    return (
        f"Alone and frozen: {1000 * costs.base_s:.0f} ms and {1e6 * costs.s_per_token:.0f} us per weighted token for a "
        f"text; {media}. {len(finding.with_overlap)} requests with overlap, {len(finding.without_overlap)} without."
    )
