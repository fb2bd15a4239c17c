"""Lets vLLM follow a grammar of Weft, so that both engines obey one compiler and its limits, and a migrated request
goes on in the middle of its grammar.

A `Guide` (`llm_workers.sampling.grammar`) knows the tokens that a former attempt has sent. vLLM asks the grammar of a
request which tokens may come next, and tells it which ones came. With speculation it also asks which tokens of a draft
are allowed, and takes back those that were not drawn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

from llm_workers.scheduling import Guide

_ANY_OUTPUT = StructuredOutputsParams(json_object=True)
"""Only says that the request is constrained; its grammar says how."""


class GuideGrammar(StructuredOutputGrammar):  # type: ignore[misc]
    """A `GuideGrammar` is a guide as vLLM sees it."""

    def __init__(self, guide: Guide, vocab_size: int, max_rollback: int) -> None:
        """`max_rollback` is the number of accepted tokens that vLLM may take back."""
        self._states = [guide]
        """Holds the guide before each of the last `max_rollback` tokens, and in its present state."""
        self._num_words, self._max_rollback = -(-vocab_size // 32), max_rollback
        self.is_broken = False
        """Says that the grammar can't be followed any further, so that the request must end."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Moves past drawn tokens, which have passed the mask."""
        for token in tokens:
            state = self._states[-1].fork() if self._max_rollback else self._states.pop()
            state.advance((token,))
            self._states.append(state)
        del self._states[: -1 - self._max_rollback]
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Returns the tokens ahead of the first one that the grammar forbids."""
        state, words = self._states[-1].fork(), np.zeros(self._num_words, dtype=np.int32)
        for index, token in enumerate(tokens):
            if not state.write_mask(words) or not words[token // 32] >> (token % 32) & 1:
                return tokens[:index]
            state.advance((token,))
        return tokens

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last accepted tokens."""
        if num_tokens:
            del self._states[-num_tokens:]

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Writes row `batch_index` of a mask, int32 with shape `(num_rows, ceil(vocab_size / 32))`."""
        words = bitmask[batch_index].numpy()
        if not self._states[-1].write_mask(words):
            self.is_broken = True
            words.fill(-1)  # The request ends after this step, so it does not matter which token is drawn.

    def is_terminated(self) -> bool:
        """Returns False, because a guide at its end allows only the ids that end the choice."""
        return False

    def reset(self) -> None:
        raise AssertionError("vLLM resets no grammar that it did not compile")


class GuideBackend(StructuredOutputBackend):  # type: ignore[misc]
    """A `GuideBackend` makes room for masks. Grammars come with their requests."""

    def compile_grammar(self, request_type: Any, grammar_spec: str, stop_token_ids: Any = None) -> GuideGrammar:
        raise AssertionError("a constrained request comes with its grammar")

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        """Returns a mask that allows everything, int32 with shape `(max_num_seqs, ceil(vocab_size / 32))`."""
        return torch.full((max_num_seqs, -(-self.vocab_size // 32)), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """Has nothing to destroy."""


def constrained(grammar: GuideGrammar) -> StructuredOutputRequest:
    """Returns what a request of vLLM holds that follows `grammar`."""
    return StructuredOutputRequest(params=_ANY_OUTPUT, _grammar=grammar)
