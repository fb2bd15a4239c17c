"""Tests how `weft bench speech` reads spoken answers, and the arithmetic of its bars."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from fabric.contracts import ConfigError, StageKey, StageRequest
from llm_workers.stages import StageChunk, StageSpan
from loadtest.benches.served.given_code2wav import SAMPLES_PER_FRAME, GivenCode2Wav
from loadtest.benches.served.speech_bench import (
    CHUNKED,
    GIVEN,
    HEADINGS,
    SEQUENTIAL,
    AskedFor,
    SpokenRow,
    speech_result,
)
from loadtest.benches.served.spoken_chats import ReceivedBytes, SoundPiece, SpokenTimes
from loadtest.benches.served.spoken_clusters import SpokenMode, speaking_model, spoken_config


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(**fields: object) -> bytes:
    return event(choices=[{"delta": fields}])


def sound(seconds: float) -> bytes:
    return delta(audio={"data": base64.b64encode(bytes(round(48_000 * seconds))).decode()})


USAGE = event(choices=[], usage={"completion_tokens": 4})
END = b"data: [DONE]\n\n"


class TestAnAnswer:
    def test_text_and_sound_have_the_times_at_which_their_last_bytes_came(self) -> None:
        first, second = delta(audio={"transcript": "one"}), sound(0.5)
        pieces = [
            ReceivedBytes(10.1, first[:7]),
            ReceivedBytes(10.2, first[7:] + delta(audio={"transcript": " two"})),
            ReceivedBytes(10.5, delta(content=" three") + second[:30]),
            ReceivedBytes(10.6, second[30:] + sound(0.25) + b": a comment\n\n"),
            ReceivedBytes(11.0, USAGE + END),
        ]
        times = SpokenTimes.of(10.0, pieces)
        assert times.text_s == pytest.approx((0.2, 0.2, 0.5))
        assert [piece.seconds for piece in times.sound] == [0.5, 0.25]
        assert times.ttfp_s == pytest.approx(0.6)
        assert times.tpot_s == pytest.approx(0.1)
        assert times.gaps_s == pytest.approx([0.0, 0.3])
        assert times.rtf == pytest.approx(1.0 / 0.75)

    @pytest.mark.parametrize("last", [END, USAGE, event(error={"code": "worker_lost"})])
    def test_an_answer_without_text_or_usage_or_with_an_error_is_refused(self, last: bytes) -> None:
        with pytest.raises(ConfigError):
            SpokenTimes.of(0.0, [ReceivedBytes(1.0, sound(1.0) + last)])

    def test_a_player_starves_when_a_piece_comes_after_the_end_of_the_last_one(self) -> None:
        pieces = (SoundPiece(1.0, 0.5), SoundPiece(1.2, 0.5), SoundPiece(2.25, 2.0), SoundPiece(3.0, 1.0))
        assert SpokenTimes((0.5,), pieces, 4.0, 1).underruns_s() == [pytest.approx(0.25)]


def row(
    mode: SpokenMode, concurrency: int, total_s: float, ttfp_s: float = 0.5, asked: AskedFor = AskedFor.SPEECH
) -> SpokenRow:
    sounds = (SoundPiece(ttfp_s, 20.5),) if asked is AskedFor.SPEECH else ()
    return SpokenRow(mode, concurrency, asked, [[SpokenTimes((0.1, 1.1), sounds, total_s, 11)]] * 3)


class TestBars:
    ROWS = (
        row(SEQUENTIAL, 1, 6.0, 6.0),
        row(CHUNKED, 1, 4.5, 0.6),
        row(CHUNKED, 1, 1.1, asked=AskedFor.TEXT),
        row(CHUNKED, 1, 1.1, asked=AskedFor.TEXT_BESIDE_SPEECH),
        row(GIVEN[0], 10, 8.0),
        row(GIVEN[1], 10, 5.0),
    )

    def test_chunks_are_compared_with_the_sequential_pipeline_and_with_text_alone(self) -> None:
        result = speech_result(self.ROWS, 100, 260)
        values = {bar.name: (round(bar.value, 3), bar.target, bar.ok) for bar in result.bars}
        assert values == {
            "1 open: first sound, chunks over sequential": (0.1, 0.15, True),
            "1 open: E2E, chunks over sequential": (0.75, 1.0, True),
            "1 open: RTF, chunks over sequential": (0.75, 1.0, True),
            "1 open: TTFT, spoken over text alone": (1.0, 1.1, True),
            "1 open: TPOT, spoken over text alone": (1.0, 1.1, True),
            "1 open: TTFT, spoken over text alone, beside other speech": (1.0, 1.1, True),
            "1 open: TPOT, spoken over text alone, beside other speech": (1.0, 1.1, True),
            "sequential, 10 open: code2wav 1 over 64, E2E, given time of a batch": (1.6, 1.3, True),
            "least sound of an answer": (20.5, 20.0, True),
        }

    def test_each_row_stands_beside_that_of_the_documentation(self) -> None:
        table = speech_result(self.ROWS, 100, 260).rows
        assert {len(each) for each in table} == {len(HEADINGS)}
        assert table[1][:4] == ["off", "64", "1", "6000.0"]
        assert table[1][-6:] == ["6505.13", "43.14", "8.52", "6395.4", "0.24", "8.44"]
        assert table[2][-6:] == [""] * 6
        assert table[3][:3] == ["text alone", "", "1"]
        assert table[4][:3] == ["text alone, beside other speech", "", "1"]


def test_the_talker_of_the_bench_ends_at_a_number_of_frames_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    talker = {"codec_eos_token_id": 258, "text_config": {"vocab_size": 1280}}
    (source / "config.json").write_text(json.dumps({"talker_config": talker}))
    (source / "generation_config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"weights")
    made = speaking_model(tmp_path / "made", source, 260)
    assert json.loads((made / "config.json").read_text())["talker_config"]["codec_eos_token_id"] == 1279
    assert json.loads((made / "generation_config.json").read_text()) == {"talker_max_new_tokens": 261}
    assert (made / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((source / "config.json").read_text())["talker_config"] == talker


def test_a_mode_is_a_config() -> None:
    stages = spoken_config(SpokenMode(False, 1, is_timed=True)).stages
    assert stages is not None
    assert not stages.async_chunk
    assert stages.later[-1].max_num_seqs == 1
    assert stages.later[-1].model_stage.endswith(":load_given_code2wav")


def test_a_batch_of_a_given_time_makes_silence_for_each_frame() -> None:
    stage = GivenCode2Wav(batch_s=0.0)
    requests = [StageRequest(name, 0, "r", "", 2, (0.0, name)) for name in ("a", "b")]
    for each in requests:
        stage.open(each)
    for number, (each, is_last) in enumerate(zip(requests, (True, False), strict=True), start=2):
        codes = np.zeros((number, 4), dtype=np.int64)
        stage.receive(StageChunk(each.key, 0, is_last, {"codes": codes}))
    spans = [StageSpan(each.key, 0, stage.num_units_ready(each.key), np.empty(0, dtype=np.int64)) for each in requests]
    outputs = stage.execute(spans)
    keys: list[StageKey] = [each.key for each in requests]
    assert [outputs[key].num_outputs for key in keys] == [2 * SAMPLES_PER_FRAME, 3 * SAMPLES_PER_FRAME]
    assert [stage.is_complete(key) for key in keys] == [True, False]
    for key in keys:
        stage.close(key)
