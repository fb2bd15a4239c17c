"""Checks, for any failures and under each policy, that a request gets one terminal event, that the answer is about the
media that it says it was shown, that an error comes only where the policy leaves no alternative, and that nothing is
left behind."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_chats import chat, expected, read, text
from router_media_fakes import SOUND, audio, image, media_cluster, video

from deploy.testing import FakeCluster
from fabric.contracts import EncodeFailed, ErrorInfo, GenerateRequest, MediaItem
from modalities.family import MediaOptions
from router.prompt import Prompt as RouterPrompt

KIND_TO_PART = {
    "picture": lambda seed: image(seed, width=128, height=128),
    "video": lambda seed: video(frames=60 + seed),
    "heard": lambda seed: video(frames=60 + seed, sound=SOUND),
    "sound": lambda seed: audio(1 + seed),
}
NEVER, WHOLE, ALWAYS = 0, 1, 2
"""Says when the encoding of an item fails; `WHOLE` means that it fails unless the item is reduced."""


def reduction(item: MediaItem) -> int:
    return MediaOptions.decode(item.options).reduction


async def serve(kinds: list[str], faults: dict[tuple[str, str], int], policy: str) -> bool:
    """Returns whether the request was answered; it must be unless its policy permits no answer."""

    def fails(item: MediaItem) -> ErrorInfo | None:
        fault = faults.get((item.part, item.modality), NEVER)
        is_bad = fault == ALWAYS or (fault == WHOLE and not reduction(item))
        return ErrorInfo("encode_failed", "broke") if is_bad else None

    async with media_cluster(num_workers=2, num_encoders=2) as cluster:
        for encoder in cluster.encoders:
            encoder.fails = fails
        content = [text("look"), *(KIND_TO_PART[kind](seed) for seed, kind in enumerate(kinds))]
        stream = await cluster.service.open(chat(content, on_encode_failure=policy))
        shown = {(item.part, item.modality): item for item in first_prompt(cluster).media}
        async with asyncio.timeout(20):
            if is_hopeless(shown, faults, policy):
                with pytest.raises(EncodeFailed):
                    await read(stream)
                return False
            texts, _, _ = await read(stream)
        assert texts == [expected(cluster)]
        last = {(item.part, item.modality): item for item in last_prompt(cluster).media}
        told = {tuple(step.key): step.action for step in stream.degraded}
        for key, item in shown.items():
            is_video_gone = told.get((item.part, "video")) == "removed"
            assert (key not in last) == (told.get(key) == "removed" or is_video_gone)
            if key in last:
                assert (reduction(last[key]) > 0) == (told.get(key) == "reduced")
                assert fails(last[key]) is None
        assert all(faults.get(key, NEVER) != NEVER for key in told), "nothing was taken away that did not fail"
    return True


def is_hopeless(shown: dict[tuple[str, str], MediaItem], faults: dict[tuple[str, str], int], policy: str) -> bool:
    mine = [(key[1], faults[key]) for key in shown if faults.get(key, NEVER) != NEVER]
    if policy == "error":
        return bool(mine)
    return policy == "reduce" and any(fault == ALWAYS or modality == "audio" for modality, fault in mine)


def prompts(cluster: FakeCluster) -> list[GenerateRequest]:
    return sorted((r for worker in cluster.workers for r in worker.requests), key=lambda request: request.attempt)


def first_prompt(cluster: FakeCluster) -> RouterPrompt:
    (run,) = cluster.service._runs.values()
    return run._prompt


def last_prompt(cluster: FakeCluster) -> GenerateRequest:
    return prompts(cluster)[-1]


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[str], dict[tuple[str, str], int]]:
    kinds = draw(st.lists(st.sampled_from(sorted(KIND_TO_PART)), min_size=1, max_size=3))
    faults: dict[tuple[str, str], int] = {}
    for at in range(len(kinds)):
        for modality in ("image", "video", "audio"):
            fault = draw(st.sampled_from([NEVER, NEVER, WHOLE, ALWAYS]))
            faults[f"messages.0.content.{at + 1}", modality] = fault
    return kinds, faults


@settings(deadline=None, max_examples=40)
@given(request=requests(), policy=st.sampled_from(["error", "reduce", "text_only"]))
def test_an_answer_says_what_it_is_about(request: tuple[list[str], dict[tuple[str, str], int]], policy: str) -> None:
    has_answer = asyncio.run(serve(*request, policy))
    assert has_answer or policy != "text_only"
