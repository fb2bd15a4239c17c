"""`weft bench engine`: tokens per second of one worker, where a step's time goes, and the same work on what a user
would pick instead (`--against transformers,transformers-serve,vllm`), in turn, in one run, medians of the rounds."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.config import ClusterConfig
from fabric.errors import ConfigError
from loadtest.benches.report import Bar, BenchResult
from loadtest.benches.synthetic import VOCAB, qwen2_180m
from loadtest.benches.worker_load import Load, Measured, TimedModel, prompts_of, run_load, worker_of

PEERS = Path(__file__).parent / "peers"
SPLIT = ("schedule", "inputs and sample", "embed", "forward", "logits", "commit")


class Peer:
    """A peer's process. `run` gives tokens per second of one round."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == "ready":
                return
        raise ConfigError(f"the peer {name} did not start (exit status {self._process.wait()})")

    def run(self, load: Load, seed: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        prompts = prompts_of(load, VOCAB, seed).tolist()
        self._process.stdin.write(json.dumps({"prompts": prompts, "output_tokens": load.output_tokens}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if answer["tokens"] != load.concurrency * load.output_tokens:
            raise ConfigError(f"{self.name} made {answer['tokens']} tokens, not the same work")
        return float(answer["tokens"] / answer["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="weft bench engine")
    parser.add_argument("--model", type=Path, help="model directory (default: a random Qwen2 of 180M parameters)")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", default="", help="comma list of transformers, transformers-serve, vllm")
    parser.add_argument("--vllm-python", default=sys.executable, help="Python of the environment that has vLLM")
    return parser.parse_args(arguments)


def run(arguments: Sequence[str] = ()) -> BenchResult:
    """Raises ConfigError when a peer can't be started."""
    chosen = options(arguments)
    return asyncio.run(_run(chosen, chosen.model or qwen2_180m()))


def _peer(name: str, chosen: argparse.Namespace, model_dir: Path) -> Peer:
    common = [str(model_dir), chosen.dtype]
    if name == "transformers":
        return Peer(name, [sys.executable, str(PEERS / "transformers_static.py"), *common, str(chosen.threads)])
    if name == "transformers-serve":
        return Peer(name, [sys.executable, str(PEERS / "transformers_serve.py"), *common, str(_free_port())])
    if name == "vllm":
        return Peer(name, [chosen.vllm_python, str(PEERS / "vllm_engine.py"), *common, str(chosen.threads)])
    raise ConfigError(f"no peer {name!r}; there are: transformers, transformers-serve, vllm")


async def _run(chosen: argparse.Namespace, model_dir: Path) -> BenchResult:
    load = Load(chosen.concurrency, chosen.prompt_tokens, chosen.output_tokens)
    blocks = load.concurrency * ((load.prompt_tokens + load.output_tokens) // 16 + 2) * 2
    config = ClusterConfig.model_validate(
        {
            "model": {"path": model_dir, "dtype": chosen.dtype},
            "workers": {"num_blocks": blocks, "max_step_tokens": 1024, "max_sequences": max(64, load.concurrency)},
            "threads_per_replica": chosen.threads,
        }
    )
    ours: list[Measured] = []
    rates: dict[str, list[float]] = {}
    peers: list[Peer] = []
    try:
        for name in filter(None, chosen.against.split(",")):
            peers.append(_peer(name, chosen, model_dir))  # noqa: PERF401 -- those that started are closed if one fails
        async with worker_of(config, is_timed=True) as (worker, model):
            assert model is not None
            await run_load(worker, load._replace(output_tokens=4), VOCAB, seed=0)
            for peer in peers:
                peer.run(load._replace(output_tokens=4), seed=0)
            before = _sums(worker, model)
            for number in range(1, chosen.rounds + 1):
                ours.append(await run_load(worker, load, VOCAB, seed=number))
                for peer in peers:
                    rates.setdefault(peer.name, []).append(await asyncio.to_thread(peer.run, load, number))
            after = _sums(worker, model)
    finally:
        for peer in peers:
            peer.close()
    split = {name: after[name] - before[name] for name in SPLIT}
    return _result(load, Measured(*map(statistics.median, zip(*ours, strict=True))), rates, split)


def _sums(worker: Any, model: TimedModel) -> dict[str, float]:
    """Seconds so far per part of a step. What `execute` does beside the model is building inputs and drawing."""
    times = worker.step_times
    inside = model.embed_s + model.forward_s + model.logits_s
    return {
        "schedule": times.schedule_s,
        "inputs and sample": times.execute_s - inside,
        "embed": model.embed_s,
        "forward": model.forward_s,
        "logits": model.logits_s,
        "commit": times.commit_s,
    }


def _result(load: Load, ours: Measured, rates: dict[str, list[float]], split: dict[str, float]) -> BenchResult:
    rows = [["engine", "output tokens/s", "TTFT p50 (s)", "TPOT (ms)"]]
    rows.append(["weft", f"{ours.tokens_per_s:.1f}", f"{ours.ttft_s:.2f}", f"{ours.tpot_s * 1000:.1f}"])
    medians = {name: statistics.median(taken) for name, taken in rates.items()}
    rows += [[name, f"{rate:.1f}", "", ""] for name, rate in medians.items()]
    total = sum(split.values())
    shares = {name: seconds / total for name, seconds in split.items()}
    rows += [[f"step: {name}", f"{share:.1%}", "", ""] for name, share in shares.items()]
    bars = [Bar(f"weft over {name}", ours.tokens_per_s / rate, 1.0, "x") for name, rate in medians.items()]
    bars.append(
        Bar(
            "schedule + inputs + sample, share of a step",
            shares["schedule"] + shares["inputs and sample"],
            0.10,
            "",
            True,
        )
    )
    notes = [f"{load.concurrency} requests of {load.prompt_tokens} + {load.output_tokens} tokens at once; medians."]
    return BenchResult(rows, bars, notes)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
