"""Runs `weft bench isolation`: by how much requests with media delay requests of text alone.

The same texts arrive at random, first alone and then with a fifth as many requests with a picture or a video on top, in
turn, for several rounds on one cluster. The encoder and the worker have a core each and are at most half loaded. The
bars are the P99 of the texts' time to first token, and the mean time of their further tokens, each beside media over
alone. Rows without a bar show how long a token of a request with media takes, and what each process takes of a
processor, which says where time goes if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from loadtest.bench_result import Bar, BenchResult
from loadtest.benches.served.timed_chats import (
    ChatKind,
    ChatMaker,
    ChatTarget,
    TimedChat,
    oversleeping,
    poisson_moments_s,
    send_at,
    send_each,
)
from loadtest.benches.served.timed_cluster import SETTLE_S, TimedStages, cluster_config, on_ray, served_model

MOST_TTFT, MOST_TPOT = 1.2, 1.1
MEDIA_SHARE = 0.2
"""This is the number of requests with media that come on top of each text."""
STAGES = TimedStages(pass_s=0.02, s_per_patch=0.0001, step_s=0.02, s_per_token=0.0001, s_per_decode=0.0005)
"""A picture takes 46 ms to encode and a video of 32 frames half a second; a step of decodes takes 20 ms."""
OUTPUT_TOKENS = 16
REAL_SLOWER = 4.0
"""Real compute on a core is slower than the waits by about this factor, so requests come less often."""


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="weft bench isolation")
    parser.add_argument("--real", action="store_true", help="computes for real, without waits and without bars")
    parser.add_argument("--rounds", type=int, default=6, help="alternates this many times")
    parser.add_argument("--texts", type=int, default=60, help="is the number of texts in each half of a round")
    parser.add_argument("--per-second", type=float, default=1.7, help="is the number of texts that come per second")
    parser.add_argument(
        "--media-chunk",
        type=int,
        help="sets workers.media_chunk_tokens; 0 sets no limit, and by default texts set it",
    )
    return parser.parse_args(arguments)


def run(arguments: Sequence[str] = ()) -> BenchResult:
    chosen = options(arguments)
    rate = chosen.per_second / (REAL_SLOWER if chosen.real else 1.0)
    model_dir = served_model(is_real=chosen.real)
    stages = None if chosen.real else STAGES
    workers = {} if chosen.media_chunk is None else {"media_chunk_tokens": chosen.media_chunk}
    config = cluster_config(model_dir, stages, workers=workers)
    maker = ChatMaker(config.model.name or model_dir.name, model_dir)
    load = TextLoad(chosen.texts, rate, chosen.rounds, chosen.real)
    halves = on_ray(config, partial(measure_isolation, maker, load, is_pinned=True))
    result = isolation_result(halves, is_real=chosen.real)
    result.notes.append(
        f"Stage times: {stages or 'real'}; at most {config.workers.max_step_tokens} tokens in a step; "
        f"workers.media_chunk_tokens: {chosen.media_chunk}."
    )
    return result


# ------------------------------------------------------------ the measurement


@dataclass(frozen=True, slots=True)
class TextLoad:
    """A `TextLoad` is `num` texts in each half of a round, `per_s` of them each second in the mean."""

    num: int
    per_s: float
    num_rounds: int
    is_real: bool = False

    def kinds(self, seed: int) -> tuple[list[ChatKind], list[float]]:
        """Returns the texts and the moments when they arrive."""
        words = np.random.default_rng(seed).integers(16, 64 if self.is_real else 96, self.num)
        kinds = [ChatKind("text", int(count), max_tokens=OUTPUT_TOKENS) for count in words]
        return kinds, poisson_moments_s(self.num, self.per_s, seed)

    def media(self, seed: int) -> tuple[list[ChatKind], list[float]]:
        """Returns the requests with media that come on top."""
        num = round(MEDIA_SHARE * self.num)
        picture = ChatKind("picture", 16, 1, 448 if self.is_real else 224, max_tokens=OUTPUT_TOKENS)
        video = ChatKind("video", 16, num_frames=32, max_tokens=OUTPUT_TOKENS)
        kinds = [picture if self.is_real or at % 2 else video for at in range(num)]
        return kinds, poisson_moments_s(num, MEDIA_SHARE * self.per_s, seed + 1000)


@dataclass
class LoadHalf:
    """Collects what one kind of half has shown over the rounds: texts alone, or texts beside media."""

    has_media: bool
    chats: list[TimedChat] = field(default_factory=list)
    seconds: float = 0.0
    forward_s: float = 0.0
    oversleeps_s: list[float] = field(default_factory=list)
    """Holds by how much sleeps of this process ended too late, which shows how busy the machine was with other work."""
    member_to_cpu_s: dict[str, float] = field(default_factory=dict)

    def texts(self) -> list[TimedChat]:
        return [chat for chat in self.chats if not chat.kind.has_media]

    def media(self) -> list[TimedChat]:
        return [chat for chat in self.chats if chat.kind.has_media]


async def measure_isolation(
    maker: ChatMaker, load: TextLoad, target: ChatTarget, *, is_pinned: bool
) -> tuple[LoadHalf, LoadHalf]:
    """Returns both halves. With `is_pinned`, the encoder and the worker get a core each, if there are two."""
    member_to_pid = await _members(target) if is_pinned else {}
    if (os.cpu_count() or 1) > 1:
        for name, pid in member_to_pid.items():
            _pin(pid, {"encoder": 0, "worker": 1}.get(name))
    await send_each(target, maker, [*load.kinds(0)[0][:3], *load.media(0)[0][:2]])
    alone, beside = LoadHalf(False), LoadHalf(True)
    for number in range(load.num_rounds):
        for half in (alone, beside):
            kinds, moments_s = load.kinds(number)
            if half.has_media:
                more, more_s = load.media(number)
                kinds, moments_s = kinds + more, moments_s + more_s
            await asyncio.sleep(SETTLE_S)
            before, cpu_before, begun_s = await target.metrics(), _cpu_s(member_to_pid), time.monotonic()
            async with oversleeping(half.oversleeps_s):
                half.chats += await send_at(target, maker, kinds, moments_s)
            half.seconds += time.monotonic() - begun_s
            for name, cpu_s in _cpu_s(member_to_pid).items():
                half.member_to_cpu_s[name] = half.member_to_cpu_s.get(name, 0.0) + cpu_s - cpu_before[name]
            await asyncio.sleep(SETTLE_S)
            name = "weft_encoder_forward_seconds_total"
            half.forward_s += (await target.metrics()).get(name, 0.0) - before.get(name, 0.0)
    return alone, beside


async def _members(target: ChatTarget) -> dict[str, int]:
    """Returns the process of the worker and that of the encoder."""
    members = (await target.client.get("/weft/members")).json()["members"]
    return {str(each["kind"]): int(each["pid"]) for each in members}


def _pin(pid: int, core: int | None) -> None:
    """Lets all threads of a process run on this core alone."""
    if core is None or not hasattr(os, "sched_setaffinity"):
        return
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {core})


def _cpu_s(member_to_pid: Mapping[str, int]) -> dict[str, float]:
    """Returns the processor time that each member's process has taken."""
    found = {}
    for name, pid in member_to_pid.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


# ------------------------------------------------------------ what it means


def isolation_result(halves: tuple[LoadHalf, LoadHalf], *, is_real: bool) -> BenchResult:
    """Makes the table, and the bars unless the cluster has computed for real."""
    alone, beside = halves
    rows = [["what", "texts alone", "beside media", "ratio"]]
    ratios = {}
    for name, share in (("P50", 50.0), ("P90", 90.0), ("P99", 99.0)):
        values = [percentile_ms([chat.ttft_s for chat in half.texts()], share) for half in halves]
        ratios[name] = values[1] / values[0]
        rows.append(_row(f"texts: {name} time to first token, ms", values))
    tpots = [1000 * statistics.mean(chat.tpot_s for chat in half.texts()) for half in halves]
    rows.append(_row("texts: mean time of a further token, ms", tpots))
    p99s = [percentile_ms([chat.tpot_s for chat in half.texts()], 99.0) for half in halves]
    rows.append(_row("texts: P99 of a request's time per further token, ms", p99s))
    own_ms = 1000 * statistics.mean(chat.tpot_s for chat in beside.media())
    rows.append(
        ["media: mean time of a further token, ms", "", f"{own_ms:.1f}", f"{own_ms / tpots[1]:.2f} of a text's"]
    )
    for name in beside.member_to_cpu_s:
        shares = [half.member_to_cpu_s[name] / half.seconds for half in halves]
        rows.append([f"{name}: share of a processor", *(f"{share:.0%}" for share in shares), ""])
    busy = [half.forward_s / half.seconds for half in halves]
    rows.append(["encoder: share of time in forward passes", *(f"{share:.0%}" for share in busy), ""])
    late = [percentile_ms(half.oversleeps_s, 99.0) for half in halves]
    rows.append(["machine: P99 by which a sleep ends too late, ms", *(f"{value:.1f}" for value in late), ""])
    bars = [
        Bar("texts: P99 time to first token, beside media over alone", ratios["P99"], MOST_TTFT, "x", is_max=True),
        Bar(
            "texts: time of a further token, beside media over alone", tpots[1] / tpots[0], MOST_TPOT, "x", is_max=True
        ),
    ]
    notes = [
        f"{len(alone.texts())} texts alone in {alone.seconds:.0f} s; {len(beside.texts())} texts beside "
        f"{len(beside.media())} requests with media in {beside.seconds:.0f} s; {OUTPUT_TOKENS} tokens out.",
    ]
    if is_real:
        notes += [f"{bar.name}: {bar.value:.3f} (real compute has no bar)" for bar in bars]
        return BenchResult(rows, [], notes, "real")
    return BenchResult(rows, bars, notes)


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    return 1000 * float(np.percentile(seconds, share))


def _row(name: str, values: Sequence[float]) -> list[str]:
    return [name, *(f"{value:.1f}" for value in values), f"{values[1] / values[0]:.2f}"]
