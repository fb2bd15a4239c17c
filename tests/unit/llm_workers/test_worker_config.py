"""Tests the settings of a worker that give its steps a least time, and what they refuse."""

from __future__ import annotations

import pytest

from fabric.contracts import ConfigError
from llm_workers.worker_config import WorkerConfig


def test_a_step_takes_its_own_time_and_that_of_its_work() -> None:
    config = WorkerConfig(step_delay_s=0.5, step_delay_s_per_token=0.25, step_delay_s_per_decode=0.125)
    assert config.least_step_s(num_decodes=2, weighted_tokens=3.0) == 0.5 + 0.25 + 0.75
    assert WorkerConfig().least_step_s(num_decodes=8, weighted_tokens=512.0) == 0.0


@pytest.mark.parametrize(
    "key", ["step_delay_s", "step_delay_s_per_token", "step_delay_s_per_decode", "media_chunk_tokens"]
)
def test_no_limit_of_a_step_is_negative(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be at least 0, not -1"):
        WorkerConfig(**{key: -1})
