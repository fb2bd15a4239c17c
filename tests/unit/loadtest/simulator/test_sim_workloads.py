from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from simulated_requests import TABLE

from fabric.contracts import ConfigError
from loadtest.simulator.sim_requests import PAD
from loadtest.simulator.trace_files import SAMPLES, TraceOptions, read_trace
from loadtest.simulator.workloads import WorkloadSpec, generate, media_of, parse_mix


def test_requests_follow_the_mix_the_rate_and_the_mean_output() -> None:
    spec = WorkloadSpec(4000, 20.0, {"text": 3.0, "image*2": 1.0}, mean_prompt=500)
    requests = list(generate(spec, 1))
    counts = Counter(one.kind for one in requests)
    assert counts["image*2"] / len(requests) == pytest.approx(0.25, abs=0.03)
    assert requests[-1].arrival_s == pytest.approx(200, rel=0.1)
    assert sum(one.num_output for one in requests) / len(requests) == pytest.approx(200, rel=0.06)
    text = [len(one.prompt(TABLE).token_ids) for one in requests if one.kind == "text"]
    assert sum(text) / len(text) == pytest.approx(500, rel=0.06)
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(requests))


def test_equal_seeds_make_equal_requests() -> None:
    spec = WorkloadSpec(50, 20.0, {"text": 1.0, "image": 1.0}, mean_turns=2.0)
    assert list(generate(spec, 3)) == list(generate(spec, 3))
    assert list(generate(spec, 3)) != list(generate(spec, 4))


def test_bursts_vary_the_times_between_arrivals() -> None:
    def variation(burstiness: float) -> float:
        times = [one.arrival_s for one in generate(WorkloadSpec(3000, 10.0, burstiness=burstiness), 1)]
        gaps = [after - before for before, after in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean

    assert variation(1.0) == pytest.approx(1.0, abs=0.1)
    assert variation(3.0) == pytest.approx(3.0, abs=0.6)


def test_a_turn_repeats_what_was_said_and_answered() -> None:
    spec = WorkloadSpec(200, 20.0, {"image": 1.0}, mean_turns=4.0, think_s=1.0, system_tokens=10)
    session_to_requests: dict[int, list[object]] = {}
    for one in generate(spec, 1):
        session_to_requests.setdefault(one.session, []).append(one)
    conversations = [turns for turns in session_to_requests.values() if len(turns) > 1]
    assert len(conversations) > 20
    for turns in conversations:
        for before, after in pairwise(turns):
            said = (*before.parts, (before.first_output, before.num_output))
            assert after.parts[: len(said)] == said
            assert after.arrival_s > before.arrival_s


def test_shared_media_repeat_and_others_do_not() -> None:
    def contents(shared: float) -> Counter[str]:
        spec = WorkloadSpec(1000, 20.0, {"image": 1.0}, shared_media=shared, num_shared=10)
        return Counter(one.parts[1][1] for one in generate(spec, 1))

    assert max(contents(0.0).values()) == 1
    popular = contents(0.5)
    assert sum(count for name, count in popular.items() if name.startswith("shared")) == pytest.approx(500, abs=60)
    assert popular["shared1"] > popular["shared10"]


def test_a_prompt_has_placeholders_where_its_media_stand() -> None:
    prompt = next(generate(WorkloadSpec(1, 1.0, {"video-30f+audio-30s": 1.0}, system_tokens=5), 1)).prompt(TABLE)
    assert [item.modality for item in prompt.media] == ["video", "audio"]
    assert sum(run.length for run in prompt.placeholders) == 3840 + 750 == prompt.token_ids.count(PAD)
    assert all(prompt.token_ids[run.offset] == PAD for run in prompt.placeholders)


def test_mixes_are_parsed() -> None:
    assert parse_mix("text=0.8, image*4=0.2") == {"text": 0.8, "image*4": 0.2}
    assert media_of("image*3+audio-30s") == ["image", "image", "image", "audio-30s"]
    assert media_of("text") == []
    with pytest.raises(ConfigError, match="'image' is no share of a mix"):
        parse_mix("text=0.8,image")
    with pytest.raises(ConfigError, match="must be positive"):
        WorkloadSpec(1, 1.0, {"text": -1.0})
    with pytest.raises(ConfigError, match="a positive rate"):
        WorkloadSpec(1, 0.0)


# ---------------------------------------------------------------- traces


def test_azures_format_is_read() -> None:
    requests = list(read_trace(SAMPLES / "azure-multimodal.csv", TABLE, TraceOptions(), 1))
    assert len(requests) == 200
    assert requests[0].arrival_s == 0.0
    pictures = Counter(len(one.prompt(TABLE).media) for one in requests)
    assert set(pictures) == {0, 1, 2, 4}
    assert Counter(one.kind for one in requests)["text"] == pictures[0]
    hashes = [item.mm_hash for one in requests for item in one.prompt(TABLE).media]
    assert len(set(hashes)) == len(hashes), "no picture is shared unless the caller says so"


def test_a_trace_can_be_faster_shorter_and_share_pictures() -> None:
    path = SAMPLES / "azure-multimodal.csv"
    slow = list(read_trace(path, TABLE, TraceOptions(max_requests=50), 1))
    fast = list(read_trace(path, TABLE, TraceOptions(speed_up=2.0, max_requests=50, shared_pictures=1.0), 1))
    assert len(slow) == len(fast) == 50
    assert fast[-1].arrival_s == pytest.approx(slow[-1].arrival_s / 2)
    assert all("/shared" in item.mm_hash for one in fast for item in one.prompt(TABLE).media)


def test_servegens_clients_are_read() -> None:
    requests = list(read_trace(SAMPLES / "servegen", TABLE, TraceOptions(), 1))
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(requests))
    # The first client sends 2.0 and then 1.5 requests a second, the second one 0.8, each for windows of 600 s.
    assert len(requests) == pytest.approx(600 * (2.0 + 1.5 + 0.8), rel=0.15)
    kinds = Counter(one.kind for one in requests)
    assert kinds["image"] > kinds["image*2"] > 0
    assert set(kinds) == {"text", "image", "image*2"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("A,B\n1,2\n", "lacks the columns ContextTokens, GeneratedTokens, TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2 of the trace"),
    ],
)
def test_wrong_traces_are_refused(tmp_path: Path, content: str, message: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(content)
    with pytest.raises(ConfigError, match=message):
        list(read_trace(trace, TABLE, TraceOptions(), 1))


def test_missing_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        list(read_trace(tmp_path / "none.csv", TABLE, TraceOptions(), 1))
    with pytest.raises(ConfigError, match=r"has no chunk-N-trace\.csv"):
        list(read_trace(tmp_path, TABLE, TraceOptions(), 1))
    (tmp_path / "chunk-1-trace.csv").write_text("0,1.0,1.0,Poisson,1.0\n")
    (tmp_path / "chunk-1-dataset.json").write_text('{"0": {"input_tokens": "{5: 1.0}"}}')
    with pytest.raises(ConfigError, match="no distribution 'output_tokens'"):
        list(read_trace(tmp_path, TABLE, TraceOptions(), 1))
