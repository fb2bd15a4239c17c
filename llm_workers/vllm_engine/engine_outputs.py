"""Turns what vLLM's engine core reports into plain values: tokens, log-probabilities, and events of the prefix
cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from fabric.contracts import BlockHash, PromptLogprobs, TokenLogprobs
from llm_workers.vllm_engine.block_mirror import BlockMirror
from llm_workers.vllm_engine.sequence_book import CoreOutput

_REASON_TO_NAME = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def core_outputs(client_to_outputs: Mapping[int, EngineCoreOutputs]) -> Iterator[CoreOutput]:
    """Yields what a step gives each request."""
    for outputs in client_to_outputs.values():
        for output in outputs.outputs:
            yield _core_output(output)


def _core_output(output: EngineCoreOutput) -> CoreOutput:
    reason, failure = output.finish_reason, ""
    if reason is not None and reason not in _REASON_TO_NAME:
        failure = f"vLLM has ended the request with the reason {reason}"
    return CoreOutput(
        output.request_id,
        tuple(output.new_token_ids),
        _token_logprobs(output.new_logprobs),
        _prompt_logprobs(output.new_prompt_logprobs_tensors),
        _REASON_TO_NAME.get(reason),
        failure,
    )


def _token_logprobs(lists: Any) -> tuple[TokenLogprobs, ...]:
    """Returns one entry per token: vLLM's rows have the drawn token, then the most probable ones."""
    if lists is None:
        return ()
    ids, values = lists.logprob_token_ids.tolist(), lists.logprobs.tolist()
    return tuple(
        TokenLogprobs(row_values[0], tuple(zip(row_ids[1:], row_values[1:], strict=True)))
        for row_ids, row_values in zip(ids, values, strict=True)
    )


def _prompt_logprobs(tensors: Any) -> PromptLogprobs | None:
    if tensors is None:
        return None
    token_ids = tensors.logprob_token_ids.numpy().astype("<i4")
    return PromptLogprobs(
        token_ids.shape[1] - 1,
        np.ascontiguousarray(token_ids).tobytes(),
        np.ascontiguousarray(tensors.logprobs.numpy().astype("<f4")).tobytes(),
        np.ascontiguousarray(tensors.selected_token_ranks.numpy().astype("<i4")).tobytes(),
    )


class BlockEventTaker:
    """Takes the place of vLLM's publisher of KV events, and hands them to the mirror. Events of further groups of
    layers, such as those with a sliding window, are left out: a router follows the blocks of the first group."""

    def __init__(self, mirror: BlockMirror) -> None:
        self._mirror = mirror

    def publish(self, batch: Any) -> None:
        self.take(batch.events)

    def take(self, events: Iterable[Any]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._mirror.clear()
            elif event.group_idx:
                continue
            elif isinstance(event, BlockStored):
                parent = event.parent_block_hash
                hashes = [BlockHash(each) for each in event.block_hashes]
                self._mirror.store(None if parent is None else BlockHash(parent), hashes)
            elif isinstance(event, BlockRemoved):
                self._mirror.remove([BlockHash(each) for each in event.block_hashes])

    def shutdown(self) -> None:
        """Has nothing to end."""

    def get_publisher_config(self) -> None:
        """Returns None, because nothing is published."""
