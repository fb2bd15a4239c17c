"""Runs `weft bench prediction`: how well the router predicts the time to first token.

Texts, pictures and videos, mixed, keep 1, 2, 4 and 8 requests open on a cluster whose stages take 100 ms and more. Each
request's prediction, which its plan contains, is compared with the time from its dispatch to its first token. A second
table says which stage is predicted wrongly by how much: from the router's own sums over the run
(`weft_planner_predicted_total` and its companions), and from the traces what no stage predicts, which is the way to the
worker (`dispatch`) and back (`return`).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from loadtest.bench_result import Bar, BenchResult
from loadtest.benches.served.timed_chats import ChatKind, ChatMaker, ChatTarget, TimedChat, oversleeping, send_from
from loadtest.benches.served.timed_cluster import SETTLE_S, TimedStages, cluster_config, on_ray, served_model

CONCURRENCIES = (1, 2, 4, 8)
MOST_MEDIAN, MOST_P90 = 0.15, 0.40
"""Limits the absolute error of a prediction, as a share of the actual time."""
STAGES = TimedStages(pass_s=0.03, s_per_patch=0.0005, step_s=0.03, s_per_token=0.0008, s_per_decode=0.002)
"""A picture of 256 patches takes 158 ms to encode, and 128 tokens of text take 140 ms to prefill."""
NUM_WARM_UP = 8
OUTPUT_TOKENS = 8
NOT_TIMES = {"prefix_tokens", "cached_items", "lower_bound"}
"""Lists what the router compares and what is not the time of a stage."""


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="weft bench prediction")
    parser.add_argument("--real", action="store_true", help="computes for real, without waits and without bars")
    parser.add_argument("--requests", type=int, default=32, help="is the number of requests at each concurrency")
    return parser.parse_args(arguments)


def run(arguments: Sequence[str] = ()) -> BenchResult:
    chosen = options(arguments)
    model_dir = served_model(is_real=chosen.real)
    config = cluster_config(model_dir, None if chosen.real else STAGES)
    maker = ChatMaker(config.model.name or model_dir.name, model_dir)
    rounds = on_ray(config, partial(measure_predictions, maker, chosen.requests, is_real=chosen.real))
    return prediction_result(rounds, is_real=chosen.real)


# ------------------------------------------------------------ the measurement


class StageSums(NamedTuple):
    """Holds sums over the comparisons of one stage, in seconds."""

    num: float = 0.0
    predicted_s: float = 0.0
    actual_s: float = 0.0
    abs_error_s: float = 0.0

    def minus(self, earlier: StageSums) -> StageSums:
        return StageSums(*(now - before for now, before in zip(self, earlier, strict=True)))

    def plus(self, other: StageSums) -> StageSums:
        return StageSums(*(one + more for one, more in zip(self, other, strict=True)))


class PredictionRound(NamedTuple):
    """Holds what was measured at one concurrency."""

    concurrency: int
    chats: list[TimedChat]
    stages: Mapping[str, StageSums]
    oversleeps_s: Sequence[float] = ()
    """Holds by how much sleeps of the bench ended too late, which shows how busy the machine was with other work."""


async def measure_predictions(
    maker: ChatMaker,
    num_requests: int,
    target: ChatTarget,
    *,
    concurrencies: Sequence[int] = CONCURRENCIES,
    is_real: bool = False,
) -> list[PredictionRound]:
    """Sends the mixed requests at each concurrency, after some that only warm up."""
    await send_from(target, maker, mixed_kinds(NUM_WARM_UP, seed=0, is_real=is_real), 2)
    rounds = []
    for concurrency in concurrencies:
        kinds = mixed_kinds(num_requests, seed=concurrency, is_real=is_real)
        await asyncio.sleep(SETTLE_S)
        before = stage_sums(await target.metrics())
        oversleeps_s: list[float] = []
        async with oversleeping(oversleeps_s):
            chats = await send_from(target, maker, kinds, concurrency)
        await asyncio.sleep(SETTLE_S)
        after = stage_sums(await target.metrics())
        stages = {name: sums.minus(before.get(name, StageSums())) for name, sums in after.items()}
        rounds.append(PredictionRound(concurrency, chats, {**_unpredicted(chats), **stages}, oversleeps_s))
    return rounds


def mixed_kinds(num: int, seed: int, *, is_real: bool = False) -> list[ChatKind]:
    """Returns requests of which two in five are texts, two have one picture or two, and one has a video of 16
    frames."""
    rng = np.random.default_rng(seed)
    side, words = (448, 32) if is_real else (224, 128)
    kinds = []
    for at in range(num):
        num_words = int(rng.integers(words, 3 * words))
        if at % 5 in (0, 2):
            kinds.append(ChatKind("text", num_words, max_tokens=OUTPUT_TOKENS))
        elif at % 5 == 4 and not is_real:
            kinds.append(ChatKind("video", num_words // 4, num_frames=16, max_tokens=OUTPUT_TOKENS))
        else:
            num_pictures = int(rng.integers(1, 3))
            kinds.append(ChatKind("picture", num_words // 2, num_pictures, side, max_tokens=OUTPUT_TOKENS))
    return [kinds[index] for index in rng.permutation(num)]


def stage_sums(metrics: Mapping[str, float]) -> dict[str, StageSums]:
    """Reads the router's sums of predicted and actual stage times."""

    def value(name: str, stage: str) -> float:
        return metrics.get(f"weft_planner_{name}_total {stage}", 0.0)

    first = "weft_planner_observations_total "
    stages = [name.removeprefix(first) for name in metrics if name.startswith(first)]
    names = ("observations", "predicted", "actual", "abs_error")
    return {stage: StageSums(*(value(name, stage) for name in names)) for stage in stages if stage not in NOT_TIMES}


def _unpredicted(chats: Sequence[TimedChat]) -> dict[str, StageSums]:
    """Returns the sums of the times that are part of a request's way to its first token and that no stage contains."""
    dispatches, returns = [], []
    for chat in chats:
        worker_id, router_id = str(chat.plan["worker_id"]), str(chat.trace["events"][0]["member_id"])
        dispatches.append(chat.first_s("received", worker_id) - chat.first_s("dispatched"))
        returns.append(chat.first_s("first_token", router_id) - chat.first_s("first_token", worker_id))
    return {
        name: StageSums(len(taken), 0.0, sum(taken), sum(taken))
        for name, taken in (("dispatch", dispatches), ("return", returns))
    }


# ------------------------------------------------------------ what it means


class PredictionErrors(NamedTuple):
    """Holds the errors of some predictions, as shares of the actual times."""

    num: int
    actual_s: float
    """Holds the median of the actual times."""
    bias: float
    """Holds the median of (predicted - actual) / actual."""
    median: float
    p90: float

    @classmethod
    def of(cls, chats: Sequence[TimedChat]) -> PredictionErrors:
        pairs = [(float(chat.plan["predicted_ttft_s"]), chat.dispatched_ttft_s) for chat in chats]
        return cls.of_pairs(pairs)

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[float, float]]) -> PredictionErrors:
        """Takes pairs of a predicted and an actual time."""
        errors = [(predicted_s - actual_s) / actual_s for predicted_s, actual_s in pairs]
        sizes = np.abs(errors)
        return cls(
            len(pairs),
            statistics.median(actual_s for _, actual_s in pairs),
            statistics.median(errors),
            float(np.median(sizes)),
            float(np.percentile(sizes, 90)),
        )

    def row(self, name: str) -> list[str]:
        return [
            name,
            str(self.num),
            f"{1000 * self.actual_s:.0f}",
            f"{self.bias:+.1%}",
            f"{self.median:.1%}",
            f"{self.p90:.1%}",
        ]


def prediction_result(rounds: Sequence[PredictionRound], *, is_real: bool) -> BenchResult:
    """Makes the table, and the bars unless the cluster has computed for real."""
    rows = [["requests or stage", "number", "actual ms", "bias", "median error", "P90 error"]]
    chats = [chat for one in rounds for chat in one.chats]
    rows += [PredictionErrors.of(one.chats).row(f"{one.concurrency} open at once") for one in rounds]
    for name in ("text", "picture", "video"):
        if same := [chat for chat in chats if chat.kind.name == name]:
            rows.append(PredictionErrors.of(same).row(f"all with {name}"))
    errors = PredictionErrors.of(chats)
    rows.append(errors.row("all"))
    for one in rounds:
        rows += _stage_rows(f"{one.concurrency}: ", one.stages)
    bars = [
        Bar("time to first token: median error", errors.median, MOST_MEDIAN, "share", is_max=True),
        Bar("time to first token: P90 error", errors.p90, MOST_P90, "share", is_max=True),
    ]
    late_ms = 1000 * float(np.percentile([late_s for one in rounds for late_s in one.oversleeps_s] or [0.0], 99))
    notes = [
        f"{len(chats)} requests: two fifths text, two fifths with pictures, the rest with a video; {OUTPUT_TOKENS} "
        "tokens out. The actual time begins at the dispatch.",
        "A row of a stage gives means per comparison: the actual time, (predicted - actual) / actual, and the mean "
        "absolute error as a share of the actual time; it has no P90.",
        f"By far most wrong: {worst_stages(rounds)}.",
        f"Sleeps of the bench ended {late_ms:.1f} ms too late in the 99th percentile. Above some 10 ms, the machine "
        "was too busy with other work for these numbers.",
    ]
    profile = {
        f"{one.concurrency} open at once": {name: sums._asdict() for name, sums in one.stages.items()} for one in rounds
    }
    if is_real:
        notes += [f"{bar.name}: {bar.value:.3f} (real compute has no bar)" for bar in bars]
        return BenchResult(rows, [], notes, "real", profile)
    return BenchResult(rows, bars, notes, profile=profile)


def _stage_rows(prefix: str, stages: Mapping[str, StageSums]) -> list[list[str]]:
    rows = []
    for name, sums in stages.items():
        if sums.num and name != "ttft":
            actual_s = max(sums.actual_s, 1e-9)
            bias = (sums.predicted_s - sums.actual_s) / actual_s
            mean_ms = 1000 * sums.actual_s / sums.num
            error = sums.abs_error_s / actual_s
            rows.append([prefix + name, f"{sums.num:.0f}", f"{mean_ms:.1f}", f"{bias:+.1%}", f"{error:.1%}", ""])
    return rows


def worst_stages(rounds: Sequence[PredictionRound]) -> str:
    """Names the three stages with the most seconds of error per request, over all rounds."""
    totals: dict[str, StageSums] = {}
    for one in rounds:
        for name, sums in one.stages.items():
            totals[name] = totals.get(name, StageSums()).plus(sums)
    num = sum(len(one.chats) for one in rounds)
    ranked = sorted((sums.abs_error_s / num, name) for name, sums in totals.items() if name != "ttft")
    return ", ".join(f"{name} ({1000 * error_s:.0f} ms per request)" for error_s, name in ranked[:-4:-1])
