"""Measures the host's share of a decode step around a model that does nothing: Weft's, and vLLM's own where it is
installed.

Weft's share is `plan_step`, the runner's inputs and `commit`. vLLM's share is its scheduler's `schedule` and
`update_from_output`, and its runner's state, inputs and attention metadata between them; the time in which vLLM writes
sampled tokens into its own batch is not counted. Times are CPU times of the thread, in one run, and means over steps in
which every sequence fills blocks of 16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fabric.contracts import (
    ConfigError,
    GenerateRequest,
    MemberId,
    RequestId,
    SamplingParams,
    StopConditions,
    SystemClock,
)
from llm_workers.scheduling import Scheduler
from llm_workers.worker_config import WorkerConfig
from loadtest.bench_result import Bar, BenchResult
from modalities.family import Positions

if TYPE_CHECKING:
    import torch

PEER = Path(__file__).parent / "peers" / "vllm_host.py"
NUM_SEQUENCES = (64, 256, 1024)
BLOCK_SIZES = (16, 256)
SMALLEST_VLLM_BLOCK = 32
"""vLLM's attention on a CPU takes multiples of this block size. Weft's blocks of 16 are compared with vLLM's blocks of
this size, which cost vLLM less time than blocks of 16 would."""
PROMPT_TOKENS = 256
NUM_STEPS = 32
HEAD_DIM = 32
_TINY: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class HostTimes(NamedTuple):
    """Holds the seconds of one step."""

    plan_s: float
    inputs_s: float
    commit_s: float

    @property
    def total_s(self) -> float:
        return sum(self)


class _Nothing:
    """Implements LanguageModel without computation and always samples token 1."""

    def __init__(self) -> None:
        import torch

        self.dtype, self.device = torch.bfloat16, torch.device("cpu")
        self._torch = torch

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._torch.zeros(len(token_ids), 1)

    def forward(self, embeddings: torch.Tensor, *arguments: Any) -> torch.Tensor:
        *_, wanted_rows = arguments
        return embeddings if wanted_rows is None else embeddings[wanted_rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._torch.zeros(len(hidden), 2)
        logits[:, 1] = 1.0
        return logits


def run_host(chosen: argparse.Namespace) -> BenchResult:
    """Runs the bench. Raises ConfigError when vLLM is chosen and can't be started."""
    is_beside_vllm = "vllm" in chosen.against.split(",")
    rows = [["sequences", "blocks of", "plan (ms)", "inputs (ms)", "commit (ms)", "sum (ms)", "vLLM's (ms)"]]
    bars = []
    for block_size in BLOCK_SIZES:
        with _vllm(chosen.vllm_python, block_size) if is_beside_vllm else _none() as peer:
            for num_sequences in NUM_SEQUENCES:
                ours = measure(num_sequences, block_size)
                cells = [f"{seconds * 1e3:.2f}" for seconds in (*ours, ours.total_s)]
                rows.append([str(num_sequences), str(block_size), *cells, ""])
                if peer is not None:
                    theirs_s = peer(num_sequences)
                    rows[-1][-1] = f"{theirs_s * 1e3:.2f}"
                    name = f"host's share at {num_sequences} sequences, blocks of {block_size}, over vLLM's"
                    bars.append(Bar(name, ours.total_s / theirs_s, 1.0, "x", is_max=True))
    notes = [f"Prompts of {PROMPT_TOKENS} tokens; means of {NUM_STEPS} steps that decode, CPU time of the thread."]
    if is_beside_vllm:
        notes.append(
            f"vLLM's blocks are of {SMALLEST_VLLM_BLOCK} where ours are of 16: its CPU attention takes no less."
        )
    return BenchResult(rows, bars, notes, variant="host")


def measure(num_sequences: int, block_size: int) -> HostTimes:
    """Measures Weft's share."""
    import torch

    from llm_workers.compute import PagedKV, ReferencedFeatures, Runner, select_backend
    from llm_workers.scheduling import FeatureReferences

    blocks_each = -(-(PROMPT_TOKENS + 2 * NUM_STEPS) // block_size) + 1
    config = WorkerConfig(
        block_size=block_size,
        num_blocks=num_sequences * blocks_each,
        max_step_tokens=8192,
        max_sequences=num_sequences,
    )
    model = _Nothing()
    kv = PagedKV(1, config.num_blocks, block_size, (1, HEAD_DIM), torch.bfloat16, torch.device("cpu"))
    runner = Runner(model, kv, ReferencedFeatures(FeatureReferences()), select_backend("auto", kv))
    scheduler = Scheduler(config, 4096, SystemClock())
    for number in range(num_sequences):
        request = _request(number)
        positions = Positions(np.arange(PROMPT_TOKENS, dtype=np.int64)[None], 0)
        scheduler.add(scheduler.prepare(request, positions))
    while scheduler.stats().num_decoding < num_sequences:
        plan = scheduler.plan_step()
        scheduler.commit(plan, runner.execute(plan))
    steps = []
    for _ in range(NUM_STEPS):
        begun_s = time.thread_time()
        plan = scheduler.plan_step()
        planned_s = time.thread_time()
        runner.prepare(plan)
        prepared_s = time.thread_time()
        result = runner.execute(plan)
        executed_s = time.thread_time()
        scheduler.commit(plan, result)
        steps.append(HostTimes(planned_s - begun_s, prepared_s - planned_s, time.thread_time() - executed_s))
    return HostTimes(*(statistics.fmean(column) for column in zip(*steps, strict=True)))


def _request(number: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(f"r{number}"),
        attempt=0,
        router_id=MemberId("bench"),
        router_address="local://bench",
        token_ids=tuple((number + place) % 100 for place in range(PROMPT_TOKENS)),
        placeholders=(),
        media=(),
        sampling=SamplingParams(temperature=0.0),
        stop=StopConditions(max_tokens=4096, ignore_eos=True),
        age=(float(number), ""),
    )


@contextmanager
def _none() -> Iterator[None]:
    yield None


@contextmanager
def _vllm(python: str, block_size: int) -> Iterator[Any]:
    """Starts vLLM and yields a function from a number of sequences to vLLM's seconds per step. Raises ConfigError if
    vLLM does not start."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_TINY))
        command = [python, str(PEER), folder, str(max(block_size, SMALLEST_VLLM_BLOCK)), str(max(NUM_SEQUENCES))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        try:
            if not any(line.strip() == "ready" for line in stdout):
                raise ConfigError(f"the peer vllm did not start; its exit status is {process.wait()}")

            def seconds(num_sequences: int) -> float:
                asked = {"sequences": num_sequences, "prompt_tokens": PROMPT_TOKENS, "steps": NUM_STEPS}
                stdin.write(json.dumps(asked) + "\n")
                stdin.flush()
                part_to_s = json.loads(stdout.readline())
                return float(sum(part_to_s[part] for part in ("schedule", "inputs", "commit")))

            yield seconds
        finally:
            stdin.close()
            process.wait()
