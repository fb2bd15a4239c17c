"""Runs `weft bench serve`: requests per second, times to first token and use of the devices under mixed load.

Without options it measures the table of mixed workloads of the OmniConnector article on a real cluster of one worker
and two encoders, whose stages take the article's times. Two things are scaled, because two cores do the work of router,
decoders and clients. All times are `--slower` times longer, and the table shows them divided by it. Prompts and media
have a sixteenth of the article's tokens, each of which takes sixteen times as long. With `--url` it puts load on a
cluster that runs already, and prints what locust's report prints, without locust.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import httpx

from fabric.contracts import ConfigError
from loadtest.bench_result import Bar, BenchResult
from loadtest.benches.served.timed_chats import ChatTarget, words_of_one_token
from loadtest.benches.served.timed_cluster import TimedStages, cluster_config, on_ray, served_model
from loadtest.load import (
    SCENARIOS,
    ChatContent,
    LoadChat,
    LoadSample,
    SeriesWatch,
    SizedContent,
    TimedAnswer,
    content_for,
    kind_rows,
    refusal,
    scenario_requests,
    summary_json,
)
from loadtest.simulator import SimRequest, WorkloadSpec

WATCH_S = 1.0
ROW_SECONDS, URL_SECONDS = 200.0, 40.0
"""In a row of videos, each of the clients' first requests waits for those of all others, which takes some 20 s."""
NUM_CLIENTS = 26
"""The simulator reaches the article's rate for text alone with this number of clients, each of which sends one request
after the other (`loadtest/simulator/document_figures.py`)."""
FEWER_TOKENS = 16
MEAN_WORDS, MEAN_OUTPUT = 1250 / FEWER_TOKENS - 8, 20.0
"""The chat template adds about eight tokens to a text."""
PICTURE, VIDEO = "image-224", "video-30f-112p"
"""The two have 64 and 240 tokens, a sixteenth of the article's picture and video."""
STAGES = TimedStages(pass_s=0.002, s_per_patch=4e-5, step_s=0.006, s_per_token=2e-4, s_per_decode=3e-5)
"""The worker's times are those with which the simulator reproduces the table. With the encoder's, a video takes 40 ms
(the article says 48.7) and a picture 12 (4.8), because a patch costs the same in both."""


class DocumentRow(NamedTuple):
    """A `DocumentRow` is a row of the article's table: a mix, and what it measured."""

    mix: str
    kind_to_share: Mapping[str, float]
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    utilisation: float


ROWS = (
    DocumentRow("100 % text", {"text": 1.0}, 48.2, 82, 145, 0.94),
    DocumentRow("90 % text, 10 % pictures", {"text": 0.9, PICTURE: 0.1}, 45.1, 85, 162, 0.91),
    DocumentRow("80 % text, 10 % pictures, 10 % video", {"text": 0.8, PICTURE: 0.1, VIDEO: 0.1}, 38.7, 91, 245, 0.88),
    DocumentRow("50 % text, 30 % pictures, 20 % video", {"text": 0.5, PICTURE: 0.3, VIDEO: 0.2}, 24.3, 128, 387, 0.82),
    DocumentRow("100 % video", {VIDEO: 1.0}, 6.8, 195, 523, 0.96),
)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="weft bench serve")
    parser.add_argument("--seconds", type=float, help="sends requests for this long (40), or in each row (200)")
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS, help="keeps this many requests open")
    parser.add_argument("--slower", type=float, default=10.0, help="multiplies the article's times")
    parser.add_argument("--url", help="measures the cluster at this URL instead")
    parser.add_argument(
        "--scenario", choices=sorted(SCENARIOS), default="mixed", help="is sent to the cluster at --url"
    )
    parser.add_argument("--content", default="auto", help="is auto, drawn or sized, for the cluster at --url")
    chosen = parser.parse_args(arguments)
    chosen.seconds = chosen.seconds or (URL_SECONDS if chosen.url else ROW_SECONDS)
    return chosen


def run(arguments: Sequence[str] = ()) -> BenchResult:
    chosen = options(arguments)
    if chosen.url:
        return asyncio.run(_measure_running(chosen))
    stages = TimedStages(*(chosen.slower * each for each in STAGES))
    model_dir = served_model(is_real=False)
    config = cluster_config(
        model_dir,
        stages,
        encoders={"replicas": 2, "decode_processes": 1},
        workers={"max_step_tokens": 8192 // FEWER_TOKENS, "num_blocks": 12_000, "max_sequences": 256},
    )
    words = [word.strip() for word in words_of_one_token(model_dir)]
    measure = partial(_measure_table, words, chosen.seconds, chosen.clients)
    return table_result(on_ray(config, measure), chosen.slower, chosen.clients)


async def _measure_running(chosen: argparse.Namespace) -> BenchResult:
    """Measures a cluster that runs already. Raises ConfigError if it does not answer."""
    async with httpx.AsyncClient(base_url=chosen.url.rstrip("/"), timeout=600.0, limits=_NO_LIMITS) as client:
        try:
            model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        except httpx.HTTPError as error:
            raise ConfigError(f"the cluster at {chosen.url} does not answer: {error}") from error
        content = content_for(chosen.content, model)
        spec = SCENARIOS[chosen.scenario].spec(1.0)
        found = await keep_open(ChatTarget(client, model), content, spec, chosen.clients, chosen.seconds)
    busy = ", ".join(f"{name} {found.watch.mean(name):.0%}" for name in found.watch.name_to_points)
    notes = [f"{chosen.scenario}: {chosen.clients} clients for {chosen.seconds:g} s at {chosen.url}; {busy}."]
    errors = summary_json(found.samples)["errors"]
    notes += [f"{count} requests failed: {name}" for name, count in errors.items()]
    return BenchResult(kind_rows(found.samples), [], notes, variant="url")


# ------------------------------------------------------------ sending

_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)


class LoadFound(NamedTuple):
    """Holds the samples of one row, and how busy the members were."""

    samples: list[LoadSample]
    watch: SeriesWatch


async def keep_open(
    target: ChatTarget, content: ChatContent, spec: WorkloadSpec, num_clients: int, seconds: float, seed: int = 1
) -> LoadFound:
    """Has `num_clients` clients send one request after the other for so many seconds, and waits for the last answers.
    Requests that began in the first tenth of the time are no samples, because queues are shorter then."""
    requests = scenario_requests(spec, seed)
    begun_s = time.monotonic()
    watch, samples = SeriesWatch(), []
    watching = asyncio.create_task(_watch(target, watch))

    async def ask_on() -> None:
        while time.monotonic() < begun_s + seconds:
            sample = await _ask(target, content, next(requests))
            if sample.sent_s > begun_s + 0.1 * seconds:
                samples.append(sample)

    try:
        await asyncio.gather(*(ask_on() for _ in range(num_clients)))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return LoadFound(samples, watch)


async def _watch(target: ChatTarget, watch: SeriesWatch) -> None:
    while True:
        answer = await target.client.get("/metrics")
        if answer.status_code != 200:  # A cluster with keys shows its metrics to operators only.
            return
        watch.take(answer.text, time.monotonic())
        await asyncio.sleep(WATCH_S)


async def _ask(target: ChatTarget, content: ChatContent, request: SimRequest) -> LoadSample:
    chat: LoadChat = content.chat(request)
    sent_s = time.monotonic()
    stream, error = TimedAnswer(sent_s), ""
    try:
        async with target.client.stream("POST", "/v1/chat/completions", json=chat.body) as answer:
            if answer.status_code != 200:
                error = refusal(answer.status_code, await answer.aread())
            else:
                async for data in answer.aiter_raw():
                    stream.feed(data, time.monotonic())
    except httpx.HTTPError as failure:
        error = type(failure).__name__
    times = stream.end(time.monotonic())
    error = error or times.error
    if not error:
        content.answered(request, times.text)
    return LoadSample(
        kind=chat.kind,
        sent_s=sent_s,
        late_s=0.0,
        ttft_s=times.ttft_s,
        tpot_s=times.tpot_s,
        total_s=times.total_s,
        num_prompt=times.num_prompt,
        num_output=times.num_output,
        error=error,
        is_right=None if chat.right_answer is None or error else times.text.strip() == chat.right_answer,
    )


# ------------------------------------------------------------ the table


async def _measure_table(words: Sequence[str], seconds: float, num_clients: int, target: ChatTarget) -> list[LoadFound]:
    content = SizedContent(target.model, words)
    found = []
    for number, row in enumerate(ROWS):
        spec = WorkloadSpec(
            10**9, 1.0, row.kind_to_share, mean_prompt=MEAN_WORDS, prompt_spread=0.4, mean_output=MEAN_OUTPUT
        )
        found.append(await keep_open(target, content, spec, num_clients, seconds, seed=number))
    return found


def table_result(found: Sequence[LoadFound], slower: float, num_clients: int) -> BenchResult:
    """Returns the table beside the article's. The bars are the article's numbers: its rates in relation to that of text
    alone, which two cores can't change, and its times to first token."""
    heading = ["mix", "requests/s", "article", "TTFT p50 (ms)", "article", "p99", "article", "worker busy", "article"]
    rows = [[*heading, "encoders busy", "failed"]]
    bars: list[Bar] = []
    text_rate = summary_json(found[0].samples)["requests_per_s"]
    for row, one in zip(ROWS, found, strict=True):
        numbers = summary_json(one.samples)
        rate, ttft = numbers["requests_per_s"], numbers["ttft_ms"]
        p50_ms, p99_ms = ttft["p50"] / slower, ttft["p99"] / slower
        rows.append(
            [
                row.mix,
                *_pair(rate * slower, row.requests_per_s, "{:.1f}"),
                *_pair(p50_ms, row.ttft_p50_ms, "{:.0f}"),
                *_pair(p99_ms, row.ttft_p99_ms, "{:.0f}"),
                *_pair(one.watch.mean("workers busy"), row.utilisation, "{:.0%}"),
                f"{one.watch.mean('encoders busy'):.0%}",
                str(numbers["failed"]),
            ]
        )
        if row is not ROWS[0]:
            wanted = row.requests_per_s / ROWS[0].requests_per_s
            bars.append(Bar(f"{row.mix}: requests/s over those of text", rate / text_rate, round(wanted, 3), "x"))
        bars.append(Bar(f"{row.mix}: TTFT p50", p50_ms, row.ttft_p50_ms, "ms", is_max=True))
        bars.append(Bar(f"{row.mix}: TTFT p99", p99_ms, row.ttft_p99_ms, "ms", is_max=True))
        bars.append(Bar(f"{row.mix}: failed requests", numbers["failed"], 0, "", is_max=True))
    notes = [
        f"One worker, two encoders, {num_clients} clients, one request after the other each; stage times: {STAGES}, "
        f"all {slower:g} times longer, and the table's times divided by {slower:g}.",
        f"Texts have {_mean_prompt(found[0]):.0f} tokens on average, videos {_mean_prompt(found[-1]):.0f} with theirs.",
        "busy: the share of the time in which the engine computed a step, or an encoder a forward pass.",
    ]
    return BenchResult(rows, bars, notes)


def _mean_prompt(found: LoadFound) -> float:
    return sum(one.num_prompt for one in found.samples) / max(len(found.samples), 1)


def _pair(value: float, article: float, form: str) -> Iterator[str]:
    yield form.format(value)
    yield form.format(article)
