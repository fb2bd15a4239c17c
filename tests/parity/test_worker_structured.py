"""Tests a worker's requests with a grammar: failures while it is compiled, and a grammar that breaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from llguidance import LLMatcher
from worker_rig import GREEDY, loaded, prompt, rig

from fabric.contracts import AbortAttempt, Aborted, InvalidRequest, SamplingParams, StopConditions
from llm_workers.sampling import GrammarCompiler
from llm_workers.scheduling import Guide

pytestmark = pytest.mark.torch
OF = prompt("Tell me something.")
GRAMMAR = LLMatcher.grammar_from_regex("[0-9]{6}")
GUIDED = SamplingParams(seed=3, grammar=GRAMMAR)


class Slow:
    """Compiles grammars, but waits until `may_go` is set."""

    def __init__(self) -> None:
        parts = loaded()
        self._compiler = GrammarCompiler(parts.codec, parts.family.shape.vocab_size)
        self.may_go, self.num_asked = threading.Event(), 0

    async def guide(self, grammar: str) -> Guide:
        self.num_asked += 1
        assert await asyncio.to_thread(self.may_go.wait, 10)
        return self._compiler.compile(grammar)

    def close(self) -> None:
        self._compiler.close()


class Breaking:
    """Serves as a compiler and as a guide. The guide fails after `num_left` tokens."""

    def __init__(self, num_left: int) -> None:
        self._num_left = num_left

    async def guide(self, grammar: str) -> Guide:
        return self

    def close(self) -> None: ...

    def fork(self) -> Breaking:
        return Breaking(self._num_left)

    def advance(self, token_ids: Sequence[int]) -> None:
        self._num_left -= len(token_ids)

    def write_mask(self, words: npt.NDArray[np.int32]) -> bool:
        words[:] = np.int32(-1)
        return self._num_left > 0


async def test_compiling_holds_up_nobody_else_and_then_the_grammar_is_followed() -> None:
    async with rig() as r:
        r.service._grammars = compiler = Slow()
        slow, fast = r.request(OF, sampling=GUIDED, num_choices=2), r.request(OF, 4)
        call = asyncio.ensure_future(r.service.generate(slow))
        assert (await r.service.generate(fast)).error is None
        assert compiler.num_asked == 1
        compiler.may_go.set()
        assert [choice.finish_reason for choice in (await call).choices] == ["stop", "stop"]
        for choice in range(2):
            text = loaded().codec.decode(r.tokens(slow, choice))
            assert len(text) == 6
            assert text.isdigit()
        await r.assert_idle()


@pytest.mark.parametrize("choices", [(), (1,)])
async def test_an_abort_that_comes_while_the_grammar_is_compiled_is_not_lost(choices: tuple[int, ...]) -> None:
    async with rig() as r:
        r.service._grammars = compiler = Slow()
        request = r.request(OF, sampling=GUIDED, num_choices=2)
        call = asyncio.ensure_future(r.service.generate(request))
        await r.until(lambda: compiler.num_asked == 1)
        r.router_plane.send(r.worker_plane.address, AbortAttempt(request.request_id, 0, choices))
        await asyncio.sleep(0)
        if choices:
            compiler.may_go.set()
            assert [choice.finish_reason for choice in (await call).choices] == ["stop", "abort"]
        else:  # The call does not wait for its grammar any longer.
            assert (await call).error.code == Aborted.code
            compiler.may_go.set()
        assert not r.service._aborts_before_admission
        await r.assert_idle()


async def test_a_call_that_is_cancelled_while_the_grammar_is_compiled_leaves_nothing() -> None:
    async with rig() as r:
        r.service._grammars = compiler = Slow()
        call = asyncio.ensure_future(r.service.generate(r.request(OF, sampling=GUIDED)))
        await r.until(lambda: compiler.num_asked == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        compiler.may_go.set()
        assert not r.service._aborts_before_admission
        await r.assert_idle()


async def test_a_grammar_that_can_not_be_used_ends_its_own_request() -> None:
    async with rig() as r:
        refused = await r.service.generate(r.request(OF, sampling=GUIDED))
        assert (refused.error.code, refused.error.message) == (
            InvalidRequest.code,
            "this worker does not support structured output",
        )
        r.service._grammars = GrammarCompiler(loaded().codec, loaded().family.shape.vocab_size)
        bad = await r.service.generate(r.request(OF, sampling=SamplingParams(grammar="{}")))
        assert bad.error.code == InvalidRequest.code
        await r.assert_idle()


async def test_below_min_tokens_no_ending_token_is_drawn() -> None:
    """Almost every likely token ends the choice. Only the few that do not are sampled until the choice may end."""
    few = tuple(range(40, 48))
    ending = tuple(token for token in range(60) if token not in few)
    bias = tuple((token, 100.0) for token in range(60))
    async with rig() as r:
        stop = StopConditions(30, eos_token_ids=ending[:2], stop_token_ids=ending[2:], min_tokens=10)
        request = r.request(OF, sampling=SamplingParams(seed=1, logit_bias=bias, temperature=2.0), stop=stop)
        assert (await r.service.generate(request)).error is None
        tokens = r.tokens(request)
        assert len(tokens) > 10
        assert set(tokens[:10]) <= set(few)
        assert tokens[-1] in ending
        await r.assert_idle()


async def test_a_grammar_that_breaks_in_the_middle_ends_its_own_request() -> None:
    async with rig() as r:
        beside, other = r.request(OF, 12), r.request(OF, 12)
        assert (await r.service.generate(other)).error is None
        r.service._grammars = Breaking(3)
        stop = StopConditions(12)
        broken = r.request(OF, sampling=SamplingParams(temperature=0.0, grammar="any"), stop=stop)
        results = await asyncio.gather(r.service.generate(broken), r.service.generate(beside))
        assert results[0].error.code == InvalidRequest.code
        assert "too complex" in results[0].error.message
        assert len(r.tokens(broken)) == 3
        assert results[1].error is None
        assert r.tokens(beside) == r.tokens(other)
        assert beside.sampling == GREEDY
        await r.assert_idle()
