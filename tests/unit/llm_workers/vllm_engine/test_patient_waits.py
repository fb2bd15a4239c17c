"""Tests when a patient wait spins, sleeps and polls, on a clock of its own."""

from __future__ import annotations

import pytest

from llm_workers.vllm_engine.patient_waits import SLEEP_S, SPIN_S, wait_patiently


class Condition:
    """Stands for vLLM's condition, and notes the timeouts that its own wait was called with."""

    def __init__(self) -> None:
        self.last_read, self.busy_loop_s = 10.0, 1.0
        self.own: list[int | None] = []
        self.wait = self._wait

    def _wait(self, timeout_ms: int | None = None) -> None:
        self.own.append(timeout_ms)


@pytest.mark.parametrize(
    ("after_s", "is_asleep"),
    [(0.0, False), (SPIN_S / 2, False), (SPIN_S * 1.01, True), (0.999, True), (1.001, False), (60.0, False)],
)
def test_it_sleeps_between_spinning_and_polling(after_s: float, is_asleep: bool) -> None:
    condition, slept = Condition(), list[float]()
    wait_patiently(condition, lambda: 10.0 + after_s, slept.append)
    condition.wait(timeout_ms=7)
    assert (condition.own, slept) == (([], [SLEEP_S]) if is_asleep else ([7], []))


def test_each_message_begins_a_new_wait() -> None:
    condition, slept = Condition(), list[float]()
    wait_patiently(condition, lambda: 10.5, slept.append)
    condition.wait()
    condition.last_read = 10.5
    condition.wait(timeout_ms=None)
    assert (condition.own, slept) == ([None], [SLEEP_S])
