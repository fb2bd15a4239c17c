"""Simulates the figures of the documents from which Weft took its targets, and puts both numbers side by side.

Each scenario is a function that returns a `DocumentFigure`: rows of (what, the document's number, the simulator's), and
what had to be assumed, because the documents give neither prompts nor the time of a step. Where a document contradicts
itself, the figure says so and the row stays as it comes out. The module knows nothing of how a simulation works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import msgspec

from loadtest.simulator.cost_tables import CostTable, EncodingCosts, LinkCosts, MediaKind, WorkerCosts, load_table
from loadtest.simulator.sim_cluster import ClusterSettings, SimCluster, SimResult
from loadtest.simulator.sim_report import Summary, summarise
from loadtest.simulator.sim_requests import Part, SimRequest
from loadtest.simulator.speech_timeline import SpeechStageTimes, spoken_timeline
from loadtest.simulator.workloads import WorkloadSpec, generate

OMNICONNECTOR = "the OmniConnector article"
DYNAMO = "the article on multimodal routing in Dynamo"


@dataclass(frozen=True, slots=True)
class FigureRow:
    """A `FigureRow` is one number of a document beside that of the simulator."""

    what: str
    document: float
    simulated: float
    unit: str
    """Names the unit of both numbers."""
    tolerance: float = 0.1
    """Sets the relative difference up to which the simulator counts as reproducing the document."""

    @property
    def ratio(self) -> float:
        return self.simulated / self.document

    @property
    def is_alike(self) -> bool:
        return abs(self.ratio - 1.0) <= self.tolerance


@dataclass(frozen=True, slots=True)
class DocumentFigure:
    """A `DocumentFigure` is one figure of a document with what the simulator gives for it."""

    name: str
    title: str
    source: str
    rows: tuple[FigureRow, ...]
    assumed: tuple[str, ...]
    """Lists what the document does not say, and what the simulation takes instead."""
    notes: tuple[str, ...] = ()
    """Lists where the document contradicts itself, and why rows differ."""


def request(number: int, kind: str, parts: Iterable[Part], num_output: int = 1, at_s: float = 0.1) -> SimRequest:
    return SimRequest(number, at_s, kind, tuple(parts), num_output, 1 << 20)


def text(number: int, num_tokens: int) -> tuple[int, int]:
    """Returns a text that no other number has."""
    return (number + 1) * 100_000, num_tokens


def first_token_ms(settings: ClusterSettings, parts: Sequence[Part]) -> float:
    """Returns the time to first token of one request on an idle cluster."""
    (outcome,) = SimCluster(settings).run([request(0, "alone", parts)]).outcomes
    assert outcome.is_served, outcome.error
    return 1e3 * outcome.first_token_s


# ---------------------------------------------------------------- overlap


def video_overlap() -> DocumentFigure:
    """Simulates a video of 30 frames behind a short and a long prefix, with and without overlap."""
    base = load_table("omniconnector-a100")
    num_text = 3300

    def table(num_units: int) -> CostTable:
        video = MediaKind("video", (3840 // num_units,) * num_units, 7680)
        # 48.7 ms of encoding, and 41.3 ms until and after it, make the 90 ms that a long prefix hides.
        encoding = EncodingCosts(base.modality_to_encoding["video"].forward, prepare_s=0.0360)
        worker = WorkerCosts(0.0005, 1e-4, 2.565e-5, 8192, 327680)
        return msgspec.structs.replace(
            base,
            worker=worker,
            media={"video": video},
            modality_to_encoding={"video": encoding},
            message_s=1e-4,
        )

    def run(num_front: int, num_units: int, *, waits: bool) -> float:
        parts: list[Part] = [text(0, num_front), ("video", "v")]
        if num_text > num_front:
            parts.append(text(1, num_text - num_front))
        settings = ClusterSettings(table(num_units), 1, 1, waits_for_media=waits, max_step_tokens=16384)
        return first_token_ms(settings, parts)

    short, long = 1300, num_text - 20
    return DocumentFigure(
        "overlap",
        "TTFT of a video of 30 frames, sequential and overlapped (Llama 70B)",
        DYNAMO,
        (
            FigureRow("sequential", 285, run(short, 1, waits=True), "ms"),
            FigureRow("overlapped, short prefix", 248, run(short, 1, waits=False), "ms"),
            FigureRow("overlapped, long prefix", 195, run(long, 1, waits=False), "ms"),
        ),
        (
            "the prompt has 3,300 text tokens, of which 1,300 (short) or 3,280 (long) stand in front of the video",
            "the video has 3,840 tokens (the OmniConnector article; the same article's table has 17,280)",
            "a token of prefill takes 0.0257 ms, so that prefill takes 195 ms in all; encoding takes 48.7 ms, and "
            "decoding, preprocessing and transfer 41 ms",
        ),
        (
            f"with the video in 15 units, which the article does not have, the short prefix takes "
            f"{run(short, 15, waits=False):.0f} ms: the worker computes the first units while others are encoded",
        ),
    )


def video_in_batch() -> DocumentFigure:
    """Simulates a batch of 32 requests, one of them with a video, served one by one and together."""
    base = load_table("omniconnector-a100")
    video = MediaKind("video", (3840,), 7680)
    encoding = EncodingCosts(base.modality_to_encoding["video"].forward, prepare_s=0.004)
    table = msgspec.structs.replace(
        base,
        worker=WorkerCosts(0.0055, 1e-4, 2.565e-5, 8192, 327680),
        media={"video": video},
        modality_to_encoding={"video": encoding},
        message_s=1e-4,
    )
    texts = [request(number, "text", [text(number, 70)]) for number in range(31)]
    with_video = request(31, "video", [text(31, 10), ("video", "v"), text(32, 10)])
    settings = ClusterSettings(table, 1, 1, max_step_tokens=16384)
    one_by_one = replace(settings, max_sequences=1, waits_for_media=True)
    alone = SimCluster(one_by_one).run([with_video]).outcomes[0]
    before = SimCluster(one_by_one).run(texts)
    together = SimCluster(settings).run([*texts, with_video])
    blocked_ms = 1e3 * (max(one.first_token_s for one in before.outcomes) + alone.first_token_s)
    texts_together = max(one.first_token_s for one in together.outcomes if one.kind == "text")
    texts_alone = max(one.first_token_s for one in SimCluster(settings).run(texts).outcomes)
    return DocumentFigure(
        "batch",
        "TTFT of a video in a batch of 32 requests (31 of text)",
        OMNICONNECTOR,
        (
            FigureRow("synchronous", 395, blocked_ms, "ms"),
            FigureRow("asynchronous", 172, 1e3 * together.outcomes[-1].first_token_s, "ms"),
        ),
        (
            "texts have 70 tokens, the video 30 frames and 3,840 tokens; a step takes 5.5 ms and 0.0257 ms per token",
            "the synchronous pipeline serves one request after the other, as the article's code does, and the video is "
            "the last; the time of its encoding is added to those of the 31 steps",
        ),
        (
            "overlap of encoding and prefill alone can't save 56 %: with E + T + V = 395 and max(E, T) + V = 172, the "
            "shorter of E and T would be 223 ms and longer than 172. So the synchronous figure must lack batching too",
            f"the last of the 31 texts has its first token after {1e3 * texts_together:.0f} ms next to the video and "
            f"{1e3 * texts_alone:.0f} ms without it",
        ),
    )


# ---------------------------------------------------------------- types of requests, and encoding


def types_of_request() -> DocumentFigure:
    """Simulates one request of each type on an idle cluster."""
    table = load_table("dynamo-h100")
    settings = ClusterSettings(table, 1, 4, max_step_tokens=32768)
    documented: Mapping[str, tuple[int, tuple[str, ...]]] = {
        "text, 1,000 tokens": (45, ()),
        "one picture": (85, ("image",)),
        "four pictures": (165, ("image",) * 4),
        "10 s of video": (420, ("video-10s",)),
        "30 s of video": (850, ("video-30s",)),
    }
    rows, overlapped = [], []
    for what, (document_ms, media) in documented.items():
        parts: list[Part] = [text(0, 1000), *((name, f"m{index}") for index, name in enumerate(media))]
        tolerance = 0.2 if media else 0.1
        sequential_ms = first_token_ms(replace(settings, waits_for_media=True), parts)
        rows.append(FigureRow(what, document_ms, sequential_ms, "ms", tolerance))
        overlapped.append(f"{what} {first_token_ms(settings, parts):.0f}")
    return DocumentFigure(
        "types",
        "TTFT by type of request (Llama 3.2 Vision 70B, 8 H100)",
        DYNAMO,
        tuple(rows),
        table.assumed,
        (f"with overlap the simulator gives, in ms: {', '.join(overlapped)}",),
    )


def only_encoding(table: CostTable, width: int = 8192) -> CostTable:
    """Returns the table with nothing but encoding times, so that a time to first token is a time of encoding. Features
    have rows of `width` numbers."""
    return msgspec.structs.replace(
        table,
        modality_to_encoding={name: EncodingCosts(costs.forward) for name, costs in table.modality_to_encoding.items()},
        message_s=0.0,
        worker=WorkerCosts(1e-9, 0.0, 0.0, width, 327680),
        links={name: LinkCosts(0.0, 1e15) for name in table.links},
    )


PICTURES: Sequence[Sequence[Part]] = [[("image", f"m{index}")] for index in range(4)]
"""Holds the media of four requests, each with a picture of its own."""
BOTH_MEDIA: Sequence[Part] = [("video-10s", "v"), ("audio-30s", "a")]


def encoding_times() -> DocumentFigure:
    """Simulates the tables of encoding times of both articles: one request with the media of the row on one encoder."""
    dynamo = only_encoding(load_table("dynamo-h100"))
    h100 = ClusterSettings(dynamo, 1, 1, max_batch_cost=65536, max_step_tokens=32768, num_decoders=64)
    apart_ms = first_token_ms(replace(h100, num_encoders=2), BOTH_MEDIA)
    one_request_ms = _together_ms(h100, [[part for parts in PICTURES for part in parts]])
    return DocumentFigure(
        "encoding",
        "Encoding times and output sizes by modality",
        f"{OMNICONNECTOR} (A100) and {DYNAMO} (H100)",
        (*_a100_rows(), *_h100_rows(h100)),
        (
            "preparation, transfer and prefill take no time here; the times of the rows with one medium are the "
            "tables' own costs, so these rows show that the pipeline adds nothing to them",
            "features have rows of 4,096 numbers in half precision, those of the 120 frames 8,192, as in the article",
            "the article gives 120 frames 7,680 tokens, while its code, which pools frames of 256 patches in pairs, "
            "would give 15,360; the simulator takes the 7,680",
        ),
        (
            "the article's own times of a video and of a sound sum to 133 ms, and the longer one has 85: no order on "
            f"one encoder gives its 120. On two encoders the simulator gives {apart_ms:.0f} ms",
            "the four pictures belong to four requests. Those of one request go in two passes, so that its prefill "
            f"can begin earlier, and take {one_request_ms:.1f} ms",
            "a video of several units gives way between them, so its units go in more than one pass",
            "the row of text takes no encoding",
        ),
    )


def _a100_rows() -> list[FigureRow]:
    rows: list[FigureRow] = []
    omni = load_table("omniconnector-a100")
    # Each row has the medium, the article's milliseconds, its megabytes, and its width.
    for what, medium, document_ms, document_mb, width in (
        ("a picture of 448 x 448", "image", 4.8, 8, 4096),
        ("a picture of six tiles", "image-hd", 12.3, 48, 4096),
        ("30 frames", "video-30f", 48.7, 30, 4096),
        ("120 frames", "video-120f", 187, 125, 8192),
        ("30 s of sound", "audio-30s", 2.9, 6, 4096),
        ("120 s of sound", "audio-120s", 11.2, 24, 4096),
    ):
        settings = ClusterSettings(only_encoding(omni, width), 1, 1, max_batch_cost=65536, max_step_tokens=16384)
        result = SimCluster(settings).run([request(0, "alone", [(medium, "m")])])
        rows.append(FigureRow(f"{what}, A100", document_ms, 1e3 * result.outcomes[0].first_token_s, "ms"))
        rows.append(FigureRow(f"{what}, output", document_mb, result.max_kept_bytes / 2**20, "MiB"))
    return rows


def _h100_rows(settings: ClusterSettings) -> list[FigureRow]:
    return [
        FigureRow(f"{what}, H100", document_ms, milliseconds, "ms")
        for what, document_ms, milliseconds in (
            ("a picture of 336 x 336", 5, first_token_ms(settings, PICTURES[0])),
            ("four of 336 x 336", 12, _together_ms(settings, PICTURES)),
            ("10 s of video, 30 frames", 48, first_token_ms(settings, BOTH_MEDIA[:1])),
            ("30 s of sound by Whisper-small", 85, first_token_ms(settings, BOTH_MEDIA[1:])),
            ("10 s of video and 30 s of sound", 120, first_token_ms(settings, BOTH_MEDIA)),
        )
    ]


def _together_ms(settings: ClusterSettings, requests: Sequence[Sequence[Part]]) -> float:
    """Returns the milliseconds for which pictures are encoded that arrive while another one keeps the device busy."""
    busy = request(0, "busy", [("image", "first")], at_s=0.1)
    later = [request(1 + index, "later", parts, at_s=0.101) for index, parts in enumerate(requests)]
    ends = [one.first_token_s for one in SimCluster(settings).run([busy, *later]).outcomes]
    return 1e3 * (0.001 + max(ends[1:]) - ends[0])


def encoding_batches() -> DocumentFigure:
    """Simulates pictures that arrive together at one encoder."""
    table = only_encoding(load_table("omniconnector-a100"))
    rows, shares = [], []
    # Full use of the device would take this long for a picture, if the article's 92 % in a batch of 32 are right.
    work_ms = 0.92 * 29.7 / 32
    for size, document_ms, document_share in (
        (1, 4.8, 11),
        (4, 7.2, 38),
        (8, 10.1, 67),
        (16, 16.3, 84),
        (32, 29.7, 92),
    ):
        settings = ClusterSettings(table, 1, 1, max_batch_cost=1024 * size, num_decoders=64)
        # One picture keeps the device busy while the others arrive, so that they share the next pass.
        first = request(0, "first", [("image", "first")], at_s=0.1)
        others = [request(1 + index, "batch", [("image", f"p{index}")], at_s=0.101) for index in range(size)]
        outcomes = SimCluster(settings).run([first, *others]).outcomes
        ends_s = [0.001 + one.first_token_s for one in outcomes[1:]]
        batch_ms = 1e3 * (max(ends_s) - outcomes[0].first_token_s)
        rows.append(FigureRow(f"{size} pictures", document_ms, batch_ms, "ms"))
        shares.append(
            FigureRow(f"{size} pictures, use of the device", document_share, 100 * size * work_ms / batch_ms, "%")
        )
    return DocumentFigure(
        "batches",
        "Encoding of 1 to 32 pictures of 448 x 448 of as many requests (SigLIP-L/14, A100)",
        OMNICONNECTOR,
        (*rows, *shares),
        (
            "preparation, transfer and prefill take no time here, so that the time to first token is that of encoding",
            "the pictures arrive while the device is busy; then the production batcher makes one pass of them",
            "a picture needs the same work in every batch, and 32 pictures use 92 % of the device as in the article",
        ),
        (
            "the article's shares for one and four pictures do not fit its own times: 11 % of 4.8 ms are 0.53 ms of "
            "work for a picture, 38 % of 7.2 ms are 0.68, and its larger batches say 0.85",
        ),
    )


# ---------------------------------------------------------------- load


TEXT_COSTS = WorkerCosts(0.006, 3e-5, 1.25e-5, 8192, 327680)
"""Gives the article's rate for text alone."""
BATCH_COSTS = WorkerCosts(0.0055, 1e-4, 2.565e-5, 8192, 327680)
"""Has the cost of a token that the article's batch of 32 implies."""
MIX_TO_FIGURES: Mapping[str, tuple[Mapping[str, float], float, float, float]] = {
    "100 % text": ({"text": 1.0}, 48.2, 82, 145),
    "90 % text, 10 % pictures": ({"text": 0.9, "image": 0.1}, 45.1, 85, 162),
    "80 % text, 10 % pictures, 10 % video": ({"text": 0.8, "image": 0.1, "video-30f": 0.1}, 38.7, 91, 245),
    "50 % text, 30 % pictures, 20 % video": ({"text": 0.5, "image": 0.3, "video-30f": 0.2}, 24.3, 128, 387),
    "100 % video": ({"video-30f": 1.0}, 6.8, 195, 523),
}
"""Maps each mix of the article to its shares, and to the article's requests/s and milliseconds of TTFT, p50 and p99."""


def _summary_of_mix(
    mix: Mapping[str, float], costs: WorkerCosts, num_requests: int, mean_prompt: int, num_clients: int
) -> Summary:
    """Simulates one worker with these costs and two encoders, and so many clients that send one request after the
    other."""
    table = msgspec.structs.replace(load_table("omniconnector-a100"), worker=costs)
    settings = ClusterSettings(table, 1, 2, max_step_tokens=8192, num_blocks=12000)
    spec = WorkloadSpec(num_requests, 100.0, mix, mean_prompt=mean_prompt, prompt_spread=0.4, mean_output=20)
    return summarise(SimCluster(settings).run(list(generate(spec, 7)), num_clients=num_clients), 0.1)


def mixed_workload() -> DocumentFigure:
    """Simulates the article's five mixes with the number of clients that gives its rate for text alone."""
    rows: list[FigureRow] = []
    num_clients = 26
    rates: list[float] = []
    for what, (mix, rate, p50, p99) in MIX_TO_FIGURES.items():
        summary = _summary_of_mix(mix, TEXT_COSTS, 400, 1250, num_clients)
        rates.append(summary.requests_per_s)
        rows.append(FigureRow(f"{what}: requests/s", rate, summary.requests_per_s, "1/s", 0.25))
        rows.append(FigureRow(f"{what}: TTFT p50", p50, summary.ttft.p50, "ms", 0.5))
        rows.append(FigureRow(f"{what}: TTFT p99", p99, summary.ttft.p99, "ms", 0.5))
    # With the cost of a token in the batch of 32, a text of this length gives the rate for text alone.
    batch_prompt, num_few = 480, 4
    many, few, tenth = (
        _summary_of_mix(MIX_TO_FIGURES[what][0], BATCH_COSTS, 200, batch_prompt, count)
        for what, count in (
            ("100 % video", num_clients),
            ("100 % video", num_few),
            ("80 % text, 10 % pictures, 10 % video", num_clients),
        )
    )
    rows.append(FigureRow("10 % pictures cost", 6.4, 100 * (1 - rates[1] / rates[0]), "%", 0.5))
    rows.append(FigureRow("10 % video cost more", 14.2, 100 * (1 - rates[2] / rates[1]), "%", 0.5))
    return DocumentFigure(
        "mixed",
        "Requests/s and TTFT of mixed workloads (A100, Llama 70B)",
        OMNICONNECTOR,
        tuple(rows),
        (
            "texts have 1,250 tokens on average, outputs 20; a step takes 6 ms, 0.0125 ms per token and 0.03 ms per "
            "sequence, which gives the article's rate for text alone",
            f"{num_clients} clients send one request after the other in all rows, one worker and two encoders serve",
        ),
        (
            "the row of video alone is missed, because no cost of a video fits all rows: the article's use of the GPU "
            "divided by its rate is 19.5 ms per request for text, which leaves 45, 80 and 141 ms for a video in its "
            "last three rows",
            f"with the cost of a token that the article's batch of 32 implies (0.0257 ms, {batch_prompt} tokens per "
            f"text), video alone gives {_told_load(many)} with {num_clients} clients, and {_told_load(few)} with "
            f"{num_few}, but the row with 10 % of video then gives {_told_load(tenth)}",
            "195 ms at 6.8 requests/s are 1.3 requests before their first token (Little's law), so few clients can "
            "have been there at once",
        ),
    )


def token_times_of_media() -> DocumentFigure:
    """Simulates texts, pictures and videos under load, and compares the times of their further tokens."""
    spec = WorkloadSpec(400, 4.0, {"text": 0.8, "image": 0.15, "video-30f": 0.05}, mean_output=100)
    settings = ClusterSettings(load_table("omniconnector-a100"), 1, 2)
    outcomes = [one for one in SimCluster(settings).run(list(generate(spec, 3))).outcomes if one.num_tokens > 1]
    text_ms, media_ms = (
        1e3 * fmean(one.token_s for one in outcomes if (one.kind == "text") == is_text) for is_text in (True, False)
    )
    return DocumentFigure(
        "tpot",
        "Time per output token of requests with media, next to texts under the same load",
        "the article on vLLM's modalities (tokens after the first come as fast as those of texts)",
        (FigureRow("TPOT, media over text", 1.0, media_ms / text_ms, "times"),),
        (
            "4 requests/s at one worker and two encoders, 80 % text, 15 % pictures and 5 % videos of 30 frames, 800 "
            "tokens of text and 100 of output on average",
            "a decoding sequence adds the same time to a step whatever its context, so the figure shows what requests "
            "do to each other in a step, and not what a longer context costs",
        ),
        (
            f"TPOT of texts {text_ms:.1f} ms, of requests with media {media_ms:.1f} ms; `weft bench isolation` "
            "measures both on a cluster",
        ),
    )


def _told_load(summary: Summary) -> str:
    return f"{summary.requests_per_s:.1f} requests/s and TTFT {summary.ttft.p50:.0f} / {summary.ttft.p99:.0f} ms"


def memory_of_concurrent_requests() -> DocumentFigure:
    """Simulates 64 requests at once, of text and of media, and counts the KV that they hold."""
    base = load_table("omniconnector-a100")
    gigabyte = base.worker.kv_bytes_per_token * 16 / 1e9
    settings = ClusterSettings(base, 1, 4, num_blocks=60_000, max_step_tokens=16384)

    def kv_gb(kinds: Sequence[str], num_text: int) -> tuple[float, SimResult]:
        requests = []
        for number in range(64):
            kind = kinds[number % len(kinds)]
            media: list[Part] = [] if kind == "text" else [(kind, f"m{number}")]
            requests.append(request(number, kind, [text(number, num_text), *media], num_output=200))
        result = SimCluster(settings).run(requests, num_clients=64)
        return result.max_kv_blocks * gigabyte, result

    text_gb, _ = kv_gb(["text"], 360)
    media_gb, result = kv_gb(["image", "image", "image", "image", "video-30f"], 100)
    return DocumentFigure(
        "memory",
        "KV of 64 concurrent requests (Llama 70B, 8 KV heads of 128, 80 layers, half precision)",
        OMNICONNECTOR,
        (
            FigureRow("KV of text requests", 12, text_gb, "GB"),
            FigureRow("KV of multimodal requests", 38, media_gb, "GB"),
            FigureRow("multimodal over text", 38 / 12, media_gb / text_gb, "times"),
        ),
        (
            "a text request has 360 tokens and 200 of output; a multimodal one has 100 and 200, with a picture of "
            "1,024 tokens (four of five) or a video of 3,840",
            "KV takes 327,680 bytes per token",
        ),
        (
            f"the features that lie at the worker take at most {result.max_feature_bytes / 1e9:.2f} GB, because each "
            "is discarded after its prefill",
        ),
    )


def memory_of_features() -> DocumentFigure:
    """Simulates 100 requests with a video of 120 frames at once, with features kept and discarded."""
    settings = ClusterSettings(load_table("omniconnector-a100"), 1, 4, num_blocks=200_000, max_step_tokens=16384)

    def run(kind: str) -> SimResult:
        requests = [
            request(number, kind, [text(number, 50), (kind, f"v{number}")], num_output=4000, at_s=0.1 + 0.5 * number)
            for number in range(100)
        ]
        return SimCluster(settings).run(requests)

    videos = run("video-120f")
    recovered_gb = (videos.max_kept_bytes - videos.max_feature_bytes) / 1e9
    return DocumentFigure(
        "features",
        "Features of 100 concurrent requests with a video of 120 frames",
        OMNICONNECTOR,
        (
            FigureRow("features kept until the end", 12.5, videos.max_kept_bytes / 1e9, "GB"),
            FigureRow("share that discarding recovers", 1.0, recovered_gb * 1e9 / videos.max_kept_bytes, "of it"),
        ),
        (
            "a video has 7,680 tokens of width 8,192 in half precision, 125.8 MB",
            "the requests come twice a second to one worker and four encoders, and their outputs are so long that all "
            "100 are there at the end",
        ),
        (
            f"with discarding after prefill the worker has at most {videos.max_feature_bytes / 1e9:.2f} GB of features "
            f"at once, so {recovered_gb:.1f} GB are recovered (the article: 5 GB where features have 50 MB each)",
        ),
    )


# ---------------------------------------------------------------- a peer


def encoder_against_tensor_parallel() -> DocumentFigure:
    """Simulates two devices: an encoder and a worker, and both as one worker that encodes itself."""
    base = load_table("omniconnector-a100")
    image = MediaKind("image", (1024,), 1024)
    encoding = EncodingCosts(((1024, 0.028), (32768, 0.75)), prepare_s=0.002)
    speed_up = 1.5

    def table(factor: float) -> CostTable:
        worker = WorkerCosts(0.006, 4e-5 / factor, 2.2e-5 / factor, 8192, 327680)
        return msgspec.structs.replace(
            base, worker=worker, media={"image": image}, modality_to_encoding={"image": encoding}
        )

    spec = WorkloadSpec(1200, 100.0, {"image": 1.0}, mean_prompt=150, prompt_spread=0.3, mean_output=100)
    requests = list(generate(spec, 11))
    apart = ClusterSettings(table(1.0), 1, 1, max_step_tokens=8192, num_blocks=20_000, num_decoders=32)
    together = replace(apart, table=table(speed_up), shares_devices=True)
    split = summarise(SimCluster(apart).run(requests, num_clients=96), 0.2)
    joined = summarise(SimCluster(together).run(requests, num_clients=96), 0.2)
    return DocumentFigure(
        "peer",
        "One encoder and one worker against tensor parallelism over both devices, 96 clients with pictures",
        "vLLM's figures of encoder disaggregation on 2 GB200",
        (
            FigureRow("requests/s, split over joined", 1.43, split.requests_per_s / joined.requests_per_s, "times"),
            FigureRow("TTFT p90, split over joined", 0.5, split.ttft.p90 / joined.ttft.p90, "times", 0.25),
            FigureRow("whole answer p90, split over joined", 0.5, split.total.p90 / joined.total.p90, "times", 0.25),
        ),
        (
            "a picture takes 28 ms to encode and little less in a batch, and 1,024 tokens of 0.022 ms; texts have "
            "150 tokens and outputs 100",
            f"two devices in tensor parallelism compute the language model {speed_up} times as fast; the encoder gains "
            "nothing from them (a vision tower does not scale with tensor parallelism), and each step waits for it",
        ),
        (
            f"split: {split.requests_per_s:.1f} requests/s, p90 {split.ttft.p90:.0f} ms; joined: "
            f"{joined.requests_per_s:.1f} and {joined.ttft.p90:.0f} ms",
            "96 clients that wait for their answers keep both systems full. The mean time of a whole answer is then 96 "
            "divided by the rate, so its ratio is 1 / 1.43 = 0.70 with any costs. A p90 of half is possible where "
            "requests come at a fixed rate that only one system bears; which of the two the peer measured is not known",
        ),
    )


def spoken_answer() -> DocumentFigure:
    """Simulates the timeline of the stages that speak, with chunks and without."""
    times = SpeechStageTimes(thinker_s=2.0, talker_s=3.0, code2wav_s=1.0, num_tokens=100, num_frames=188)
    sequential = spoken_timeline(times, is_async=False)
    chunked = spoken_timeline(times, is_async=True, first_chunk_frames=20)
    own = spoken_timeline(times, is_async=True)
    long = spoken_timeline(replace(times, num_frames=340), is_async=True)
    return DocumentFigure(
        "speech",
        "Timeline of a spoken answer: thinker 2.0 s, talker 3.0 s, code2wav 1.0 s",
        "the documentation on async chunks",
        (
            FigureRow("sequential: whole answer", 6.0, sequential.total_s, "s"),
            FigureRow("sequential: first sound", 6.0, sequential.first_sound_s, "s"),
            FigureRow("chunks: whole answer", 3.5, chunked.total_s, "s"),
            FigureRow("chunks: first sound", 0.5, chunked.first_sound_s, "s"),
        ),
        ("an answer has 100 tokens and 188 frames (15 s); a frame needs a token; the first chunk has 20 frames",),
        (
            f"with a first chunk of 4 frames, Weft's own choice, the sound begins after {own.first_sound_s:.2f} s and "
            f"ends after {own.total_s:.2f}; 340 frames (27 s, as in the table) take {long.total_s:.2f}",
        ),
    )


FIGURES: Mapping[str, Callable[[], DocumentFigure]] = {
    "overlap": video_overlap,
    "batch": video_in_batch,
    "types": types_of_request,
    "encoding": encoding_times,
    "batches": encoding_batches,
    "mixed": mixed_workload,
    "tpot": token_times_of_media,
    "memory": memory_of_concurrent_requests,
    "features": memory_of_features,
    "peer": encoder_against_tensor_parallel,
    "speech": spoken_answer,
}
