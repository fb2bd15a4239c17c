"""Tests how a spoken answer is measured: what a listener waits for, and which pauses are heard."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from router.observe import HeardAnswer
from router.observe.speech_series import SpeechSeries


def heard(*pieces: tuple[float, float]) -> tuple[CollectorRegistry, HeardAnswer]:
    """Returns the series of one answer that arrived at 10 s. Each piece is (time at which it came, length)."""
    registry = CollectorRegistry()
    answer = HeardAnswer(SpeechSeries(registry), 10.0)
    for now_s, length_s in pieces:
        answer.note_piece(length_s, now_s)
    return registry, answer


def value(registry: CollectorRegistry, name: str) -> float | None:
    return registry.get_sample_value(f"weft_router_{name}")


def test_an_answer_in_time_has_no_underrun() -> None:
    registry, answer = heard((10.5, 0.32), (10.8, 2.0), (12.5, 2.0))
    answer.close()
    assert value(registry, "first_audio_seconds_sum") == pytest.approx(0.5)
    assert value(registry, "audio_underruns_total") == 0
    assert value(registry, "audio_gap_seconds_count") == 2
    assert value(registry, "audio_gap_seconds_sum") == pytest.approx(2.0)
    assert value(registry, "audio_piece_seconds_sum") == pytest.approx(4.32)
    assert value(registry, "audio_seconds_total") == pytest.approx(4.32)
    assert value(registry, "real_time_factor_ratio_sum") == pytest.approx(2.5 / 4.32)


def test_a_listener_who_has_heard_everything_pauses_and_goes_on() -> None:
    """The second piece comes 0.2 s late. The third is in time for a listener who was late by that."""
    registry, answer = heard((11.0, 1.0), (12.2, 1.0), (13.1, 1.0))
    assert value(registry, "audio_underruns_total") == 1
    facts = answer.facts()["speech"]
    assert facts == pytest.approx({"audio_s": 3.0, "first_audio_s": 1.0, "last_audio_s": 3.1, "underruns": 1})


def test_an_answer_without_sound_is_not_counted() -> None:
    registry, answer = heard()
    answer.close()
    assert answer.facts() == {}
    assert value(registry, "real_time_factor_ratio_count") == 0
