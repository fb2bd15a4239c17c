"""Makes requests of vLLM's engine core out of sequences of Weft.

A request holds the prompt, the tokens that a former attempt has sent as outputs of its own, as a request that vLLM has
preempted, and one entry per media item: its hash, its place and its grid. It holds no pixels, because the features come
from the encoder pool. A request under a LoRA adapter names it by a number that is the same in every worker.
`check_supported` refuses what vLLM can't do for us before anything is queued.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
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
from llm_workers.vllm_engine.rank_extension import DELTA, POSITIONS, SENT
from llm_workers.vllm_engine.sequence_book import BookedChoice

MODALITIES = ("image", "video", "audio")
"""Lists the modalities that a vLLM worker takes."""


Adapters = Mapping[str, LoRARequest]
"""Maps the name of each LoRA adapter to what names it to vLLM."""


def adapters_of(name_to_directory: Mapping[str, str]) -> Adapters:
    """Returns what names each adapter to vLLM. An adapter keeps its number, whichever order the names come in."""
    names = sorted(name_to_directory)
    return {name: LoRARequest(name, number, name_to_directory[name]) for number, name in enumerate(names, 1)}


def check_supported(request: GenerateRequest, adapters: Adapters) -> None:
    """Raises InvalidRequest for what a vLLM worker can't do: embeddings, speech, and media of other kinds. Raises
    ModelNotFound for an adapter that it does not have."""
    if request.adapter and request.adapter not in adapters:
        raise ModelNotFound(f"this worker has no adapter `{request.adapter}`", param="model")
    if request.prompt_outputs.pooling:
        raise InvalidRequest("workers.engine is vllm, which gives no embeddings", param="model")
    if request.next_stage is not None or request.side_names:
        raise InvalidRequest("workers.engine is vllm, which does not hand over what speech needs", param="modalities")
    for item in request.media:
        if item.modality not in MODALITIES:
            raise InvalidRequest(f"workers.engine is vllm, which takes no {item.modality} here", param=item.part)


def engine_request(choice: BookedChoice, block_size: int, adapters: Adapters) -> Request:
    """Returns the request for one sequence."""
    request, sequence = choice.request, choice.sequence
    sent = sequence.tokens.view(sequence.num_prompt).tolist()
    made = Request(
        request_id=choice.name,
        prompt_token_ids=sequence.tokens.view(0, sequence.num_prompt).tolist(),
        sampling_params=sampling(request, sequence, sent),
        pooling_params=None,
        arrival_time=request.age[0],
        mm_features=features(request, sequence),
        lora_request=adapters.get(request.adapter),
        cache_salt=request.cache_salt or None,
        priority=request.priority,
        block_hasher=block_hasher(sequence.layout, block_size),
    )
    if sent:
        made.append_output_token_ids(sent)
        made.take_prefill_stats()  # vLLM takes none of a preempted request, whose outputs may be in the prefix cache.
    return made


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


def sampling(request: GenerateRequest, sequence: Sequence, sent: list[int]) -> VllmSampling:
    """Returns how the next tokens of the sequence are drawn, after those that were `sent`. Text is none of the worker's
    business, so vLLM neither detokenises nor looks for stop strings."""
    ours, stop = request.sampling, request.stop
    stop_ids = stop.stop_token_ids if stop.ignore_eos else (*stop.eos_token_ids, *stop.stop_token_ids)
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
        max_tokens=max(stop.max_tokens, len(sent) + 1),
        min_tokens=0 if ours.grammar else min(stop.min_tokens, stop.max_tokens),
        stop_token_ids=list(stop_ids),
        ignore_eos=True,
        detokenize=False,
        extra_args={SENT: sent} if sent else None,
    )


@dataclass(frozen=True, eq=False)
class PieceOfFeature(FeaturePlace):  # type: ignore[misc]
    """Is the place of rows `[first_row, first_row + length)` of a medium that has `num_rows` rows. vLLM expects the
    rows of a medium in order and no other medium among them; a video with its sound track is therefore a sequence of
    such pieces, which share one entry of the encoder cache. A piece has a mask (`is_embed`), because vLLM asks only
    places with a mask for their rows."""

    first_row: int = 0
    num_rows: int = 0

    def get_num_embeds(self) -> int:
        """Returns the size of the whole entry in the encoder cache."""
        return self.num_rows

    def get_embeds_indices_in_range(self, start_idx: int, end_idx: int) -> tuple[int, int]:
        """Returns the rows of the entry that stand at `[start_idx, end_idx)` of the piece."""
        return self.first_row + start_idx, self.first_row + end_idx


def features(request: GenerateRequest, sequence: Sequence) -> list[MultiModalFeatureSpec]:
    """Returns the media of the prompt in its order: one entry for a medium whose rows stand in order with only text
    among them, and otherwise one for each run of rows. The first entry carries the positions of the whole prompt
    (`rank_extension`)."""
    item_to_runs: dict[int, list[PlaceholderRange]] = {}
    for run in request.placeholders:
        item_to_runs.setdefault(run.item, []).append(run)
    placed = [
        (place, request.media[index])
        for index, runs in item_to_runs.items()
        for place in _places(request.media[index], runs, request.placeholders)
    ]
    placed.sort(key=lambda each: each[0].offset)
    entries: list[MultiModalFeatureSpec] = []
    for place, item in placed:
        values = {f"{item.modality}_grid_thw": torch.tensor(item.grid)}
        if not entries and sequence.num_axes > 1:
            values[POSITIONS] = torch.from_numpy(sequence.positions(0, sequence.num_tokens).copy())
            values[DELTA] = torch.tensor(sequence.position_delta)
        field = MultiModalBatchedField(keep_on_cpu=True)
        data = MultiModalKwargsItem({key: MultiModalFieldElem(data=each, field=field) for key, each in values.items()})
        entries.append(MultiModalFeatureSpec(data, item.modality, item.mm_hash, place, item.mm_hash))
    return entries


def _places(
    item: MediaItem, runs: SequenceOf[PlaceholderRange], all_runs: SequenceOf[PlaceholderRange]
) -> list[FeaturePlace]:
    """Returns the place of an item whose rows stand in `runs`, or one place for each run if the rows are out of order
    or if another item of `all_runs` stands among them."""
    first_rows = [0, *accumulate(item.unit_tokens)]
    firsts = [first_rows[run.unit] + run.row for run in runs]
    start, end, num_rows = runs[0].offset, runs[-1].end, first_rows[-1]
    is_in_order = (
        firsts == [0, *accumulate(run.length for run in runs)][:-1] and sum(run.length for run in runs) == num_rows
    )
    if not is_in_order or any(run.item != item.index and start < run.offset < end for run in all_runs):
        return [
            PieceOfFeature(run.offset, run.length, torch.ones(run.length, dtype=torch.bool), first, num_rows)
            for run, first in zip(runs, firsts, strict=True)
        ]
    if end - start == num_rows:
        return [FeaturePlace(start, num_rows)]
    is_embedded = torch.zeros(end - start, dtype=torch.bool)
    for run in runs:
        is_embedded[run.offset - start : run.end - start] = True
    return [FeaturePlace(start, end - start, is_embedded)]
