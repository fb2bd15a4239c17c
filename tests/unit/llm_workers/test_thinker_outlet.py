"""Tests what the thinker hands to the next stage: each token and each row that the talker needs once, in order, however
the prompt is cut into chunks or cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from scheduling_cases import Bench, attempt_id, request

from fabric.contracts import ErrorInfo, GenerateRequest, MemberId, ProtocolError, StageRequest, StageTarget, WorkerLost
from llm_workers.scheduling import StepEvents
from llm_workers.stages import StageOutput, ThinkerOutlet

TALKER = StageTarget(1, MemberId("talker-1"), "inbox-1", "shared_memory")
BLOCK = 4


@dataclass
class RecordingSender:
    """Implements `ChunkSender` and keeps what it gets."""

    opened: list[StageRequest] = field(default_factory=list)
    outputs: list[StageOutput] = field(default_factory=list)
    aborted: list[ErrorInfo | None] = field(default_factory=list)

    def open(self, request: StageRequest) -> None:
        self.opened.append(request)

    def save_async(self, output: StageOutput, request: StageRequest) -> None:
        assert request in self.opened
        self.outputs.append(output)

    def abort(self, request: StageRequest, error: ErrorInfo | None = None) -> None:
        assert request in self.opened
        self.aborted.append(error)

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """Returns each token after its index."""
        found: list[tuple[int, int]] = []
        for output in self.outputs:
            ids = output.values.get("token_ids")
            if ids is not None:
                assert isinstance(ids, np.ndarray)
                first = output.values["first_index"]
                assert isinstance(first, int)
                found += enumerate(ids.tolist(), first)
        return found


def test_each_token_goes_out_once_and_the_last_one_ends() -> None:
    bench, sender = Bench(block_size=BLOCK, num_blocks=64), RecordingSender()
    outlet = ThinkerOutlet(sender)
    spoken = with_stage(request("r", list(range(10)), max_tokens=5))
    bench.add(spoken)
    outlet.begin(spoken)
    drawn = run(bench, outlet)
    assert sender.opened[0].key == "r.1"
    assert sender.opened[0].next_stage == TALKER
    assert [token for _, token in sender.tokens] == drawn
    assert [index for index, _ in sender.tokens] == list(range(5))
    assert [output.is_finished for output in sender.outputs] == [*[False] * (len(sender.outputs) - 1), True]
    assert len(outlet) == 0


def test_tokens_of_a_former_attempt_go_out_first() -> None:
    bench, sender = Bench(block_size=BLOCK, num_blocks=64), RecordingSender()
    outlet = ThinkerOutlet(sender)
    spoken = with_stage(request("r", list(range(10)), max_tokens=5, emitted=((7, 8),)))
    bench.add(spoken)
    outlet.begin(spoken)
    run(bench, outlet)
    assert [index for index, _ in sender.tokens] == list(range(5))
    assert [token for _, token in sender.tokens[:2]] == [7, 8]


def test_a_request_that_has_ended_before_it_began_sends_all_its_tokens() -> None:
    sender = RecordingSender()
    outlet = ThinkerOutlet(sender)
    outlet.begin(with_stage(request("r", 4, emitted=((7, 8, 9),))), is_finished=True)
    assert [token for _, token in sender.tokens] == [7, 8, 9]
    assert sender.outputs[-1].is_finished
    assert len(outlet) == 0


def test_an_aborted_request_tells_the_sender_once() -> None:
    sender = RecordingSender()
    outlet = ThinkerOutlet(sender)
    outlet.begin(with_stage(request("r", 4)))
    outlet.abort(attempt_id("r"), WorkerLost("the engine has died"))
    outlet.abort(attempt_id("r"))
    assert [error and error.code for error in sender.aborted] == ["worker_lost"]


@pytest.mark.parametrize("is_cached", [False, True])
def test_each_media_row_goes_out_once(is_cached: bool) -> None:
    """Media rows cross chunks; when the prompt is cached they are read from its blocks."""
    bench = Bench(block_size=BLOCK, num_blocks=64, max_step_tokens=6, side_layers=(("talker", 2),))
    for name in ("first", "second") if is_cached else ("first",):
        sender = RecordingSender()
        outlet = ThinkerOutlet(sender, read_rows=rows_by_slot)
        images = (("cat", 3, 5), ("dog", 12, 4))
        spoken = with_stage(request(name, list(range(20)), images, max_tokens=2, side_names=("talker",)))
        num_cached = bench.add(spoken, landed=True).num_cached_tokens
        outlet.begin(spoken)
        tables = run_tables(bench, outlet)
        rows = [output.values for output in sender.outputs if "prompt_hidden" in output.values]
        at = np.concatenate([values["prompt_hidden_at"] for values in rows])
        hidden = np.concatenate([values["prompt_hidden"] for values in rows])
        assert at.tolist() == [3, 4, 5, 6, 7, 12, 13, 14, 15]
        assert hidden[:, 0].tolist() == [tables[-1][place // BLOCK] * BLOCK + place % BLOCK for place in at.tolist()]
        assert (num_cached > 0) == (name == "second")


def test_each_row_of_a_prompt_goes_out_with_its_chunk_and_each_later_one_with_the_next_token() -> None:
    bench = Bench(block_size=BLOCK, num_blocks=64, max_step_tokens=6, side_layers=(("talker", 2),))
    sender = RecordingSender()
    outlet = ThinkerOutlet(sender, rows_by_slot, needs_all_rows=True)
    spoken = with_stage(request("r", list(range(10)), max_tokens=3, side_names=("talker",)))
    bench.add(spoken)
    outlet.begin(spoken)
    run(bench, outlet)
    assert [at_and_tokens(output) for output in sender.outputs] == [
        ([0, 1, 2, 3, 4, 5], []),
        ([6, 7, 8, 9], [7]),
        ([10], [7]),
        ([11], [7]),
    ]


def test_rows_of_tokens_of_a_former_attempt_are_those_of_a_prompt() -> None:
    bench = Bench(block_size=BLOCK, num_blocks=64, max_step_tokens=64, side_layers=(("talker", 2),))
    sender = RecordingSender()
    outlet = ThinkerOutlet(sender, rows_by_slot, needs_all_rows=True)
    spoken = with_stage(request("r", 3, max_tokens=4, side_names=("talker",), emitted=((5, 6),)))
    bench.add(spoken)
    outlet.begin(spoken)
    run(bench, outlet)
    assert [at_and_tokens(output) for output in sender.outputs] == [
        ([], [5, 6]),
        ([0, 1, 2, 3, 4], [7]),
        ([5], [7]),
    ]


def test_a_request_that_asks_for_no_rows_gets_none_of_a_cluster_that_has_them() -> None:
    bench, sender = Bench(block_size=BLOCK, num_blocks=64, side_layers=(("talker", 2),)), RecordingSender()
    outlet = ThinkerOutlet(sender, rows_by_slot, needs_all_rows=True)
    spoken = with_stage(request("r", 10, max_tokens=2))
    bench.add(spoken)
    outlet.begin(spoken)
    run(bench, outlet)
    assert [at_and_tokens(output) for output in sender.outputs] == [([], [7]), ([], [7])]


def test_rows_of_a_request_that_has_ended_can_not_be_sent() -> None:
    sender = RecordingSender()
    outlet = ThinkerOutlet(sender, rows_by_slot, needs_all_rows=True)
    ended = with_stage(request("r", 4, emitted=((7, 8, 9),), side_names=("talker",)))
    with pytest.raises(ProtocolError, match="nothing left to compute"):
        outlet.begin(ended, is_finished=True)
    assert (len(outlet), sender.opened) == (0, [])


# ---------------------------------------------------------------- drivers


def at_and_tokens(output: StageOutput) -> tuple[list[int], list[int]]:
    """Returns the positions of the rows and the tokens of an output."""
    values: Any = output.values
    at, token_ids = (values.get(name, np.empty(0)).tolist() for name in ("prompt_hidden_at", "token_ids"))
    return at, token_ids


def with_stage(given: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(given, next_stage=TALKER)


def rows_by_slot(block_ids: npt.NDArray[np.int64], start: int, end: int) -> npt.NDArray[np.float32]:
    """Returns rows that hold their own slot."""
    at = np.arange(start, end)
    return (block_ids[at // BLOCK] * BLOCK + at % BLOCK).astype(np.float32)[:, None]


def run(bench: Bench, outlet: ThinkerOutlet) -> list[int]:
    """Runs all steps and returns the tokens that they drew."""
    drawn: list[int] = []
    while (plan := bench.plan()).num_sequences:
        events: StepEvents = bench.commit(plan)
        outlet.committed(plan, events)
        drawn += [token for made in events.tokens for token in made.token_ids]
    return drawn


def run_tables(bench: Bench, outlet: ThinkerOutlet) -> Sequence[list[int]]:
    """Runs all steps and returns the block table of each chunk."""
    tables: list[list[int]] = []
    while (plan := bench.plan()).num_sequences:
        tables += [chunk.block_ids.tolist() for chunk in plan.chunks]
        outlet.committed(plan, bench.commit(plan))
    return tables
