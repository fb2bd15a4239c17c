"""Tests what is refused by name before anything is taken, and what a layout says of its media."""

from __future__ import annotations

import msgspec
import pytest
from scheduling_cases import image, positions, request, unit

from fabric.contracts import (
    ContextLengthExceeded,
    FeatureMismatch,
    GenerateRequest,
    InvalidRequest,
    PlaceholderRange,
    PromptOutputs,
    ProtocolError,
    StopConditions,
    WeftError,
)
from llm_workers.scheduling import Arrival
from llm_workers.scheduling.sequence import PromptLayout, prepare
from llm_workers.worker_config import WorkerConfig

CONFIG = WorkerConfig(block_size=4, num_blocks=16)
MAX_MODEL_LEN = 100


def arrive(of: GenerateRequest, config: WorkerConfig = CONFIG) -> Arrival:
    return prepare(of, positions(of), config, MAX_MODEL_LEN, 0.0)


@pytest.mark.parametrize(
    ("of", "kind", "message", "param"),
    [
        (request("a", []), InvalidRequest, "the prompt is empty", None),
        (request("a", 5, num_choices=0), InvalidRequest, "n must be at least 1, not 0", "n"),
        (
            request("a", 5, stop=StopConditions(max_tokens=0)),
            InvalidRequest,
            "max_tokens must be at least 1, not 0",
            "max_tokens",
        ),
        (
            request("a", 5, prompt_outputs=PromptOutputs(is_normalised=False), max_tokens=0),
            InvalidRequest,
            "max_tokens must be at least 1, not 0",
            "max_tokens",
        ),
        (
            request("a", 5, prompt_outputs=PromptOutputs("first"), stop=StopConditions(max_tokens=0)),
            InvalidRequest,
            "the pooling must be `last` or `mean`, not 'first'",
            "pooling",
        ),
        (
            request("a", 5, prompt_outputs=PromptOutputs(num_top_logprobs=-1)),
            InvalidRequest,
            "prompt_logprobs must be at least 0, not -1",
            "prompt_logprobs",
        ),
        (
            request("a", 5, prompt_outputs=PromptOutputs("last"), max_tokens=3),
            InvalidRequest,
            "max_tokens must be 0 if an embedding is wanted, not 3",
            "max_tokens",
        ),
        (
            request("a", 5, prompt_outputs=PromptOutputs("last"), max_tokens=-1),
            InvalidRequest,
            "max_tokens must be at least 0, not -1",
            "max_tokens",
        ),
        (
            request("a", 5, prompt_outputs=PromptOutputs("last"), max_tokens=0, num_choices=2),
            InvalidRequest,
            "n must be 1 if nothing is generated, not 2",
            "n",
        ),
        (
            request("a", 5, prompt_outputs=PromptOutputs("last"), max_tokens=0, emitted=((1,),)),
            ProtocolError,
            "the request generates nothing, but has tokens of a former attempt",
            None,
        ),
        (
            request("a", 100),
            ContextLengthExceeded,
            "the prompt has 100 tokens, but the context of the model has 100, and the answer needs at least one",
            "messages",
        ),
        (
            request("a", 101, prompt_outputs=PromptOutputs("last"), max_tokens=0),
            ContextLengthExceeded,
            "the prompt has 101 tokens, but the context of the model has 100",
            "messages",
        ),
        (request("a", 65), ContextLengthExceeded, "the prompt has 65 tokens, but a worker has room for 64", "messages"),
        (
            request("a", 5, num_choices=2, emitted=((1,),)),
            ProtocolError,
            "the request has 2 choices, but tokens of 1 choices",
            None,
        ),
    ],
)
def test_what_can_never_run_is_refused_by_name(
    of: GenerateRequest, kind: type[WeftError], message: str, param: str | None
) -> None:
    with pytest.raises(kind) as caught:
        arrive(of)
    assert (caught.value.message, caught.value.param) == (message, param)


def test_choices_share_the_prompts_hashes_and_none_of_their_lists() -> None:
    arrival = arrive(request("a", 10, num_choices=3))
    hashes = [sequence.hashes for sequence in arrival.sequences]
    assert [len(one) for one in hashes] == [2, 2, 2]
    assert hashes[0] == hashes[1] == hashes[2]
    assert len({id(one) for one in hashes}) == 3
    alone = arrive(request("a", 10, num_choices=1))
    assert alone.sequences[0].hashes == hashes[0]


def run(offset: int, length: int, item: int = 0, unit_index: int = 0, row: int = 0) -> PlaceholderRange:
    return PlaceholderRange(offset, length, item, unit_index, row)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ((run(4, 0),), "placeholders [4, 4) are empty, overlap others, or exceed the prompt of 20 tokens"),
        (
            (run(4, 3), run(6, 1, row=3)),
            "placeholders [6, 7) are empty, overlap others, or exceed the prompt of 20 tokens",
        ),
        ((run(18, 3),), "placeholders [18, 21) are empty, overlap others, or exceed the prompt of 20 tokens"),
        ((run(4, 3, item=1),), "placeholders [4, 7) name media item 1, which the request does not have"),
        ((run(4, 3, item=-1),), "placeholders [4, 7) name media item -1, which the request does not have"),
        ((run(4, 9),), "placeholders [4, 13) take rows that media item 0 does not have"),
        ((run(4, 3, unit_index=1),), "placeholders [4, 7) take rows that media item 0 does not have"),
    ],
)
def test_placeholders_that_contradict_the_prompt_are_refused(runs: tuple[PlaceholderRange, ...], message: str) -> None:
    of = msgspec.structs.replace(request("a", 20, [("picture", 4, 8)]), placeholders=runs)
    with pytest.raises(ProtocolError) as caught:
        PromptLayout(of)
    assert caught.value.message == message


def test_an_item_with_anothers_index_is_not_there() -> None:
    of = msgspec.structs.replace(request("a", 20, [("picture", 4, 8)]), media=(image("picture", 3, 8),))
    with pytest.raises(ProtocolError, match="name media item 0, which the request does not have"):
        PromptLayout(of)


def test_one_medium_of_two_sizes_is_refused_with_its_part() -> None:
    with pytest.raises(FeatureMismatch) as caught:
        PromptLayout(request("a", 40, [("picture", 4, 8), ("picture", 20, 9)]))
    assert (caught.value.message, caught.value.param) == (
        "one medium was planned with 8 tokens and with 9 tokens",
        "messages.0.1",
    )


def test_units_are_named_when_their_last_run_ends() -> None:
    """The chunk in which its last run ends names the unit, once; a run may be a single token."""
    layout = PromptLayout(request("a", 60, [("one", 2, 1), ("two", 10, 5), ("two", 30, 5), ("three", 40, 2)]))
    assert layout.units_completed(0, 3) == [unit("one")]
    assert layout.units_completed(3, 20) == []
    assert layout.units_completed(20, 42) == [unit("two"), unit("three")]
    assert layout.units_completed(42, 60) == []
    assert layout.units_after(3) == [unit("two"), unit("three")]


def test_a_prompt_without_an_answer_may_fill_the_context() -> None:
    wide = WorkerConfig(block_size=4, num_blocks=25)
    arrival = arrive(request("a", 100, prompt_outputs=PromptOutputs("last"), max_tokens=0), wide)
    assert arrival.sequences[0].num_tokens == 100
