"""Measures what one plan costs the router: `weft bench router`.

A cluster of fake members lives in one `ClusterState`, as their reports describe it. Each case plans requests in a hot
loop and takes the processor time of each plan: idle and loaded, with the encoders on hosts of their own and beside the
workers. A plan contains the look-up in the index and the whole explanation; the hashing of the prompt is measured
apart. A second column has the same plans after the processor's caches were overwritten, without a bar. The assignment
of items to encoders is compared with brute force. Beside the plans stands what it costs a router to tell another one of
a request from its dispatch to its end, and what it costs that one to hear it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fabric.contracts import (
    EMPTY_PROFILE,
    WEFT_KV,
    ArenaStats,
    AttemptId,
    BlocksStored,
    DeviceStats,
    EncodeCost,
    EncoderReport,
    EngineStats,
    FeatureEvents,
    FeatureStats,
    ItemStats,
    KvScheme,
    KvSnapshot,
    MediaItem,
    Member,
    MemberId,
    MmHash,
    PlaceholderRange,
    RequestId,
    RouterNews,
    WorkerReport,
    add_work,
    decode_message,
    encode_message,
    key_of,
)
from kv_index import prompt_block_hashes
from loadtest.bench_result import Bar, BenchResult
from modalities.family import ModelShape
from router.planning import ClusterState, LandingGoal, LandingProblem, PlannerSettings, RouteQuery, improve, land_rows

BLOCK_SIZE = 16
SCHEME = KvScheme(WEFT_KV, BLOCK_SIZE)
SHAPE = ModelShape(
    hidden_size=4096, num_levels=1, num_layers=32, num_kv_heads=8, head_dim=128, vocab_size=32_000, max_model_len=32_768
)
IMAGE_TOKENS, IMAGE_COST = 256, 1024
ROW_BYTES = 8192
NUM_PLANS = 2000
FLUSH_BYTES = 64 * 2**20


class PlanCase(NamedTuple):
    """A `PlanCase` is a cluster and a request, with the targets of one plan in microseconds."""

    num_workers: int
    num_encoders: int
    num_pictures: int
    p50_us: float
    p99_us: float

    @property
    def name(self) -> str:
        media = f", {self.num_pictures} picture{'s' * (self.num_pictures > 1)}" if self.num_pictures else ", text"
        return f"{self.num_workers} x {self.num_encoders}{media}"


CASES = (
    PlanCase(16, 0, 0, 80, 160),
    PlanCase(16, 16, 1, 150, 300),
    PlanCase(64, 64, 1, 250, 500),
    PlanCase(64, 64, 8, 500, 1000),
    PlanCase(1000, 200, 8, 2000, 4000),
)


def run(options: Sequence[str] = ()) -> BenchResult:
    """Measures all cases."""
    parser = argparse.ArgumentParser(prog="weft bench router", allow_abbrev=False)
    parser.add_argument("--plans", type=int, default=NUM_PLANS, help="times this many plans of each case")
    num_plans = parser.parse_args(options).plans
    rows = [["case", "encoders", "load", "p50 us", "p99 us", "flushed p50", "flushed p99"]]
    bars: list[Bar] = []
    for case in CASES:
        worst = (0.0, 0.0)
        for is_beside, is_loaded in itertools.product((False, True) if case.num_encoders else (False,), (False, True)):
            p50, p99, flushed = _plan_times(case, is_beside, is_loaded, num_plans)
            worst = max(worst[0], p50), max(worst[1], p99)
            place = "beside the workers" if is_beside else "own hosts" if case.num_encoders else "none"
            load = "loaded" if is_loaded else "idle"
            cold = [f"{each:.0f}" for each in flushed]
            rows.append([case.name, place, load, f"{p50:.0f}", f"{p99:.0f}", *cold])
        bars.append(Bar(f"plan {case.name}, p50", worst[0], case.p50_us, "us", is_max=True))
        bars.append(Bar(f"plan {case.name}, p99", worst[1], case.p99_us, "us", is_max=True))
    rows.append(["hash 1,024 tokens", "", "", f"{_hash_us():.0f}", "", "", ""])
    for num_pictures in (0, 1, 8):
        told_us, heard_us = _news_us(num_pictures)
        what = f"{num_pictures} pictures" if num_pictures != 1 else "one picture"
        rows.append([f"news of a request, {what}", "", "", f"{told_us:.0f} told", f"{heard_us:.0f} heard", "", ""])
    share, greedy, worst_ratio = assignment_quality(1000)
    rows.append(["assignment within 2 %", "", "", f"{100 * share:.1f} %", f"worst {worst_ratio:.3f}", "", ""])
    bars.append(Bar("assignments within 2 % of brute force", 100 * share, 100.0, "%"))
    notes = [
        "Times are processor time of the thread. A bar takes the worst of its cluster's cases.",
        f"The greedy choice alone is within 2 % of brute force in {100 * greedy:.1f} % of the cases.",
    ]
    return BenchResult(rows, bars, notes)


# ------------------------------------------------------------ plans


def cluster_of(num_workers: int, num_encoders: int, *, is_beside: bool, is_loaded: bool, now: float) -> ClusterState:
    """Returns a cluster with reports as of `now`. Eight workers share a host; encoders have hosts of their own, eight
    on each, or stand on the workers' hosts."""
    rng = random.Random(7)
    state = ClusterState(SHAPE, BLOCK_SIZE, random.Random(1), PlannerSettings(max_index_blocks=1 << 20))
    workers = [
        Member(MemberId(f"w{number}"), "worker", f"tcp://w{number}", f"host-{number // 8}", 1, kv_scheme=SCHEME)
        for number in range(num_workers)
    ]
    hosts = [f"host-{number % max(num_workers // 8, 1)}" if is_beside else f"e-{number // 8}" for number in range(200)]
    encoders = [
        Member(MemberId(f"e{number}"), "encoder", f"tcp://e{number}", hosts[number], 1, ("image",))
        for number in range(num_encoders)
    ]
    state.update_members([*workers, *encoders])
    for member in workers:
        state.apply(_worker_report(member.member_id, rng, is_loaded), now)
    for member in encoders:
        state.apply(_encoder_report(member.member_id, rng, is_loaded), now)
        state.apply(FeatureEvents(member.member_id, 1, 0, (), is_snapshot=True), now)
    return state


def _worker_report(worker_id: MemberId, rng: random.Random, is_loaded: bool) -> WorkerReport:
    engine = EngineStats(kv_blocks_total=100_000)
    if is_loaded:
        engine.num_running, engine.num_decoding = rng.randint(10, 60), rng.randint(5, 50)
        engine.queued_tokens = rng.randint(0, 8000)
        engine.queued_weighted_tokens = 1.1 * engine.queued_tokens
        engine.kv_blocks_used = rng.randint(1000, 90_000)
    slow = rng.uniform(0.9, 1.1)
    return WorkerReport(
        worker_id,
        1,
        1,
        (),
        engine,
        FeatureStats(inbox_bytes_total=2**30),
        prefill_s_per_token=2e-5 * slow,
        step_overhead_s=8e-3 * slow,
        decode_s_per_sequence=5e-5 * slow,
        residence_s=5.0,
        max_step_tokens=8192,
        max_sequences=256,
    )


def _encoder_report(encoder_id: MemberId, rng: random.Random, is_loaded: bool) -> EncoderReport:
    profile, decode_s = list(EMPTY_PROFILE), 0.0
    if is_loaded:
        for _ in range(rng.randint(0, 12)):
            seconds = rng.choice([0.005, 0.02, 0.2])
            add_work(profile, seconds, key_of(seconds, 4.0))
            decode_s += 0.01
    slow = rng.uniform(0.9, 1.1)
    return EncoderReport(
        encoder_id,
        1,
        1,
        (),
        ItemStats(),
        DeviceStats(),
        ArenaStats(),
        costs=(EncodeCost("image", 4e-6 * slow, 1e-3 * slow, 2e-6, 1e-3),),
        queue_profile=tuple(profile),
        num_decode_processes=4,
        decode_queue_s=decode_s,
        decode_short_s=decode_s,
    )


def query_of(num_tokens: int, num_pictures: int, number: int) -> RouteQuery:
    """Returns a request of that many tokens of text with pictures in it; each `number` has pictures of its own."""
    media, runs, at, text = [], [], 0, num_tokens // (num_pictures + 1)
    for index in range(num_pictures):
        at += text
        mm_hash = MmHash(f"{number:024x}{index:08x}")
        part = f"messages.0.content.{index}"
        media.append(MediaItem(index, "image", mm_hash, (1, 32, 32), (IMAGE_TOKENS,), IMAGE_COST, part))
        runs.append(PlaceholderRange(at, IMAGE_TOKENS, index, 0, 0))
        at += IMAGE_TOKENS
    total = at + text
    hashes = np.random.default_rng(number).bytes(16 * (total // BLOCK_SIZE))
    return RouteQuery(
        AttemptId(RequestId(f"r{number}"), 0), total, {SCHEME: hashes}, tuple(media), tuple(runs), ROW_BYTES
    )


def _plan_times(
    case: PlanCase, is_beside: bool, is_loaded: bool, num_plans: int
) -> tuple[float, float, tuple[float, float]]:
    """Returns the median and the 99th percentile of a plan in microseconds, and both after a flush of the caches."""
    now = 100.0
    state = cluster_of(case.num_workers, case.num_encoders, is_beside=is_beside, is_loaded=is_loaded, now=now)
    queries = [query_of(1024, case.num_pictures, number) for number in range(64)]
    _warm_index(state, queries, case.num_workers, now)
    for query in queries:
        state.plan(query, now)
    seconds = []
    for number in range(num_plans):
        now += 1e-4
        query = queries[number % len(queries)]
        began_s = time.thread_time()
        state.plan(query, now)
        seconds.append(time.thread_time() - began_s)
    flushed, junk = [], np.zeros(FLUSH_BYTES, np.uint8)
    for number in range(60):
        junk += 1
        query = queries[number % len(queries)]
        began_s = time.thread_time()
        state.plan(query, now)
        flushed.append(time.thread_time() - began_s)
    return (*_percentiles_us(seconds), _percentiles_us(flushed))


def _warm_index(state: ClusterState, queries: Sequence[RouteQuery], num_workers: int, now: float) -> None:
    """Lets every worker hold parts of some prompts."""
    rng = random.Random(3)
    for number in range(num_workers):
        chains = []
        for query in rng.sample(list(queries), 8):
            hashes = query.scheme_to_hashes[SCHEME]
            chains.append(BlocksStored(None, hashes[: 16 * rng.randint(1, len(hashes) // 16)]))
        state.apply(KvSnapshot(MemberId(f"w{number}"), 1, 0, tuple(chains)), now)


def _percentiles_us(seconds: Sequence[float]) -> tuple[float, float]:
    return statistics.median(seconds) * 1e6, float(np.percentile(seconds, 99)) * 1e6


def _hash_us() -> float:
    tokens = list(range(1024))
    times = []
    for _ in range(200):
        began_s = time.thread_time()
        prompt_block_hashes(SCHEME, tokens)
        times.append(time.thread_time() - began_s)
    return statistics.median(times) * 1e6


def _news_us(num_pictures: int) -> tuple[float, float]:
    """Returns the median time, in microseconds, in which a router collects and encodes the news of a request, and that
    in which another one decodes and takes them. The news are three messages: of the dispatch, of the first token with
    the ends of the encodings, and of the end."""
    now = 100.0
    teller, hearer = (cluster_of(64, 64, is_beside=False, is_loaded=True, now=now) for _ in range(2))
    teller.news.start(lambda: None)
    told_s: list[float] = []
    heard_s: list[float] = []
    for number in range(400):
        now += 1e-3
        query = query_of(1024, num_pictures, number)
        plan = teller.plan(query, now)
        teller.note_dispatched(query, plan, now)
        encoder_ids = {each.encoder_id for each in plan.assignments}
        told = heard = 0.0
        for event in ("dispatch", "first token", "end"):
            began_s = time.thread_time()
            if event == "first token":
                for encoder_id in encoder_ids:
                    teller.note_encoding_ended(query.attempt_id, encoder_id, now)
                teller.note_first_token(query.attempt_id, now)
            elif event == "end":
                teller.note_ended(query.attempt_id, now)
            news = teller.news.take(MemberId("r0"), now)
            assert news is not None, "each of these events is news"
            wire = encode_message(news)
            told += time.thread_time() - began_s
            began_s = time.thread_time()
            message = decode_message(wire)
            assert isinstance(message, RouterNews)
            hearer.take_news(message, now)
            heard += time.thread_time() - began_s
        told_s.append(told)
        heard_s.append(heard)
    return statistics.median(told_s) * 1e6, statistics.median(heard_s) * 1e6


# ------------------------------------------------------------ assignments


def assignment_quality(num_cases: int) -> tuple[float, float, float]:
    """Returns the shares of random heterogeneous cases in which the improved and the greedy assignment end within 2 %
    of the best one, which brute force finds, and the worst ratio of an improved one."""
    rng = random.Random(5)
    num_good = num_greedy = 0
    worst = 1.0
    for _ in range(num_cases):
        problem, classes, goal = random_problem(rng)
        lacks = np.ones((1, problem.num_items), np.uint8)
        rows = land_rows(problem, classes, lacks)
        ends = [
            improve(problem, classes[0], lacks[0], np.array(each, np.int64), goal, max_trials=0).end_s
            for each in itertools.product(range(problem.num_encoders), repeat=problem.num_items)
        ]
        best_s = min(ends)
        greedy_s = improve(problem, classes[0], lacks[0], rows.encoders[0], goal, max_trials=0).end_s
        found_s = improve(problem, classes[0], lacks[0], rows.encoders[0], goal).end_s
        num_greedy += greedy_s <= 1.02 * best_s
        num_good += found_s <= 1.02 * best_s
        worst = max(worst, found_s / best_s)
    return num_good / num_cases, num_greedy / num_cases, worst


def random_problem(rng: random.Random) -> tuple[LandingProblem, np.ndarray, LandingGoal]:
    """Returns a problem of 1 to 6 items of one or two units on 2 to 4 encoders that differ up to fivefold in speed,
    with the classes of the links and a worker."""
    num_items, num_encoders, num_modalities = rng.randint(1, 6), rng.randint(2, 4), 2
    units = [rng.randint(1, 2) for _ in range(num_items)]
    rates = np.zeros((num_modalities, 6, num_encoders))
    for modality, encoder in itertools.product(range(num_modalities), range(num_encoders)):
        slow = rng.choice([1, 1, 1, 2, 4]) * rng.uniform(0.8, 1.25)
        device_s = 1e-3 * slow if modality else 0.0
        rates[modality, :, encoder] = 1e-3 * slow, 2e-6 * slow, device_s, 0.0, 2e-3 * slow, 2e-5 * slow
    waits = [[rng.choice([0.0, 0.05, 0.3]) * rng.random() for _ in range(num_encoders)] for _ in range(3)]
    shares = [(number + 1) / num for num in units for number in range(num)]
    num_units = sum(units)
    problem = LandingProblem(
        num_encoders=num_encoders,
        modality=np.array([rng.randrange(num_modalities) for _ in units], np.int64),
        cost=np.array([rng.choice([256.0, 1024.0, 4096.0]) * rng.uniform(0.5, 1.5) for _ in units]),
        first_unit=np.cumsum([0, *units]),
        unit_share=np.array(shares),
        unit_bytes=np.array([rng.uniform(1e5, 4e6) for _ in shares]),
        rates=rates,
        is_able=np.ones((num_modalities, num_encoders), np.uint8),
        decoder_free_s=np.array([rng.choice([0.0, 0.01, 0.05]) for _ in range(num_encoders)]),
        num_decoders=np.array([rng.randint(1, 4) for _ in range(num_encoders)], np.int64),
        waits_s=np.sort(waits, axis=0),
        bin_sizes_s=np.array([[0.01] * num_encoders, [0.1] * num_encoders]),
        ready_s=np.array([[rng.choice([-1.0] * 19 + [0.003]) for _ in range(num_encoders)] for _ in units]),
        alpha_s=np.array([1e-4, 1e-3]),
        s_per_byte=np.array([1e-10, 1e-9]),
        first=0,
    )
    classes = np.array([[rng.randrange(2) for _ in range(num_encoders)]], np.uint8)
    behind = np.sort([rng.uniform(0.0, 3000.0) for _ in range(num_units)])[::-1].copy()
    return problem, classes, LandingGoal(0.01, 1e-5, behind)
