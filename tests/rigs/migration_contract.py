"""Says what every engine of a worker must do with a request that goes on where another worker has stopped, in the form
of `engine_contract`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from contract_model import ContractPrompt
from engine_contract import LATE_S, ContractRig

from fabric.contracts import GenerateRequest, SamplingParams


async def check_a_migrated_request_goes_on(r: ContractRig) -> None:
    of = r.model.prompt(r.text(33), 19, r.text(7))
    answer = r.model.answer(of, 10)
    for num_sent in (1, 5, 9, 10):
        request = _migrated(r, of, answer, num_sent, cache_salt=f"{num_sent}")
        result = await r.run(request, of)
        assert result.error is None
        assert _all_tokens(r, request) == answer
        assert result.choices[0].num_tokens == 10
    await r.assert_idle()


async def check_outputs_of_a_migrated_request_may_be_in_the_prefix_cache(r: ContractRig) -> None:
    of = r.model.prompt(r.text(33), 28, r.text(7))
    whole = r.request(of, 90)
    await r.run(whole, of)
    answer = r.tokens(whole)
    assert answer == r.model.answer(of, 90)
    request = _migrated(r, of, answer, 80, dispatched_items=())
    result = await asyncio.wait_for(r.call(request), LATE_S)
    assert result.error is None
    assert result.num_cached_tokens == len(of.token_ids)
    assert _all_tokens(r, request) == answer
    await r.assert_idle()


async def check_penalties_count_what_was_sent_before_a_migration(r: ContractRig) -> None:
    """Tokens of the prompt are not penalised, those that a former attempt has sent are. Some tokens are so probable
    that the penalties decide which of them is drawn."""
    of = r.model.prompt(r.text(34), 27, r.text(8))
    bias = tuple((token, 100.0) for token in range(70, 110))
    answers = []
    for name, penalties in {
        "none": {},
        "presence": {"presence_penalty": 2.0},
        "frequency": {"frequency_penalty": 2.0},
        "all": {"presence_penalty": 1.0, "frequency_penalty": 2.0, "repetition_penalty": 1.01},
    }.items():
        sampling = SamplingParams(temperature=0.0, logit_bias=bias, **penalties)
        whole = r.request(of, 24, sampling=sampling, cache_salt=name)
        await r.run(whole, of)
        answers.append(r.tokens(whole))
        for num_sent in (1, 7, 23):
            salt = f"{name} {num_sent}"
            request = _migrated(r, of, answers[-1], num_sent, sampling=sampling, cache_salt=salt)
            result = await r.run(request, of)
            assert _all_tokens(r, request) == answers[-1]
            assert (result.choices[0].finish_reason, result.choices[0].num_tokens) == ("length", 24)
    assert len(set(map(tuple, answers))) >= 3, "the penalties have no effect"
    await r.assert_idle()


def _migrated(r: ContractRig, of: ContractPrompt, answer: list[int], num_sent: int, **fields: Any) -> GenerateRequest:
    """Returns the second attempt of a request for `answer`, of which the first one has sent so many tokens."""
    sent = answer[:num_sent]
    request = r.request(of, len(answer), attempt=1, emitted=(tuple(sent),), **fields)
    r.router.tokens[request.request_id, 1, 0] = list(sent)
    return request


def _all_tokens(r: ContractRig, request: GenerateRequest) -> list[int]:
    return r.router.tokens[request.request_id, 1, 0]


MIGRATION_CHECKS: list[Callable[[ContractRig], Awaitable[None]]] = [
    value for name, value in list(globals().items()) if name.startswith("check_")
]
