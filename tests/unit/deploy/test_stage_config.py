"""Tests what a stage's section means where it says nothing."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from deploy.stages_config import StageSection, StagesSection


def section(**values: object) -> StageSection:
    return StageSection.model_validate({"stage_id": 2, "model_stage": "code2wav", "worker_type": "generation"} | values)


@pytest.mark.parametrize(
    ("values", "step_tokens", "fills_steps", "is_just_in_time"),
    [
        ({}, 50, False, False),
        ({"just_in_time": True}, 50, False, True),
        ({"max_step_tokens": 7}, 7, False, False),
        ({"devices": "cuda", "gpus_per_replica": 1}, 3200, True, False),
        ({"devices": "cuda", "gpus_per_replica": 0.5}, 3200, True, True),
        ({"devices": "cuda", "gpus_per_replica": 0.5, "just_in_time": False}, 3200, True, False),
        ({"model_stage": "mine:load"}, 3200, True, False),
        ({"model_stage": "talker", "worker_type": "ar"}, 512, True, False),
    ],
)
def test_steps_suit_the_place_of_a_stage(
    values: dict[str, object], step_tokens: int, fills_steps: bool, is_just_in_time: bool
) -> None:
    found = section(**values)
    assert (found.step_tokens, found.fills_steps, found.is_just_in_time) == (step_tokens, fills_steps, is_just_in_time)


def test_stages_must_be_in_order_and_linked_to_the_next_one() -> None:
    with pytest.raises(ValidationError, match=r"stage_args has the stage ids \[0, 2\]"):
        StagesSection.model_validate({"stage_args": [section(stage_id=0).model_dump(), section().model_dump()]})
    with pytest.raises(ValidationError, match="connectors has a link from stage 0 to stage 2"):
        StagesSection.model_validate({"connectors": [{"from_stage": 0, "to_stage": 2}]})
