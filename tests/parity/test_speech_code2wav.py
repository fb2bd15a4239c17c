"""Compares `Code2WavStage` with one forward pass of transformers' code2wav, for any chunks, batches and orders."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_speech import CODE2WAV_CONFIG, tiny_code2wav
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
    Qwen3OmniMoeConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from fabric.contracts import ConfigError, MemberId, ProtocolError, RequestId, StageKey, StageRequest
from llm_workers.speech import Code2WavStage, load_code2wav
from llm_workers.speech.code2wav_network import Code2WavNetwork, native_snake
from llm_workers.stages import StageChunk, StageSpan

pytestmark = pytest.mark.torch

TOLERANCE = 1e-6
"""Is relative to the level of the signal (root of its mean square). The weights are float64 in most tests, so that
rounding can't hide a wrong context; samples are float32."""
ROUNDING = 5e-5
"""Is the tolerance in float32. The reference itself is 1.1e-5 from its own result in float64."""
NUM_REQUESTS, MAX_FRAMES = 4, 130


@pytest.fixture(scope="module")
def reference() -> Qwen3OmniMoeCode2Wav:
    return tiny_code2wav().double()


@pytest.fixture(scope="module")
def network(reference: Qwen3OmniMoeCode2Wav) -> Code2WavNetwork:
    return Code2WavNetwork(reference)


@pytest.fixture(scope="module")
def codes(reference: Qwen3OmniMoeCode2Wav) -> list[npt.NDArray[np.int64]]:
    draw = np.random.default_rng(1)
    return [draw.integers(0, 32, (MAX_FRAMES, 3)) for _ in range(NUM_REQUESTS)]


def whole(reference: Qwen3OmniMoeCode2Wav, codes: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        samples: npt.NDArray[np.float32] = reference(torch.from_numpy(codes.T[None]))[0, 0].numpy()
    return samples


def request(name: str) -> StageRequest:
    return StageRequest(RequestId(name), 0, MemberId("router"), "", 2, (0.0, name))


class Listener:
    """A `Listener` sends the codes of one request to a stage in given cuts, and joins what it makes of them."""

    def __init__(self, stage: Code2WavStage, name: str, codes: npt.NDArray[np.int64], cuts: list[int]) -> None:
        self.stage, self.key, self.codes = stage, request(name).key, codes
        edges = [0, *sorted(cuts), len(codes)]
        self.chunks = list(pairwise(edges))
        self.num_sent, self.start = 0, 0
        self.samples: list[npt.NDArray[np.float32]] = []
        stage.open(request(name))

    def send(self) -> None:
        first, end = self.chunks[self.num_sent]
        is_last = self.num_sent == len(self.chunks) - 1
        payload = {"codes": self.codes[first:end], "first_frame": first} if end > first or not is_last else {}
        self.stage.receive(StageChunk(self.key, self.num_sent, is_last, payload))
        self.num_sent += 1

    @property
    def is_sent(self) -> bool:
        return self.num_sent == len(self.chunks)

    def span(self, most: int) -> StageSpan | None:
        ready = self.stage.num_units_ready(self.key) - self.start
        count = min(ready, most)
        return StageSpan(self.key, self.start, count, np.empty(0, dtype=np.int64)) if count > 0 else None

    def take(self, span: StageSpan, values: Any) -> None:
        assert values["first_sample"] == sum(map(len, self.samples))
        self.samples.append(values["samples"])
        self.start += span.num_units


def step(listeners: list[Listener], most: int = 10**6) -> None:
    """Runs one step over all listeners that have something to compute."""
    pairs = [(listener, span) for listener in listeners if (span := listener.span(most)) is not None]
    if pairs:
        outputs = pairs[0][0].stage.execute([span for _, span in pairs])
        for listener, span in pairs:
            listener.take(span, outputs[span.key].values)
            assert outputs[span.key].num_outputs == len(listener.samples[-1])
            assert outputs[span.key].is_finished == listener.stage.is_complete(span.key)


def assert_close(found: npt.NDArray[Any], expected: npt.NDArray[Any], tolerance: float = TOLERANCE) -> None:
    assert len(found) == len(expected)
    level = np.sqrt(np.mean(expected.astype(np.float64) ** 2))
    assert level > 0.01
    assert np.abs(found - expected).max() <= tolerance * level


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_chunks_batches_and_orders_give_one_whole_decode(
    reference: Qwen3OmniMoeCode2Wav, network: Code2WavNetwork, codes: list[npt.NDArray[np.int64]], data: st.DataObject
) -> None:
    stage = Code2WavStage(network)
    listeners = []
    for index in range(data.draw(st.integers(1, NUM_REQUESTS))):
        count = data.draw(st.integers(1, MAX_FRAMES))
        cuts = data.draw(st.lists(st.integers(1, count), max_size=6, unique=True))
        listeners.append(Listener(stage, f"r{index}", codes[index][:count], cuts))
    while any(not listener.is_sent for listener in listeners):
        sending = data.draw(st.sampled_from([listener for listener in listeners if not listener.is_sent]))
        sending.send()
        if data.draw(st.booleans()):
            step(data.draw(st.permutations(listeners)), data.draw(st.sampled_from([1, 3, 25, 1000])))
    while any(listener.span(1) for listener in listeners):
        step(listeners)
    for listener in listeners:
        assert stage.is_complete(listener.key)
        assert_close(np.concatenate(listener.samples), whole(reference, listener.codes))
        stage.close(listener.key)
    assert stage.num_states == 0


def test_a_place_that_was_used_before_remembers_nothing(
    reference: Qwen3OmniMoeCode2Wav, network: Code2WavNetwork, codes: list[npt.NDArray[np.int64]]
) -> None:
    stage = Code2WavStage(network)
    for index in range(12):
        listener = Listener(stage, "again", codes[index % 3][: 30 + index], [4, 20])
        while not listener.is_sent:
            listener.send()
            step([listener])
        if index == 11:
            assert_close(np.concatenate(listener.samples), whole(reference, listener.codes))
        stage.close(listener.key)


def test_the_number_of_samples_follows_from_the_rates() -> None:
    tiny = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "decoder_dim": 16}
    real = Code2WavNetwork(tiny_code2wav(**tiny, upsample_rates=[8, 5, 4, 3]))
    assert [real.num_samples(count) for count in (1, 2, 300)] == [1_365, 3_285, 300 * 1_920 - 555]
    assert real.samples_per_frame == 1_920
    slow = tiny_code2wav(**tiny, upsampling_ratios=[1], upsample_rates=[2, 1, 3])
    network = Code2WavNetwork(slow)
    assert network.min_first_frames == 3
    for count in (3, 4, 9):
        expected = whole(slow, np.zeros((count, 3), dtype=np.int64))
        assert network.num_samples(count) == len(expected)


def test_a_request_waits_until_its_frames_make_a_sample() -> None:
    slow = tiny_code2wav(upsampling_ratios=[1], upsample_rates=[2, 1, 3])
    stage = Code2WavStage(Code2WavNetwork(slow))
    codes = np.random.default_rng(2).integers(0, 32, (9, 3))
    listener = Listener(stage, "slow", codes, [1, 2, 3])
    sizes = []
    while not listener.is_sent:
        listener.send()
        sizes.append(stage.num_units_ready(listener.key))
        step([listener], 2 if len(sizes) == 3 else 100)
    while listener.span(1):
        step([listener])
    assert sizes == [0, 0, 3, 9]
    assert_close(np.concatenate(listener.samples), whole(slow, codes), ROUNDING)
    short = Listener(stage, "short", codes[:1], [])
    short.send()
    step([short])
    assert stage.is_complete(short.key)
    assert len(short.samples[0]) == 0


def test_the_activation_in_c_equals_that_of_torch() -> None:
    torch.manual_seed(0)
    for columns, level in ((1, 1.0), (37, 3.0), (1000, 300.0)):
        x = torch.randn(3, 5, columns) * level
        alpha, inverse = torch.rand(5) + 0.5, torch.rand(5) + 0.5
        done = native_snake(x, alpha, inverse)
        if done is None:
            pytest.skip("there is no C compiler")
        wide = x.double() + torch.sin(x.double() * alpha[:, None]) ** 2 * inverse[:, None]
        # Besides the series, the product of a large value with its scale is rounded.
        torch.testing.assert_close(done.double(), wide, atol=1e-6 + 3e-7 * level, rtol=1e-6)
    assert native_snake(x.double(), alpha, inverse) is None


def test_each_request_gets_what_it_would_get_alone(codes: list[Any]) -> None:
    """The products of a batch may add in another order than those of one row, so the samples agree to rounding."""
    reference = tiny_code2wav()
    network = Code2WavNetwork(reference)
    alone, together = Code2WavStage(network), Code2WavStage(network)
    cuts = [4, 29, 54]
    single = Listener(alone, "r0", codes[0][:70], cuts)
    others = [Listener(together, f"r{index}", codes[index % 4][: 70 + index], cuts) for index in range(12)]
    while not single.is_sent:
        for listener in (single, *others):
            listener.send()
        step([single])
        step(others)
    assert_close(np.concatenate(others[0].samples), np.concatenate(single.samples), ROUNDING)
    assert_close(np.concatenate(single.samples), whole(reference, single.codes), ROUNDING)


def test_a_failed_pass_is_repeated_without_a_gap(
    reference: Qwen3OmniMoeCode2Wav, network: Code2WavNetwork, codes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Code2WavStage(network)
    listener = Listener(stage, "r", codes[0][:120], [])
    listener.send()
    run, calls = network.run, []

    def fail_once(*arguments: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 2:
            raise RuntimeError("the device failed")
        return run(*arguments)

    monkeypatch.setattr(network, "run", fail_once)
    with pytest.raises(RuntimeError):
        step([listener])
    step([listener])
    assert_close(np.concatenate(listener.samples), whole(reference, listener.codes))


def test_decoding_left_context_again_has_the_right_count_and_close_values(
    reference: Qwen3OmniMoeCode2Wav, network: Code2WavNetwork, codes: list[Any]
) -> None:
    stage = Code2WavStage(network, left_context_frames=20)
    listener = Listener(stage, "r", codes[0][:90], [4, 29, 54])
    while not listener.is_sent:
        listener.send()
        step([listener])
    found, expected = np.concatenate(listener.samples), whole(reference, codes[0][:90])
    assert_close(found, expected, 0.2)
    assert np.abs(found - expected).max() > 1e-4
    with pytest.raises(ConfigError, match="left_context_frames"):
        Code2WavStage(network, left_context_frames=0)


def test_code2wav_is_loaded_from_a_whole_checkpoint(tmp_path: Path, codes: list[Any]) -> None:
    reference = tiny_code2wav()
    Qwen3OmniMoeConfig(code2wav_config=CODE2WAV_CONFIG).save_pretrained(tmp_path)
    weights = {f"code2wav.{name}": value for name, value in reference.state_dict().items()}
    others = {"talker.model.norm.weight": torch.ones(2), "thinker.lm_head.weight": torch.ones(2, 2)}
    save_file(weights | others, tmp_path / "model.safetensors", {"format": "pt"})
    listener = Listener(load_code2wav(tmp_path, "cpu", "float32"), "r", codes[0], [4])
    while not listener.is_sent:
        listener.send()
        step([listener])
    assert_close(np.concatenate(listener.samples), whole(reference, codes[0]), ROUNDING)
    missing = sorted(weights)[0]
    save_file({name: value for name, value in weights.items() if name != missing}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="lacks 1 weights"):
        load_code2wav(tmp_path, "cpu", "float32")


def test_a_checkpoint_without_speech_is_refused(tmp_path: Path) -> None:
    Qwen3OmniMoeConfig(enable_audio_output=False).save_pretrained(tmp_path / "mute")
    with pytest.raises(ConfigError, match="no talker"):
        load_code2wav(tmp_path / "mute", "cpu", "float32")
    Qwen3OmniMoeCode2WavConfig().save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError):
        load_code2wav(tmp_path / "other", "cpu", "float32")


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({}, "no codes"),
        ({"codes": np.zeros((2, 4), dtype=np.int64), "first_frame": 0}, "4 codes"),
        ({"codes": np.zeros((2, 3), dtype=np.float32), "first_frame": 0}, "integers"),
        ({"codes": np.full((2, 3), 32), "first_frame": 0}, r"\[0, 32\)"),
        ({"codes": np.full((2, 3), -1), "first_frame": 0}, r"\[0, 32\)"),
        ({"codes": np.zeros((2, 3), dtype=np.int64), "first_frame": 1}, "start at frame 1"),
    ],
)
def test_wrong_payloads_are_refused(network: Code2WavNetwork, payload: dict[str, Any], message: str) -> None:
    stage = Code2WavStage(network)
    stage.open(request("r"))
    with pytest.raises(ProtocolError, match=message):
        stage.receive(StageChunk(StageKey("r.0"), 0, False, payload))
