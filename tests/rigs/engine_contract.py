"""Says what every engine of a worker must do, as checks that run on a started worker (`ContractRig`).

A worker is real except for its peers: a router that records what it is sent, and an encoder that publishes features
when a check asks for it. `CHECKS` lists the checks. Each begins and ends with an idle worker; what one leaves in the
prefix cache, others may find there, so each uses prompts of its own. Answers are compared with transformers'.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, Protocol

import torch
from contract_model import ContractModel, ContractPrompt, Film
from worker_rig import ENCODER, ROUTER, Recorder

from fabric.contracts import (
    AbortAttempt,
    FeatureNeeded,
    GenerateRequest,
    GenerateResult,
    KvEvents,
    KvSnapshot,
    RequestId,
    RouterHeartbeat,
    SamplingParams,
    SnapshotRequest,
    StopConditions,
    TokenFrames,
    UnitReady,
    split_hashes,
)
from fabric.transport import FeatureSink, FeatureSource, LocalHub, LocalPlane
from kv_index import prompt_block_hashes
from llm_workers.worker_service import WorkerService
from modalities.torch_dtypes import dtype_name

GREEDY = SamplingParams(temperature=0.0)
LATE_S = 10.0
"""Limits how long a check waits for a state. It is long, because the machine may be busy."""


class WorkerParts(NamedTuple):
    """Holds a worker that is not started, and both ends of its feature channel."""

    service: WorkerService
    sink: FeatureSink
    source: FeatureSource


class MakeWorker(Protocol):
    """Builds a worker of the engine that is tested."""

    def __call__(self, model: ContractModel, plane: LocalPlane, inbox_bytes: int, **config: Any) -> WorkerParts: ...


class ContractRig:
    """Holds a worker and its peers."""

    def __init__(self, model: ContractModel, make_worker: MakeWorker, inbox_bytes: int, **config: Any) -> None:
        self.model = model
        hub = LocalHub()
        self.router, self.encoder = Recorder(), Recorder()
        self.router_plane = LocalPlane(hub, "local://router")
        self.encoder_plane = LocalPlane(hub, "local://encoder")
        self.worker_plane = LocalPlane(hub, "local://worker")
        self.service, self.sink, self.source = make_worker(model, self.worker_plane, inbox_bytes, **config)
        self._ids = itertools.count()
        self._texts = itertools.count(60)

    def text(self, num_tokens: int) -> tuple[int, ...]:
        """Returns a text that no other check has used."""
        return self.model.text(num_tokens, first=next(self._texts) * 7 % 900)

    def request(self, of: ContractPrompt, num_tokens: int = 6, **changes: Any) -> GenerateRequest:
        number = next(self._ids)
        fields = {
            "request_id": RequestId(f"req-{number}"),
            "attempt": 0,
            "router_id": ROUTER,
            "router_address": self.router_plane.address,
            "token_ids": of.token_ids,
            "placeholders": of.placeholders,
            "media": of.media,
            "sampling": GREEDY,
            "stop": StopConditions(num_tokens),
            "age": (float(number), f"req-{number}"),
            "dispatched_items": tuple(range(len(of.media))),
        }
        return GenerateRequest(**(fields | changes))

    def publish(
        self, request: GenerateRequest, of: ContractPrompt, index: int = 0, tensor: torch.Tensor | None = None
    ) -> None:
        """Announces the feature of unit `index` to the worker, as an encoder does."""
        tensor = self.model.feature(of, index) if tensor is None else tensor
        payload = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        slot = self.source.allocate(payload.nbytes)
        slot.buffer[:] = payload
        ticket = self.source.ticket(slot, tuple(tensor.shape), dtype_name(tensor.dtype), 60.0)
        ready = UnitReady(
            ENCODER, self.encoder_plane.address, request.request_id, request.attempt, of.units[index], ticket
        )
        assert self.encoder_plane.send(self.worker_plane.address, ready)

    def call(self, request: GenerateRequest) -> asyncio.Task[GenerateResult]:
        return asyncio.ensure_future(self.service.generate(request))

    async def run(self, request: GenerateRequest, of: ContractPrompt) -> GenerateResult:
        """Generates, with all features published at once."""
        call = self.call(request)
        for index in range(len(of.units)):
            self.publish(request, of, index)
        return await asyncio.wait_for(call, LATE_S)

    def tokens(self, request: GenerateRequest, choice: int = 0) -> list[int]:
        return self.router.tokens[request.request_id, request.attempt, choice]

    def needed(self, request: GenerateRequest) -> list[FeatureNeeded]:
        return [each for each in self.router.needed if each.request_id == request.request_id]

    async def until(self, is_true: Callable[[], object]) -> None:
        async with asyncio.timeout(LATE_S):
            while not is_true():  # noqa: ASYNC110 - several components share this state, which has no event
                await asyncio.sleep(0.002)

    async def at_doorstep(self, num_sequences: int = 1) -> None:
        await self.until(lambda: self.service.report().engine.num_at_doorstep == num_sequences)

    async def assert_idle(self) -> None:
        """Waits until the worker holds no sequence, block, slot or announcement."""

        def is_idle() -> bool:
            stats = self.service.report().engine
            gauges = (stats.num_running, stats.num_waiting, stats.kv_blocks_used, stats.num_features)
            return not any(gauges) and self.sink.usage().used_bytes == 0 and self.service.num_units_held == 0

        await self.until(is_idle)


@contextlib.asynccontextmanager
async def contract_rig(
    model: ContractModel, make_worker: MakeWorker, inbox_bytes: int = 1 << 22, **config: Any
) -> AsyncIterator[ContractRig]:
    """Yields a started worker."""
    made = ContractRig(model, make_worker, inbox_bytes, **config)
    made.router_plane.start(made.router)
    made.encoder_plane.start(made.encoder)
    await made.service.start()
    try:
        yield made
    finally:
        await made.service.stop()
        made.sink.close()
        made.source.close()
        for plane in (made.router_plane, made.encoder_plane, made.worker_plane):
            plane.close()


# ---------------------------------------------------------------- answers


async def check_a_text(r: ContractRig) -> None:
    of = r.model.prompt(r.text(70))
    request = r.request(of)
    result = await r.run(request, of)
    assert (result.error, result.num_cached_tokens) == (None, 0)
    assert r.tokens(request) == r.model.answer(of, 6)
    assert [(each.finish_reason, each.num_tokens) for each in result.choices] == [("length", 6)]
    await r.assert_idle()


async def check_text_ahead_of_a_picture_is_computed_while_it_is_encoded(r: ContractRig) -> None:
    of = r.model.prompt(r.text(40), 1, r.text(5))
    request = r.request(of)
    call = r.call(request)
    await r.at_doorstep()
    assert r.tokens(request) == []
    r.publish(request, of)
    result = await call
    assert r.tokens(request) == r.model.answer(of, 6)
    prefills = [event for event in result.trace if event.name == "prefill"]
    assert (prefills[0].detail["start"], prefills[0].detail["end"]) == (0, of.placeholders[0].offset)
    landed_s = next(event.at_s for event in result.trace if event.name == "unit_landed")
    assert prefills[0].at_s < landed_s <= prefills[-1].at_s
    assert result.held_s > 0
    await r.assert_idle()


async def check_several_pictures_in_any_order(r: ContractRig) -> None:
    for order in ((2, 0, 1), (1, 2, 0)):
        # An engine may keep pictures, so each order has its own.
        first = 60 + 3 * order[0]
        of = r.model.prompt(r.text(10), first, r.text(3), first + 1, r.text(8), first + 2, r.text(4))
        request = r.request(of)
        call = r.call(request)
        for index in order:
            await r.at_doorstep()
            r.publish(request, of, index)
        assert (await call).error is None
        assert r.tokens(request) == r.model.answer(of, 6)
    await r.assert_idle()


async def check_the_same_picture_again_is_found_in_the_prefix_cache(r: ContractRig) -> None:
    of = r.model.prompt(r.text(30), 5, r.text(40))
    for round_ in range(3):
        request = r.request(of, dispatched_items=(0,) if round_ == 0 else ())
        call = r.call(request)
        if round_ == 0:
            r.publish(request, of)
        result = await asyncio.wait_for(call, LATE_S)
        assert r.tokens(request) == r.model.answer(of, 6)
        assert (result.num_cached_tokens > of.placeholders[-1].end) == (round_ > 0)
        assert r.needed(request) == []
    await r.assert_idle()


async def check_a_prefix_that_ends_inside_a_picture(r: ContractRig) -> None:
    """The tokens of the picture that are not covered need its feature, the whole of which the encoder makes."""
    block = r.service.kv_scheme.block_size
    of = r.model.prompt(r.text(block - 8), 6, r.text(6))
    assert of.placeholders[0].offset < block < of.placeholders[0].end
    for round_ in range(2):
        request = r.request(of)
        result = await r.run(request, of)
        assert r.tokens(request) == r.model.answer(of, 6)
        assert result.num_cached_tokens == (block if round_ else 0)
    await r.assert_idle()


async def check_a_prefix_that_ends_at_a_picture(r: ContractRig) -> None:
    block = r.service.kv_scheme.block_size
    text = r.text(block - 1)
    for seed in (7, 8):
        of = r.model.prompt(text, seed, text[:9])
        assert of.placeholders[0].offset == block
        request = r.request(of)
        result = await r.run(request, of)
        assert r.tokens(request) == r.model.answer(of, 6)
        assert result.num_cached_tokens == (block if seed == 8 else 0)
    await r.assert_idle()


async def check_two_pictures_at_one_place_are_told_apart(r: ContractRig) -> None:
    text = r.text(20)
    of = {seed: r.model.prompt(text, seed, text) for seed in (9, 10)}
    for seed in (9, 10, 9, 10):
        request = r.request(of[seed])
        await r.run(request, of[seed])
        assert r.tokens(request) == r.model.answer(of[seed], 6)
    await r.assert_idle()


async def check_many_requests_at_once(r: ContractRig) -> None:
    prompts = [
        r.model.prompt(r.text(30 + index), *((20 + index,) if index % 2 else ()), r.text(6)) for index in range(8)
    ]
    requests = [r.request(of) for of in prompts]
    calls = [r.call(request) for request in requests]
    for request, of in reversed(list(zip(requests, prompts, strict=True))):
        if of.media:
            await asyncio.sleep(0)
            r.publish(request, of)
    await asyncio.gather(*calls)
    for request, of in zip(requests, prompts, strict=True):
        assert r.tokens(request) == r.model.answer(of, 6)
    await r.assert_idle()


async def check_a_video_is_computed_unit_by_unit(r: ContractRig) -> None:
    of = r.model.prompt(r.text(12), Film(70), r.text(6))
    assert len(of.units) > 1
    request = r.request(of)
    before = r.service.report().engine.prompt_tokens_computed
    call = r.call(request)
    for index in range(len(of.units)):
        first = next(run.offset for run in of.placeholders if run.unit == index)
        await r.until(lambda first=first: r.service.report().engine.prompt_tokens_computed - before >= first)
        await r.at_doorstep()
        r.publish(request, of, index)
    result = await call
    assert r.tokens(request) == r.model.answer(of, 6)
    ends = [event.detail["end"] for event in result.trace if event.name == "prefill"]
    assert len(ends) > len(of.units), "the units were not computed one by one"
    await r.assert_idle()


async def check_a_video_beside_a_picture(r: ContractRig) -> None:
    of = r.model.prompt(80, r.text(4), Film(90), r.text(9), 81)
    for round_ in range(2):
        request = r.request(of, cache_salt=f"{round_}")
        await r.run(request, of)
        assert r.tokens(request) == r.model.answer(of, 6)
    await r.assert_idle()


# ---------------------------------------------------------------- features that are late, wrong or missing


async def check_a_text_passes_a_request_that_waits(r: ContractRig) -> None:
    waiting = [r.model.prompt(11 + index, r.text(5)) for index in range(3)]
    requests = [r.request(of) for of in waiting]
    calls = [r.call(request) for request in requests]
    await r.at_doorstep(3)
    of = r.model.prompt(r.text(12))
    request = r.request(of)
    assert (await r.run(request, of)).error is None
    assert r.tokens(request) == r.model.answer(of, 6)
    assert not any(call.done() for call in calls)
    for one, prompt in zip(requests, waiting, strict=True):
        r.publish(one, prompt)
    await asyncio.gather(*calls)
    await r.assert_idle()


async def check_a_feature_that_is_needed_after_all(r: ContractRig) -> None:
    """The router thought that the prefix cache covers the picture."""
    of = r.model.prompt(r.text(10), 14, r.text(5))
    request = r.request(of, dispatched_items=())
    call = r.call(request)
    await r.until(lambda: r.needed(request))
    (needed,) = r.needed(request)
    assert (needed.units, needed.reason) == (tuple(of.media[0].unit_keys()), "not_covered")
    r.publish(request, of)
    assert (await call).error is None
    assert r.tokens(request) == r.model.answer(of, 6)
    await r.assert_idle()


async def check_a_feature_of_a_wrong_shape_fails_its_request_alone(r: ContractRig) -> None:
    text, of = r.model.prompt(r.text(20)), r.model.prompt(r.text(10), 15)
    request, other = r.request(of), r.request(text, 30)
    calls = [r.call(request), r.call(other)]
    r.publish(request, of, tensor=r.model.feature(of, 0)[:, :, :32])
    results = await asyncio.gather(*calls)
    assert results[0].error is not None
    assert results[0].error.code == "feature_mismatch"
    assert r.tokens(other) == r.model.answer(text, 30)
    await r.assert_idle()


async def check_an_abort_at_the_doorstep_frees_everything(r: ContractRig) -> None:
    of = r.model.prompt(r.text(40), 16)
    for how in ("message", "cancel"):
        request = r.request(of, cache_salt=how)
        call = r.call(request)
        await r.at_doorstep()
        if how == "message":
            r.router_plane.send(r.worker_plane.address, AbortAttempt(request.request_id, request.attempt))
            assert [each.finish_reason for each in (await call).choices] == ["abort"]
        else:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await r.assert_idle()


async def check_a_feature_that_never_comes_harms_no_other(r: ContractRig) -> None:
    of = r.model.prompt(r.text(4), 17)
    call = r.call(r.request(of))
    for _ in range(3):
        text = r.model.prompt(r.text(25))
        request = r.request(text)
        await r.run(request, text)
        assert r.tokens(request) == r.model.answer(text, 6)
    assert not call.done()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await r.assert_idle()


# ---------------------------------------------------------------- what a request may carry


async def check_choices_share_the_prompt(r: ContractRig) -> None:
    of = r.model.prompt(r.text(40), 18, r.text(20))
    request = r.request(of, num_choices=3)
    result = await r.run(request, of)
    for choice in range(3):
        assert r.tokens(request, choice) == r.model.answer(of, 6)
    assert [each.choice for each in result.choices] == [0, 1, 2]
    computed = sum(event.detail["end"] - event.detail["start"] for event in result.trace if event.name == "prefill")
    assert computed < 2 * len(of.token_ids), "each choice has computed the prompt"
    await r.assert_idle()


async def check_ids_and_counts_end_an_answer(r: ContractRig) -> None:
    of = r.model.prompt(r.text(21))
    answer = r.model.answer(of, 12)
    third = next(index for index in range(2, 12) if answer[index] not in answer[:index])
    stop = StopConditions(12, stop_token_ids=(answer[third],))
    request = r.request(of, stop=stop)
    result = await r.run(request, of)
    assert r.tokens(request) == answer[: third + 1]
    assert result.choices[0].finish_reason == "stop"
    ignored = r.request(of, stop=StopConditions(12, eos_token_ids=(answer[third],), ignore_eos=True))
    await r.run(ignored, of)
    assert r.tokens(ignored) == answer
    late = r.request(of, stop=StopConditions(12, stop_token_ids=(answer[third],), min_tokens=third + 3))
    await r.run(late, of)
    assert len(r.tokens(late)) >= third + 3
    assert answer[third] not in r.tokens(late)[: third + 2]
    await r.assert_idle()


async def check_log_probabilities(r: ContractRig) -> None:
    of = r.model.prompt(r.text(19), 25, r.text(4))
    out = r.model.generate(of, 5)
    request = r.request(of, 5, sampling=SamplingParams(temperature=0.0, num_top_logprobs=3))
    await r.run(request, of)
    frames = [frame for each in r.router.of(TokenFrames) for frame in each.frames]
    found = [entry for frame in frames if frame.request_id == request.request_id for entry in frame.logprobs]
    assert len(found) == 5
    for entry, logits in zip(found, out.logits, strict=True):
        best = torch.log_softmax(logits[0].float(), -1).topk(3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([value for _, value in entry.top]), best.values, atol=2e-3, rtol=0)
        assert abs(entry.logprob - float(best.values[0])) < 2e-3
    await r.assert_idle()


async def check_bias_and_seeds(r: ContractRig) -> None:
    of = r.model.prompt(r.text(23))
    biased = r.request(of, sampling=SamplingParams(temperature=0.0, logit_bias=((77, 100.0),)))
    await r.run(biased, of)
    assert r.tokens(biased) == [77] * 6
    drawn = []
    for seed in (3, 3, 4):
        request = r.request(of, 12, sampling=SamplingParams(temperature=1.5, seed=seed, is_seed_given=True))
        await r.run(request, of)
        drawn.append(r.tokens(request))
    assert drawn[0] == drawn[1] != drawn[2]
    await r.assert_idle()


# ---------------------------------------------------------------- what the cluster hears


async def check_events_of_blocks_add_up_to_the_snapshot(r: ContractRig) -> None:
    r.router_plane.send(r.worker_plane.address, RouterHeartbeat(ROUTER, r.router_plane.address, 30.0))
    of = r.model.prompt(r.text(90), 26, r.text(30))
    await r.run(r.request(of), of)
    r.router_plane.send(r.worker_plane.address, SnapshotRequest(ROUTER, r.router_plane.address))
    await r.until(lambda: any(page.is_last for page in r.router.of(KvSnapshot)))
    snapshot = [
        block for page in r.router.of(KvSnapshot) for chain in page.chains for block in split_hashes(chain.hashes)
    ]
    hashes = split_hashes(prompt_block_hashes(r.service.kv_scheme, of.token_ids, of.placeholders, of.media))
    assert len(hashes) >= 2
    assert set(hashes) <= set(snapshot)
    assert len(snapshot) == len(set(snapshot))
    stored = [
        block
        for message in r.router.of(KvEvents)
        for event in message.events
        if type(event).__name__ == "BlocksStored"
        for block in split_hashes(event.hashes)
    ]
    assert set(hashes) <= set(stored)
    numbers = [message.first_seq for message in r.router.of(KvEvents)]
    assert numbers == sorted(numbers)
    await r.assert_idle()


async def check_reports_count(r: ContractRig) -> None:
    before = r.service.report().engine
    of = r.model.prompt(r.text(60))
    request = r.request(of)
    await r.run(request, of)
    await r.assert_idle()
    after = r.service.report()
    assert after.engine.prompt_tokens_computed - before.prompt_tokens_computed == 60
    assert after.engine.tokens_generated - before.tokens_generated == 6
    assert after.engine.steps > before.steps
    assert after.engine.kv_blocks_total > 4
    assert after.prefill_s_per_token > 0
    r.service.check_health()


async def check_a_burst_that_is_aborted_leaves_nothing(r: ContractRig) -> None:
    prompts = [r.model.prompt(r.text(30), 40 + index % 3, r.text(20)) for index in range(30)]
    requests = [r.request(of, 40) for of in prompts]
    calls = [r.call(request) for request in requests]
    for index, (request, of) in enumerate(zip(requests, prompts, strict=True)):
        if index % 2:
            r.publish(request, of)
    await r.until(lambda: any(r.tokens(request) for request in requests))
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await r.assert_idle()


CHECKS: list[Callable[[ContractRig], Awaitable[None]]] = [
    value for name, value in list(globals().items()) if name.startswith("check_")
]


# ---------------------------------------------------------------- checks of workers with little memory


async def check_preempted_requests_go_on(r: ContractRig) -> None:
    """Needs a worker whose blocks hold about two of these requests."""
    prompts = [r.model.prompt(r.text(20), 30 + index, r.text(10)) for index in range(4)]
    requests = [r.request(of, 60) for of in prompts]
    calls = [r.call(request) for request in requests]
    again: list[FeatureNeeded] = []

    def serve_again(message: FeatureNeeded) -> None:
        again.append(message)
        index = next(index for index, each in enumerate(requests) if each.request_id == message.request_id)
        r.publish(requests[index], prompts[index])

    r.router.on_needed = serve_again
    for request, of in zip(requests, prompts, strict=True):
        r.publish(request, of)
    await asyncio.wait_for(asyncio.gather(*calls), 6 * LATE_S)
    for request, of in zip(requests, prompts, strict=True):
        assert r.tokens(request) == r.model.answer(of, 60)
    assert r.service.report().engine.num_preemptions > 0
    await r.assert_idle()


async def check_an_inbox_with_room_for_one_feature_serves_many(r: ContractRig) -> None:
    of = r.model.prompt(r.text(10), 50, r.text(3), 51, r.text(3), 52)
    requests = [r.request(of, cache_salt=f"{index}") for index in range(3)]
    calls = [r.call(request) for request in requests]

    def serve_again(message: FeatureNeeded) -> None:
        request = next(each for each in requests if each.request_id == message.request_id)
        for unit in message.units:
            index = next(item.index for item in of.media if item.mm_hash == unit.mm_hash)
            r.publish(request, of, index)

    r.router.on_needed = serve_again
    for request in requests:
        for index in range(3):
            r.publish(request, of, index)
    await asyncio.wait_for(asyncio.gather(*calls), 6 * LATE_S)
    for request in requests:
        assert r.tokens(request) == r.model.answer(of, 6)
    await r.assert_idle()
