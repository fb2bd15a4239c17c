"""Makes requests of vLLM's engine core out of sequences of Weft.

A request holds the prompt, with the tokens that a former attempt has sent at its end, and one entry per media item: its
hash, its place and its grid, from which vLLM computes positions. It holds no pixels, because the features come from the
encoder pool. A request under a LoRA adapter names it by a number that is the same in every worker. `check_supported`
refuses what vLLM can't do for us before anything is queued.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import accumulate

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)
from vllm.multimodal.inputs import PlaceholderRange as FeaturePlace
from vllm.sampling_params import SamplingParams as VllmSampling
from vllm.v1.request import Request

from fabric.contracts import (
    GenerateRequest,
    InvalidRequest,
    MediaItem,
    MemberId,
    ModelNotFound,
    PlaceholderRange,
    RequestId,
    SamplingParams,
    SequenceId,
    StopConditions,
)
from llm_workers.scheduling import Sequence
from llm_workers.vllm_engine.block_mirror import block_hasher
from llm_workers.vllm_engine.rank_extension import DELTA, POSITIONS
from llm_workers.vllm_engine.sequence_book import BookedChoice

PICTURE_ARCHITECTURES = frozenset(
    {
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }
)
"""Lists the architectures whose pictures and videos a vLLM worker takes."""


Adapters = Mapping[str, LoRARequest]
"""Maps the name of each LoRA adapter to what names it to vLLM."""


def adapters_of(name_to_directory: Mapping[str, str]) -> Adapters:
    """Returns what names each adapter to vLLM. An adapter keeps its number, whichever order the names come in."""
    names = sorted(name_to_directory)
    return {name: LoRARequest(name, number, name_to_directory[name]) for number, name in enumerate(names, 1)}


def check_supported(request: GenerateRequest, adapters: Adapters) -> None:
    """Raises InvalidRequest for what a vLLM worker can't do: embeddings, speech, and sound inside a video. Raises
    ModelNotFound for an adapter that it does not have."""
    if request.adapter and request.adapter not in adapters:
        raise ModelNotFound(f"this worker has no adapter `{request.adapter}`", param="model")
    if request.prompt_outputs.pooling:
        raise InvalidRequest("workers.engine is vllm, which gives no embeddings", param="model")
    if request.next_stage is not None or request.side_names:
        raise InvalidRequest("workers.engine is vllm, which does not hand over what speech needs", param="modalities")
    for item in request.media:
        if item.anchor >= 0 or item.modality not in ("image", "video"):
            raise InvalidRequest(f"workers.engine is vllm, which takes no {item.modality} here", param=item.part)


def engine_request(choice: BookedChoice, block_size: int, adapters: Adapters) -> Request:
    """Returns the request for one sequence."""
    request, sequence = choice.request, choice.sequence
    return Request(
        request_id=choice.name,
        prompt_token_ids=sequence.tokens.view().tolist(),
        sampling_params=sampling(request, sequence),
        pooling_params=None,
        arrival_time=request.age[0],
        mm_features=features(request, sequence),
        lora_request=adapters.get(request.adapter),
        cache_salt=request.cache_salt or None,
        priority=request.priority,
        block_hasher=block_hasher(sequence.layout, block_size),
    )


def warm_up_request(number: int, num_tokens: int) -> GenerateRequest:
    """Returns a request of a prompt that is computed at boot, after which two tokens are drawn. Prompts with different
    numbers share no prefix. The first one wants log-probabilities, because vLLM compiles code for them when they are
    first wanted."""
    return GenerateRequest(
        request_id=RequestId(f"warm-up-{number}"),
        attempt=0,
        router_id=MemberId(""),
        router_address="",
        token_ids=(number, *(0,) * (num_tokens - 1)),
        placeholders=(),
        media=(),
        sampling=SamplingParams(temperature=0.0, num_top_logprobs=None if number else 1),
        stop=StopConditions(2),
        age=(0.0, ""),
    )


def request_name(sequence_id: SequenceId) -> str:
    """Returns how vLLM calls a sequence. Attempts and choices come in numbers of fixed width, because vLLM orders
    requests of one age by their names."""
    return f"{sequence_id.request_id}/{sequence_id.attempt:04d}/{sequence_id.choice:04d}"


def sampling(request: GenerateRequest, sequence: Sequence) -> VllmSampling:
    """Returns how the next tokens of the sequence are drawn. Text is none of the worker's business, so vLLM neither
    detokenises nor looks for stop strings."""
    ours, stop = request.sampling, request.stop
    stop_ids = stop.stop_token_ids if stop.ignore_eos else (*stop.eos_token_ids, *stop.stop_token_ids)
    num_sent = sequence.num_generated
    prompt_logprobs = request.prompt_outputs.num_top_logprobs
    return VllmSampling(
        temperature=ours.temperature,
        top_p=ours.top_p,
        top_k=ours.top_k,
        min_p=ours.min_p,
        seed=(ours.seed + sequence.sequence_id.choice) % 2**63 if ours.is_seed_given else None,
        repetition_penalty=ours.repetition_penalty,
        presence_penalty=ours.presence_penalty,
        frequency_penalty=ours.frequency_penalty,
        logit_bias=dict(ours.logit_bias) or None,
        logprobs=ours.num_top_logprobs,
        prompt_logprobs=prompt_logprobs,
        max_tokens=max(stop.max_tokens - num_sent, 1),
        min_tokens=0 if ours.grammar else max(stop.min_tokens - num_sent, 0),
        stop_token_ids=list(stop_ids),
        ignore_eos=True,
        detokenize=False,
    )


def features(request: GenerateRequest, sequence: Sequence) -> list[MultiModalFeatureSpec]:
    """Returns one entry per media item, in the order of the prompt. The first one carries the positions of the whole
    prompt (`rank_extension`)."""
    item_to_runs: dict[int, list[PlaceholderRange]] = {}
    for run in request.placeholders:
        item_to_runs.setdefault(run.item, []).append(run)
    entries: list[MultiModalFeatureSpec] = []
    for index, runs in item_to_runs.items():
        item = request.media[index]
        values = {f"{item.modality}_grid_thw": torch.tensor(item.grid)}
        if not entries and sequence.num_axes > 1:
            values[POSITIONS] = torch.from_numpy(sequence.positions(0, sequence.num_tokens).copy())
            values[DELTA] = torch.tensor(sequence.position_delta)
        field = MultiModalBatchedField(keep_on_cpu=True)
        data = MultiModalKwargsItem({key: MultiModalFieldElem(data=each, field=field) for key, each in values.items()})
        entries.append(MultiModalFeatureSpec(data, item.modality, item.mm_hash, _place(item, runs), item.mm_hash))
    return entries


def _place(item: MediaItem, runs: SequenceOf[PlaceholderRange]) -> FeaturePlace:
    """Returns the place of an item whose rows stand in `runs`. Raises InvalidRequest if the rows do not follow each
    other in the prompt."""
    first_rows, num_rows = [0, *accumulate(item.unit_tokens)], 0
    for run in runs:
        if first_rows[run.unit] + run.row != num_rows:
            raise InvalidRequest("workers.engine is vllm, which takes the rows of a medium in order", param=item.part)
        num_rows += run.length
    start, end = runs[0].offset, runs[-1].end
    if end - start == num_rows:
        return FeaturePlace(start, num_rows)
    is_embedded = torch.zeros(end - start, dtype=torch.bool)
    for run in runs:
        is_embedded[run.offset - start : run.end - start] = True
    return FeaturePlace(start, end - start, is_embedded)
