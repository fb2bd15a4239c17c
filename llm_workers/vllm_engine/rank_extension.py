"""Adds to each rank of vLLM that it takes from a request the positions of its prompt, and the tokens that a former
attempt has sent, that it leaves no shared memory behind when it is killed, and that it tells which parts of a LoRA
adapter it does not apply.

vLLM computes the positions of pictures and videos (M-RoPE) in each rank, by rules of its own for each model. For the
videos of Qwen2.5-VL they differ from transformers': there a text goes on behind the largest position of a video's
height and width, and in vLLM behind the largest one of its time as well. Weft's families compute positions as
transformers does, and a request carries them with its first media item.

A request that goes on where another worker has stopped begins with outputs. vLLM's scheduler knows such requests,
because it begins preempted ones again, but tells a rank the prompt alone of a request that the rank has not seen
before. So the request carries these tokens as well: penalties then count them as outputs.

vLLM calls a class like this one the extension of a worker, and `EngineCore.collective_rpc` calls its methods on each
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from llm_workers.vllm_engine.shared_names import remove_mapped_names, remove_semaphore_names, remove_shared_names

POSITIONS, DELTA = "weft_positions", "weft_position_delta"
"""Names the values of a media item that hold the positions of the whole prompt, int64 with shape `(3, num_tokens)`, and
how far those of generated tokens are ahead of their indexes, int64 with shape `()`."""
SENT = "weft_sent"
"""Names the extra argument of sampling that holds the tokens with which a request begins behind its prompt."""

CPU_BUFFERS = "-cpushm"
"""Marks the names of the shared memory in which ranks on a CPU exchange tensors (vLLM's `_CPUSHMDistributed`)."""


class RankExtension:
    """vLLM adds the methods of this class to its worker, which has the model in `model_runner`."""

    model_runner: Any

    def use_positions_of_requests(self) -> bool:
        """Makes the model of this rank take positions from requests that carry some. Returns False for a model whose
        positions have one axis, for which there is nothing to do."""
        model = self.model_runner.get_model()
        compute = getattr(model, "get_mrope_input_positions", None)
        if compute is None:
            return False

        def positions(input_tokens: list[int], mm_features: Sequence[Any]) -> tuple[torch.Tensor, int]:
            for feature in mm_features:
                if feature.data is not None and POSITIONS in feature.data:
                    return feature.data[POSITIONS].data, int(feature.data[DELTA].data)
            result: tuple[torch.Tensor, int] = compute(input_tokens, mm_features)
            return result

        model.get_mrope_input_positions = positions
        return True

    def remove_shared_names(self) -> list[str]:
        """Removes the names of the shared memory and the semaphores of this rank, and returns them (`shared_names`)."""
        return remove_shared_names() + remove_mapped_names(CPU_BUFFERS) + remove_semaphore_names()

    def use_tokens_of_requests(self) -> bool:
        """Makes the batch of this rank take the sent tokens of requests that carry some as outputs. Returns False for
        vLLM's second model runner, which is told all tokens of a request and needs nothing."""
        batch = self.model_runner.input_batch
        add = getattr(batch, "add_request", None)
        if add is None:
            return False

        def add_with_outputs(request: Any) -> int:
            given = request.sampling_params
            extra = None if given is None else given.extra_args
            if extra and SENT in extra and not request.output_token_ids:
                request.output_token_ids.extend(extra[SENT])
            index: int = add(request)
            return index

        batch.add_request = add_with_outputs
        return True

    def modules_without_place(self, adapter_id: int) -> list[str]:
        """Returns the modules that a loaded adapter changes and this rank's part of the model does not have. vLLM
        leaves them out without a word, and the answers would be those of another model."""
        manager = self.model_runner.lora_manager._adapter_manager
        adapter = manager.get_adapter(adapter_id)
        return [] if adapter is None else sorted(set(adapter.loras) - set(manager.modules))
