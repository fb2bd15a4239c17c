"""Runs `weft bench speech`: the table of the documentation on async chunks, row by row, on real clusters that speak.

Chunks on and off, a code2wav that takes one request or 64 at a time, and 1, 4 and 10 requests at once. Each cluster has
a Ray of its own, all run side by side, and each round asks them in turn, with the same requests. The thinker, the
router and the load share one core, the talker and code2wav the other, also where text alone is asked for and in the
sequential pipeline. Text alone is asked for twice: on a machine that is idle otherwise, and while the other core makes
the speech of another cluster, which tells what a busy second core costs the first one by itself. A second part gives
code2wav the documentation's time for a batch, because a core computes a batch in about the time of its requests one
after the other.

Answers of the demo are short, so the thinker gets a least number of tokens (`min_tokens`), and writes words of its
vocabulary without sense. A talker that was taught single sentences would end at any of them, so it can't end by itself
here (`speaking_model`): each answer has the same number of frames, and after the last word the talker goes on without
text. The draws of a request depend on its `seed` alone, so every cluster speaks the same codes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import enum
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from deploy.compose import open_model, resolve_model_dir
from deploy.config_file import load_config
from loadtest.bench_result import Bar, BenchResult
from loadtest.benches.served.given_code2wav import BATCH_S
from loadtest.benches.served.spoken_chats import ReceivedBytes, SpokenTimes, ask_spoken
from loadtest.benches.served.spoken_clusters import (
    ServedUrl,
    SpokenMode,
    kept_affinity,
    new_client,
    pin_members,
    serving,
    speaking_model,
    spoken_config,
)
from loadtest.benches.served.timed_chats import Body, ChatKind, ChatMaker, ChatTarget
from loadtest.benches.served.timed_cluster import SETTLE_S

CONCURRENCY_TO_REQUESTS = {1: 2, 4: 4, 10: 10}
"""Maps the number of requests that are open at once to the number of them in a round."""
PROMPT_WORDS = 90
"""With the template, a prompt has about 100 tokens."""
COMPUTED = tuple(SpokenMode(is_async, batch) for is_async in (False, True) for batch in (1, 64))
GIVEN = tuple(SpokenMode(False, batch, is_timed=True) for batch in (1, 64))
CHUNKED, SEQUENTIAL = SpokenMode(True, 64), SpokenMode(False, 64)
READ_TEXT = "one two three four five six seven eight nine " * 4
NUM_WARM_UP = 3
LEAST_AUDIO_S = 20.0
MOST_TTFP = {1: 0.15, 4: 0.2, 10: 0.2}
MOST_TEXT = 1.1
LEAST_BATCH_GAIN = 1.3
PARTS = ("computed", "given")


class AskedFor(enum.Enum):
    """Says what a cluster was asked for."""

    SPEECH = "speech"
    TEXT = "text alone"
    TEXT_BESIDE_SPEECH = "text alone, beside other speech"
    """Means that the stages of another cluster, on the same core as the asked one's, read aloud meanwhile."""


class DocumentSpeech(NamedTuple):
    """A `DocumentSpeech` is a row of the documentation's table: mean times in ms."""

    e2e: float
    ttft: float
    tpot: float
    ttfp: float
    rtf: float
    itl: float


DOCUMENT: Mapping[tuple[bool, int, int], DocumentSpeech] = {
    (False, 1, 1): DocumentSpeech(6581.80, 43.22, 8.31, 6459.34, 0.24, 8.22),
    (False, 1, 4): DocumentSpeech(7398.63, 67.57, 9.14, 7285.35, 0.27, 9.05),
    (False, 1, 10): DocumentSpeech(13522.99, 131.82, 12.72, 13410.44, 0.49, 12.60),
    (False, 64, 1): DocumentSpeech(6505.13, 43.14, 8.52, 6395.40, 0.24, 8.44),
    (False, 64, 4): DocumentSpeech(7668.15, 51.15, 9.36, 7562.37, 0.28, 9.27),
    (False, 64, 10): DocumentSpeech(9516.18, 138.06, 14.75, 9409.26, 0.34, 14.60),
    (True, 1, 1): DocumentSpeech(6179.79, 44.58, 8.69, 522.99, 0.22, 8.60),
    (True, 1, 4): DocumentSpeech(7692.69, 103.96, 10.22, 785.85, 0.29, 10.12),
    (True, 1, 10): DocumentSpeech(11152.71, 685.60, 17.64, 1628.88, 0.41, 17.62),
}
"""Maps (async_chunk, the batch of code2wav, concurrency) to the row; the documentation has none for chunks with 64."""


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="weft bench speech")
    parser.add_argument("--rounds", type=int, default=3, help="asks all clusters in turn this many times")
    parser.add_argument("--tokens", type=int, default=100, help="is the number of tokens of each answer")
    parser.add_argument("--frames", type=int, default=260, help="is the number of codec frames of each answer")
    parser.add_argument("--concurrency", default="1,4,10", help="lists how many requests are open at once")
    parser.add_argument("--model", type=Path, help="is the directory of a model that speaks, in place of the demo's")
    parser.add_argument("--parts", default="computed,given", help="lists the parts: computed, given")
    chosen = parser.parse_args(arguments)
    try:
        chosen.concurrency = [int(each) for each in chosen.concurrency.split(",")]
    except ValueError:
        parser.error("--concurrency takes numbers, for example 1,4,10")
    chosen.parts = chosen.parts.split(",")
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(f"--parts takes computed and given, not {', '.join(sorted(unknown))}")
    return chosen


def run(arguments: Sequence[str] = ()) -> BenchResult:
    chosen = options(arguments)
    source = chosen.model or resolve_model_dir(load_config(None))
    found: list[SpokenRow] = []
    with tempfile.TemporaryDirectory() as folder:
        model_dir = speaking_model(Path(folder) / "speaking", source, chosen.frames)
        if "computed" in chosen.parts:
            load = SpokenLoad(chosen.tokens, chosen.rounds, chosen.concurrency)
            found += _served(model_dir, COMPUTED, load)
        if "given" in chosen.parts:
            load = SpokenLoad(chosen.tokens, max(1, chosen.rounds - 1), [max(CONCURRENCY_TO_REQUESTS)], has_text=False)
            found += _served(model_dir, GIVEN, load)
    return speech_result(found, chosen.tokens, chosen.frames)


# ------------------------------------------------------------ the measurement


@dataclass(frozen=True, slots=True)
class SpokenLoad:
    """A `SpokenLoad` says what each cluster is asked."""

    num_tokens: int
    num_rounds: int
    concurrencies: Sequence[int]
    has_text: bool = True
    """Says whether the cluster with chunks is asked for text alone too."""
    requests: Mapping[int, int] = field(default_factory=lambda: CONCURRENCY_TO_REQUESTS)


class SpokenRow(NamedTuple):
    """Holds what a cluster gave at one concurrency."""

    mode: SpokenMode
    concurrency: int
    asked: AskedFor
    rounds: list[list[SpokenTimes]]

    @property
    def is_spoken(self) -> bool:
        return self.asked is AskedFor.SPEECH

    def mean(self, figure: Callable[[SpokenTimes], float]) -> float:
        """Returns the median over the rounds of the means over their answers."""
        return statistics.median(statistics.fmean(map(figure, answers)) for answers in self.rounds)

    def answers(self) -> list[SpokenTimes]:
        return [answer for answers in self.rounds for answer in answers]


def _served(model_path: Path, modes: Sequence[SpokenMode], load: SpokenLoad) -> list[SpokenRow]:
    """Starts clusters, measures them and stops them."""
    configs = {mode: spoken_config(mode, model_path) for mode in modes}
    _, model = open_model(configs[modes[0]])
    maker = ChatMaker(model.name, model.directory)
    with serving(configs) as urls, kept_affinity():
        return asyncio.run(_measure(urls, maker, load))


async def _measure(urls: Mapping[SpokenMode, ServedUrl], maker: ChatMaker, load: SpokenLoad) -> list[SpokenRow]:
    async with contextlib.AsyncExitStack() as stack:
        targets = {}
        for mode, served in urls.items():
            target = ChatTarget(await stack.enter_async_context(new_client(served.url)), served.model)
            await pin_members(target)
            targets[mode] = target
        return await measure_speech(targets, maker, load)


async def measure_speech(
    targets: Mapping[SpokenMode, ChatTarget], maker: ChatMaker, load: SpokenLoad
) -> list[SpokenRow]:
    """Asks all clusters in turn, in another order each round, after requests that only warm up. In each turn all get
    the same requests."""
    turns = [(mode, AskedFor.SPEECH) for mode in targets]
    if load.has_text:
        turns += [(CHUNKED, AskedFor.TEXT), (CHUNKED, AskedFor.TEXT_BESIDE_SPEECH)]
    for mode, asked in turns:
        bodies = spoken_bodies(maker, NUM_WARM_UP, load.num_tokens, is_spoken=asked is AskedFor.SPEECH)
        await _answers(targets[mode], bodies, NUM_WARM_UP)
    rows = {
        (mode, asked, concurrency): SpokenRow(mode, concurrency, asked, [])
        for concurrency in load.concurrencies
        for mode, asked in turns
    }
    for number in range(load.num_rounds):
        for concurrency in load.concurrencies:
            num = load.requests.get(concurrency, concurrency)
            kinds = [
                spoken_bodies(maker, num, load.num_tokens, is_spoken=is_spoken, seed=number)
                for is_spoken in (False, True)
            ]
            first = number % len(turns)
            for mode, asked in turns[first:] + turns[:first]:
                await asyncio.sleep(SETTLE_S)
                num_speeches = concurrency if asked is AskedFor.TEXT_BESIDE_SPEECH else 0
                async with _reading_aloud(targets.get(SEQUENTIAL), num_speeches):
                    answers = await _answers(targets[mode], kinds[asked is AskedFor.SPEECH], concurrency)
                rows[mode, asked, concurrency].rounds.append(answers)
    return list(rows.values())


@contextlib.asynccontextmanager
async def _reading_aloud(target: ChatTarget | None, num_speeches: int) -> AsyncIterator[None]:
    """Lets a cluster read so many texts aloud at a time during the block. Its thinker computes nothing for them, and
    its router gets sound only at the end of each."""
    if target is None or num_speeches == 0:
        yield
        return
    body = {"model": target.model, "input": READ_TEXT, "response_format": "pcm"}

    async def read_on() -> None:
        while True:
            (await target.client.post("/v1/audio/speech", json=body)).raise_for_status()

    readers = [asyncio.create_task(read_on()) for _ in range(num_speeches)]
    try:
        await asyncio.sleep(SETTLE_S)
        yield
        for reader in readers:
            if reader.done():
                reader.result()
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def spoken_bodies(maker: ChatMaker, num: int, num_tokens: int, *, is_spoken: bool, seed: int = 0) -> list[Body]:
    """Makes requests that no cache has seen."""
    bodies = []
    for index in range(num):
        body = maker.body(ChatKind("spoken", PROMPT_WORDS, max_tokens=num_tokens))
        body |= {"min_tokens": num_tokens, "seed": 1000 * seed + index}
        bodies.append(body | ({"modalities": ["text", "audio"]} if is_spoken else {}))
    return bodies


async def _answers(target: ChatTarget, bodies: Sequence[Body], concurrency: int) -> list[SpokenTimes]:
    """Sends the requests and keeps `concurrency` of them open. Answers are read once all are there."""
    left = iter(bodies)
    received: list[tuple[float, list[ReceivedBytes]]] = []

    async def ask_on() -> None:
        received.extend([await ask_spoken(target, body) for body in left])

    await asyncio.gather(*(ask_on() for _ in range(concurrency)))
    return [SpokenTimes.of(sent_s, pieces) for sent_s, pieces in received]


# ------------------------------------------------------------ what it means

HEADINGS = (
    *("async_chunk", "code2wav", "open", "E2E ms", "TTFT ms", "TPOT ms", "TTFP ms", "RTF", "ITL ms"),
    *("audio s", "least", "starved ms"),
    *("document: E2E", "TTFT", "TPOT", "TTFP", "RTF", "ITL"),
)


def speech_result(rows: Sequence[SpokenRow], num_tokens: int, num_frames: int) -> BenchResult:
    """Makes the table and the bars of what was measured."""
    table = [list(HEADINGS), *(_table_row(row) for row in rows)]
    bars = [bar for make in (_chunk_bars, _text_bars, _batch_bars) for bar in make(rows)]
    spoken = [row for row in rows if row.is_spoken]
    answers = [answer for row in spoken for answer in row.answers()]
    if answers:
        least_s = min(answer.audio_s for answer in answers)
        bars.append(Bar("least sound of an answer", least_s, LEAST_AUDIO_S, "s"))
    notes = [
        f"{len(rows[0].rounds)} rounds in turn; figures are medians over rounds of means over answers. All answers "
        f"have {num_tokens} tokens of text (`min_tokens`), words without sense, and {num_frames} frames, at which the "
        "talker is stopped: it can't end by itself.",
        "The thinker, the router and the load have one core, the talker and code2wav the other.",
        "E2E: whole answer; TTFP: first sound; RTF: E2E over the length of the sound; ITL: mean time between pieces of "
        "text, each of which may hold several tokens; starved: silence of a player that starts at the first sound.",
        f"given time: a batch of code2wav takes {BATCH_S:g} s whatever is in it; its sound is silence.",
    ]
    profile = {_name(row): _profile(row) for row in rows}
    return BenchResult(table, bars, notes, profile=profile)


def _name(row: SpokenRow) -> str:
    return f"{row.mode.name if row.is_spoken else row.asked.value}, {row.concurrency} open"


def _table_row(row: SpokenRow) -> list[str]:
    mode = row.mode
    batch = f"{mode.code2wav_batch}{' (given time)' if mode.is_timed else ''}"
    names = ["on" if mode.is_async else "off", batch] if row.is_spoken else [row.asked.value, ""]
    figures = [f"{1000 * row.mean(figure):.1f}" for figure in (_total, _ttft, _tpot)]
    if row.is_spoken:
        least_s = min(answer.audio_s for answer in row.answers())
        figures += [f"{1000 * row.mean(_ttfp):.1f}", f"{row.mean(_rtf):.3f}", f"{1000 * row.mean(_itl):.2f}"]
        figures += [f"{row.mean(_audio):.1f}", f"{least_s:.1f}", f"{1000 * row.mean(_starved):.0f}"]
    else:
        figures += ["", "", f"{1000 * row.mean(_itl):.2f}", "", "", ""]
    document = DOCUMENT.get((mode.is_async, mode.code2wav_batch, row.concurrency))
    is_shown = row.is_spoken and not mode.is_timed and document is not None
    shown = [f"{value:g}" for value in document] if is_shown and document is not None else [""] * 6
    return [*names, str(row.concurrency), *figures, *shown]


def _total(answer: SpokenTimes) -> float:
    return answer.total_s


def _ttft(answer: SpokenTimes) -> float:
    return answer.ttft_s


def _tpot(answer: SpokenTimes) -> float:
    return answer.tpot_s


def _itl(answer: SpokenTimes) -> float:
    return statistics.fmean(answer.gaps_s or [0.0])


def _ttfp(answer: SpokenTimes) -> float:
    return answer.ttfp_s


def _rtf(answer: SpokenTimes) -> float:
    return answer.rtf


def _audio(answer: SpokenTimes) -> float:
    return answer.audio_s


def _starved(answer: SpokenTimes) -> float:
    return sum(answer.underruns_s())


def _profile(row: SpokenRow) -> dict[str, object]:
    """Returns what each round gave, for the file."""
    shown = {"e2e_s": _total, "ttft_s": _ttft, "tpot_s": _tpot}
    if row.is_spoken:
        shown |= {"ttfp_s": _ttfp, "rtf": _rtf, "audio_s": _audio, "starved_s": _starved}
    found: dict[str, object] = {
        name: [round(statistics.fmean(map(figure, answers)), 5) for answers in row.rounds]
        for name, figure in shown.items()
    }
    if row.is_spoken:
        found["num_underruns"] = [sum(len(answer.underruns_s()) for answer in answers) for answers in row.rounds]
    return found


def _ratio(row: SpokenRow, base: SpokenRow, figure: Callable[[SpokenTimes], float]) -> float:
    """Returns the median over the rounds of the ratio of means, because both rows of a round had the same requests."""
    return statistics.median(
        statistics.fmean(map(figure, answers)) / statistics.fmean(map(figure, others))
        for answers, others in zip(row.rounds, base.rounds, strict=True)
    )


def _pairs(
    rows: Sequence[SpokenRow], mode: SpokenMode, base: SpokenMode, base_asked: AskedFor = AskedFor.SPEECH
) -> Iterator[tuple[SpokenRow, SpokenRow]]:
    """Yields the spoken rows of a mode at each concurrency, each with the row of the base that was asked the given
    way."""
    for row in rows:
        for other in rows:
            is_pair = row.concurrency == other.concurrency and row.is_spoken and other.asked is base_asked
            if is_pair and row.mode == mode and other.mode == base:
                yield row, other


def _chunk_bars(rows: Sequence[SpokenRow]) -> Iterator[Bar]:
    for row, base in _pairs(rows, CHUNKED, SEQUENTIAL):
        at = f"{row.concurrency} open: "
        most = MOST_TTFP.get(row.concurrency, max(MOST_TTFP.values()))
        yield Bar(f"{at}first sound, chunks over sequential", _ratio(row, base, _ttfp), most, "x", is_max=True)
        yield Bar(f"{at}E2E, chunks over sequential", _ratio(row, base, _total), 1.0, "x", is_max=True)
        yield Bar(f"{at}RTF, chunks over sequential", _ratio(row, base, _rtf), 1.0, "x", is_max=True)


def _text_bars(rows: Sequence[SpokenRow]) -> Iterator[Bar]:
    for asked in (AskedFor.TEXT, AskedFor.TEXT_BESIDE_SPEECH):
        for row, base in _pairs(rows, CHUNKED, CHUNKED, asked):
            at = f"{row.concurrency} open: "
            yield Bar(f"{at}TTFT, spoken over {asked.value}", _ratio(row, base, _ttft), MOST_TEXT, "x", is_max=True)
            yield Bar(f"{at}TPOT, spoken over {asked.value}", _ratio(row, base, _tpot), MOST_TEXT, "x", is_max=True)


def _batch_bars(rows: Sequence[SpokenRow]) -> Iterator[Bar]:
    for modes, what in ((COMPUTED[:2], "computed on one core"), (GIVEN, "given time of a batch")):
        for row, base in _pairs(rows, modes[0], modes[1]):
            if row.concurrency == max(CONCURRENCY_TO_REQUESTS):
                name = f"sequential, {row.concurrency} open: code2wav 1 over 64, E2E, {what}"
                yield Bar(name, _ratio(row, base, _total), LEAST_BATCH_GAIN, "x")
