"""Serves the clusters of these benches: one router, one encoder and one worker on Ray, with given stage times.

`TimedStages` are the times of forward passes and steps. They pass as waits (`encoders.encode_delay_s`,
`workers.step_delay_s`), because a GPU's time takes no processor, and Ray, router, decoders and client share the cores
of a small machine. Without stage times, the cluster computes: a language model of 180 million random parameters behind
a small vision tower. `measure_alone` measures what the stages of a running cluster cost when nothing else runs, and
`AloneCosts` makes of it what a request takes at best.

The module knows nothing of targets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import httpx

from deploy.config import ClusterConfig
from deploy.config_file import load_config
from fabric.contracts import context_scale_tokens, weighted_tokens
from loadtest.benches.served.ideal_times import IdealRequest, IdealSpan, IdealUnit
from loadtest.benches.served.timed_chats import ChatKind, ChatMaker, ChatTarget, TimedChat, send_each
from loadtest.benches.synthetic import qwen2_5_vl_180m, qwen2_5_vl_small

T = TypeVar("T")
ENCODE_TIMEOUT_MS = 120_000
"""Limits the time for encoding an item. It is far above the default, because eight pictures that are computed for real
wait for each other."""


class TimedStages(NamedTuple):
    """Holds what passes and steps take, in seconds."""

    pass_s: float
    s_per_patch: float
    step_s: float
    s_per_token: float
    """Counts for a prompt token without a context; a token after a long context takes more."""
    s_per_decode: float = 0.0

    def sections(self) -> dict[str, dict[str, object]]:
        """Returns the settings of a cluster with these times, by section."""
        return {
            "encoders": {"encode_delay_s": self.pass_s, "encode_delay_s_per_cost": self.s_per_patch},
            "workers": {
                "step_delay_s": self.step_s,
                "step_delay_s_per_token": self.s_per_token,
                "step_delay_s_per_decode": self.s_per_decode,
            },
        }


def cluster_config(model_dir: Path, stages: TimedStages | None, **sections: Mapping[str, object]) -> ClusterConfig:
    """Returns the config of a cluster with these stage times, or with real compute if `stages` is None. `sections` add
    to it."""
    data = load_config(None).model_dump()
    data["server"]["port"] = 0
    data["model"] |= {"path": str(model_dir), "dtype": "float32" if stages else "auto"}
    data["media"] |= {"probe_processes": 1, "encode_timeout_ms": dict.fromkeys(("image", "video"), ENCODE_TIMEOUT_MS)}
    data["encoders"] |= {"replicas": 1, "modalities": None, "decode_processes": 2}
    data["workers"] |= {"replicas": 1, "num_blocks": 2048}
    for part in (stages.sections() if stages else {}, sections):
        for name, settings in part.items():
            data[name] |= settings
    return ClusterConfig.model_validate(data)


def on_ray(config: ClusterConfig, measure: Callable[[ChatTarget], Awaitable[T]]) -> T:
    """Starts a cluster on Ray, measures it and stops it."""
    from deploy.ray.runtime import run_cluster

    async def run(url: str, model: str) -> T:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits) as client:
            return await measure(ChatTarget(client, model))

    with run_cluster(config) as cluster:
        return asyncio.run(run(cluster.url, cluster.model_name))


def served_model(*, is_real: bool) -> Path:
    """Returns the directory of the model, whose parameters are random: a very small one for clusters of given stage
    times, and one of 180 million parameters for real compute."""
    return qwen2_5_vl_180m() if is_real else qwen2_5_vl_small()


# ------------------------------------------------------------ costs measured alone

SETTLE_S = 0.6
"""Members report within this time, and the router's metrics then contain what they did."""


class MediaCosts(NamedTuple):
    """Holds what the media of one kind of request take alone."""

    ready_s: float
    """Holds the time from sending until the first forward pass begins."""
    unit_s: float
    """Holds the time of the forward pass of one unit."""
    transfer_s: float
    num_units: int

    def units(self) -> tuple[IdealUnit, ...]:
        return (IdealUnit(self.ready_s, self.unit_s, self.transfer_s),) * self.num_units


@dataclass(frozen=True, slots=True)
class AloneCosts:
    """Holds what stages cost when nothing else runs. They are frozen: what a bench measures later changes nothing."""

    base_s: float
    """Holds the time of a text request besides its tokens: HTTP, router, Ray and a step."""
    s_per_token: float
    """Holds the time per weighted token (`fabric.contracts.learned_cost`)."""
    scale_tokens: float
    media: Mapping[str, MediaCosts]
    """Maps the name of a kind to the costs of its media."""

    def prefill_s(self, num_tokens: int, context: int = 0) -> float:
        return self.s_per_token * weighted_tokens(num_tokens, context, self.scale_tokens)

    def num_tokens_of(self, seconds: float) -> int:
        """Returns how many tokens of text at the beginning of a prompt take about this long."""
        num_tokens = 1
        while self.prefill_s(num_tokens + 1) <= seconds:
            num_tokens += 1
        return num_tokens

    def ideal(self, chat: TimedChat, pattern: str, arrival_s: float = 0.0) -> IdealRequest:
        """Returns what this request takes at best; `pattern` names the costs of its media. All tokens that are not of
        media count as text in front of them, which makes the bound lower than it is."""
        costs = self.media.get(pattern)
        units = costs.units() if costs else ()
        num_media = sum(each["num_tokens"] for each in chat.trace["media"])
        at = chat.num_tokens - num_media
        spans = [IdealSpan(self.prefill_s(at))]
        for unit in range(len(units)):
            end = at + num_media // len(units)
            spans.append(IdealSpan(self.prefill_s(end - at, at), unit))
            at = end
        return IdealRequest(arrival_s, units, tuple(spans), self.base_s)


async def measure_alone(
    target: ChatTarget, maker: ChatMaker, patterns: Sequence[ChatKind], hidden_size: int, num_runs: int = 3
) -> AloneCosts:
    """Measures texts of two lengths, and the media of each pattern, one request at a time. A pattern is a kind of
    request with nothing in front of its media. The fastest of several runs counts, because a pause is no cost."""
    scale = context_scale_tokens(hidden_size)
    short, long = ChatKind("short text", num_words=16, max_tokens=1), ChatKind("long text", num_words=256, max_tokens=1)
    await send_each(target, maker, [short, long, *patterns])
    chats = await send_each(target, maker, [short, long] * num_runs)
    points = []
    for kind in (short, long):
        same = [chat for chat in chats if chat.kind == kind]
        points.append((weighted_tokens(same[0].num_tokens, 0, scale), min(chat.ttft_s for chat in same)))
    (few, few_s), (many, many_s) = points
    s_per_token = max(many_s - few_s, 0.0) / (many - few)
    media = {}
    for pattern in patterns:
        runs = [await _media_alone(target, maker, pattern) for _ in range(num_runs)]
        media[pattern.name] = MediaCosts(*(min(each) for each in zip(*runs, strict=True)))
    return AloneCosts(max(few_s - s_per_token * few, 0.0), s_per_token, scale, media)


SAME_PASS_S = 0.001
"""Units whose encoding ends within this time were in one forward pass; the passes of these benches take longer."""


async def _media_alone(target: ChatTarget, maker: ChatMaker, pattern: ChatKind) -> MediaCosts:
    await asyncio.sleep(SETTLE_S)
    before = await target.metrics()
    (chat,) = await send_each(target, maker, [pattern])
    await asyncio.sleep(SETTLE_S)
    after = await target.metrics()
    units = after["weft_encoder_batch_units_total"] - before["weft_encoder_batch_units_total"]
    forward_s = after["weft_encoder_forward_seconds_total"] - before["weft_encoder_forward_seconds_total"]
    unit_s = forward_s / units
    encoded_s, landed_s = chat.encoded_s(), chat.landings_s()[0]
    # A pass may contain several units, which are encoded at one moment.
    num_first = sum(each - encoded_s[0] < SAME_PASS_S for each in encoded_s)
    ready_s = max(encoded_s[0] - num_first * unit_s, 0.0)
    return MediaCosts(ready_s, unit_s, max(landed_s - encoded_s[0], 0.0), round(units))
