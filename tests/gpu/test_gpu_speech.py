"""Checks speech on a GPU: the talker's codes and code2wav's samples equal those of the host. Prints what chunks cost
with the sizes of the 30B model.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_rig import Text
from speech_line import Answer, SpeechLine
from speech_reference import SpeechReference
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from fabric.contracts import MemberId, RequestId, StageRequest
from llm_workers.speech import Code2WavStage, load_code2wav, load_talker
from llm_workers.speech.code2wav_network import Code2WavNetwork
from llm_workers.stages import StageChunk, StageSpan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CHUNK_FRAMES, CHUNK_S = 25, 2.0


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Answer], list[np.ndarray], list[np.ndarray]]:
    """Returns a checkpoint, and the reference's answers with their codes and samples, computed on the host."""
    reference = SpeechReference(tmp_path_factory.mktemp("omni"))
    answers = [reference.ask(Text(start, 4 + start)) for start in range(6)]
    return (
        reference.directory,
        [each.answer for each in answers],
        [each.codes for each in answers],
        [each.samples for each in answers],
    )


def test_codes_and_samples_are_those_of_the_host(
    spoken: tuple[Path, list[Answer], list[np.ndarray], list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convolutions of float32 round to TF32 by default, which the samples show."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    directory, answers, codes, samples = spoken
    talker = load_talker(directory, "cuda", "float32", (200, 8))
    line = SpeechLine(talker, load_code2wav(directory, "cuda", "float32"))
    calls = [line.open(f"r{number}", answer) for number, answer in enumerate(answers)]
    line.finish()
    for call, expected_codes, expected in zip(calls, codes, samples, strict=True):
        np.testing.assert_array_equal(np.concatenate(call.codes), expected_codes)
        made = np.concatenate(call.samples)
        assert made.shape == expected.shape
        level = float(np.sqrt(np.mean(expected**2)))
        assert np.abs(made - expected).max() <= 1e-3 * level


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_chunks_costs_less_than_its_chunks(dtype: torch.dtype) -> None:
    """The network has the sizes of the 30B model, with random weights."""
    config = Qwen3OmniMoeConfig().code2wav_config
    torch.manual_seed(0)
    with torch.device("cuda"):
        network = Qwen3OmniMoeCode2Wav(config).to(dtype).eval()
    times = {size: chunk_s(Code2WavStage(Code2WavNetwork(network)), config, size) for size in (1, 8, 64)}
    for size, seconds in times.items():
        print(f"code2wav, {dtype}, batch {size}: {1000 * seconds:.1f} ms for {size * CHUNK_S:.0f} s of sound")
    assert times[64] < 64 * times[1] / 1.3
    assert times[8] < 8 * times[1]


def chunk_s(stage: Code2WavStage, config: Any, size: int, num_chunks: int = 6) -> float:
    """Returns the median time of a step that decodes a chunk of each of `size` requests."""
    rng = np.random.default_rng(0)
    shape = (CHUNK_FRAMES, config.num_quantizers)
    requests = [
        StageRequest(RequestId(f"r{number}"), 0, MemberId("router"), "", 2, (0.0, str(number)))
        for number in range(size)
    ]
    taken: list[float] = []
    for request in requests:
        stage.open(request)
    for number in range(num_chunks):
        first = number * CHUNK_FRAMES
        for request in requests:
            codes = rng.integers(0, config.codebook_size, shape)
            payload = {"codes": codes, "first_frame": first}
            stage.receive(StageChunk(request.key, number, number == num_chunks - 1, payload))
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        none = np.empty(0, dtype=np.int64)
        stage.execute([StageSpan(request.key, first, CHUNK_FRAMES, none) for request in requests])
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started_s)
    for request in requests:
        stage.close(request.key)
    return float(np.median(taken[1:]))
