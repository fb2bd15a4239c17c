"""Runs `weft bench engine`: measures tokens per second of one worker and the parts of a step's time.

It runs the same work on alternatives that a user might choose (`--against transformers,transformers-serve,vllm`), in
turn, in one run, and takes medians of the rounds. Each engine chooses its own dtype for the bfloat16 weights unless
`--dtype` sets it; `vllm-float32` is vLLM with float32. The bench runs on a CUDA device if there is one; `--size 7b` is
a size meant for a GPU. `--images N` runs N requests at once with a picture each, through a whole cluster over HTTP.
`--host` measures only the host's share of a decode step, with a model that does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy import compose
from deploy.config import ClusterConfig
from fabric.contracts import ConfigError
from loadtest.bench_result import Bar, BenchResult, gpu_name
from loadtest.benches.chat_load import BenchLoad, Measured, run_load, worker_of
from loadtest.benches.engine_parts import PROMPT_TOKENS, forward_shares, splice_times
from loadtest.benches.peer_process import Peer, RoundsPeer, transformers_serve, vllm_serve
from loadtest.benches.synthetic import VOCAB, llava_180m, qwen2_5_vl_180m, qwen2_7b, qwen2_180m

if TYPE_CHECKING:
    from llm_workers.worker_service import WorkerService

PEERS = Path(__file__).parent / "peers"
MAX_STEP_TOKENS, GPU_MAX_STEP_TOKENS = 1024, 8192
BLOCK_SIZE, GPU_BLOCK_SIZE = 16, 256
"""`GPU_BLOCK_SIZE` is 256 because the kernel that reads pages in place on a GPU requires blocks of 256 tokens."""
MANY = BenchLoad(64, 64, 32)
"""With this load many short sequences run at once, so the cost of a step outside of its forward pass shows most
clearly."""
NAME_TO_BAR = {"transformers": 1.0, "vllm": 1.2, "vllm-float32": 1.2}
"""Holds the target ratio of Weft's tokens per second to the peer's."""
CPU_PEERS = ("transformers-serve", "vllm", "vllm-float32")
"""Names the peers that this bench starts on a CPU alone."""
SPLICE_BAR_S, SPLICE_BAR_RATIO = 0.3e-3, 4 / 0.3
"""Holds the targets for the splice of a prompt of 5,000 tokens. They come from the OmniConnector article
(docs/references.md), which compares with 4 ms in a loop and does not say how wide the rows are."""

Split = Mapping[str, float]


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="weft bench engine")
    parser.add_argument(
        "--model", type=Path, help="measures the model in this directory (default: random weights of --size)"
    )
    parser.add_argument("--size", default="180m", choices=["180m", "7b"], help="is the size of the random Qwen2 model")
    parser.add_argument("--device", default=default_device(), choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--images", type=int, default=0, metavar="N", help="sends N requests with a picture of 448 pixels each"
    )
    parser.add_argument(
        "--engine",
        default="weft",
        choices=["weft", "vllm"],
        help="with vllm, compares with vLLM's own server over HTTP",
    )
    parser.add_argument(
        "--host", action="store_true", help="times plan, inputs and commit with a model that computes nothing"
    )
    parser.add_argument(
        "--against",
        default="",
        help="compares with these peers, separated by commas: transformers, transformers-serve, vllm, vllm-float32",
    )
    parser.add_argument("--vllm-python", default=sys.executable, help="is the Python of an environment that has vLLM")
    parser.add_argument(
        "--transformers-python",
        default=sys.executable,
        help="is the Python of an environment that has transformers[serving]",
    )
    return parser.parse_args(arguments)


def run(arguments: Sequence[str] = ()) -> BenchResult:
    """Runs the bench that the arguments choose. Raises ConfigError when a peer can't be started."""
    chosen = options(arguments)
    if chosen.engine == "vllm":
        from loadtest.benches.served.vllm_bench import run_vllm_engine

        return run_vllm_engine(chosen)
    if chosen.host:
        from loadtest.benches.engine_host import run_host

        return run_host(chosen)
    if chosen.images:
        from loadtest.benches.engine_pictures import run_pictures

        model_dir = chosen.model or (qwen2_5_vl_180m() if "vllm" in chosen.against else llava_180m())
        peers = start_peers(chosen, model_dir, has_pictures=True)
        return asyncio.run(run_pictures(chosen, model_dir, peers))
    model_dir = chosen.model or (qwen2_7b() if chosen.size == "7b" else qwen2_180m())
    return asyncio.run(_run(chosen, model_dir, start_peers(chosen, model_dir)))


def start_peers(chosen: argparse.Namespace, model_dir: Path, *, has_pictures: bool = False) -> list[Peer]:
    """Starts the peers of `--against`, in order. Raises ConfigError if one does not start, and closes those that had
    started."""
    started: list[Peer] = []
    try:
        for name in filter(None, chosen.against.split(",")):
            started.append(_peer(name, chosen, model_dir, has_pictures))  # noqa: PERF401 -- see above
    except ConfigError:
        for peer in started:
            peer.close()
        raise
    return started


def _peer(name: str, chosen: argparse.Namespace, model_dir: Path, has_pictures: bool) -> Peer:
    if chosen.device == "cuda" and name in CPU_PEERS:
        raise ConfigError(f"the peer {name!r} runs only on a CPU here; use --device cpu, or the peer transformers")
    if name == "transformers-serve":
        python = chosen.transformers_python
        return transformers_serve(python, model_dir, chosen.dtype, chosen.threads, has_pictures=has_pictures)
    dtype = "float32" if name == "vllm-float32" else chosen.dtype
    if name in ("vllm", "vllm-float32") and has_pictures:
        return vllm_serve(name, chosen.vllm_python, model_dir, dtype, chosen.threads)
    name_to_command = {
        "transformers": [sys.executable, str(PEERS / "transformers_static.py")],
        "vllm": [chosen.vllm_python, str(PEERS / "vllm_engine.py")],
        "vllm-float32": [chosen.vllm_python, str(PEERS / "vllm_engine.py")],
    }
    if name not in name_to_command or has_pictures:
        known = "transformers-serve, vllm, vllm-float32, and without pictures transformers"
        raise ConfigError(f"there is no peer {name!r} here; the peers are {known}")
    return RoundsPeer(name, [*name_to_command[name], str(model_dir), dtype, str(chosen.threads), chosen.device])


async def _run(chosen: argparse.Namespace, model_dir: Path, peers: Sequence[Peer]) -> BenchResult:
    load = BenchLoad(chosen.concurrency, chosen.prompt_tokens, chosen.output_tokens)
    config, _ = compose.open_model(_config(chosen, model_dir, load))
    ours: list[Measured] = []
    rates: dict[str, list[float]] = {peer.name: [] for peer in peers}
    try:
        async with worker_of(config) as worker:
            await run_load(worker, load._replace(output_tokens=4), VOCAB, seed=0)
            for peer in peers:
                await asyncio.to_thread(peer.run, load._replace(output_tokens=4), 0)
            before = worker.seconds_by_part()
            for number in range(1, chosen.rounds + 1):
                ours.append(await run_load(worker, load, VOCAB, seed=number))
                for peer in peers:
                    rates[peer.name].append(await asyncio.to_thread(peer.run, load, number))
            split = shares_since(before, worker)
            await run_load(worker, MANY, VOCAB, seed=0)
            before = worker.seconds_by_part()
            await run_load(worker, MANY, VOCAB, seed=1)
            many = shares_since(before, worker)
    finally:
        for peer in peers:
            peer.close()
    medians = {name: statistics.median(taken) for name, taken in rates.items()}
    result = _result(load, Measured(*map(statistics.median, zip(*ours, strict=True))), medians)
    _add_splits(result, split, many)
    _add_parts(result, config, load)
    return replace(result, variant=_variant(chosen, config.model.dtype))


def _variant(chosen: argparse.Namespace, dtype: str) -> str:
    """Names the file of results after the options that differ from their defaults: `h100-7b`, `float32`."""
    names = [name for name, default in ((chosen.size, "180m"), (dtype, "bfloat16")) if name != default]
    return "-".join(filter(None, [gpu_name(chosen.device), *names]))


def _config(chosen: argparse.Namespace, model_dir: Path, load: BenchLoad) -> ClusterConfig:
    most = max(load.concurrency * (load.prompt_tokens + load.output_tokens), MANY.concurrency * 96)
    is_gpu = chosen.device == "cuda"
    block_size = GPU_BLOCK_SIZE if is_gpu else BLOCK_SIZE
    workers = {
        "num_blocks": 2 * (most // block_size + 2 * max(load.concurrency, MANY.concurrency)),
        "block_size": block_size,
        "max_step_tokens": GPU_MAX_STEP_TOKENS if is_gpu else MAX_STEP_TOKENS,
        "max_sequences": max(MANY.concurrency, load.concurrency),
        "device": chosen.device,
        "gpus_per_replica": int(is_gpu),
        "cuda_graphs": "auto" if is_gpu else "off",
    }
    model = {"path": model_dir, "dtype": chosen.dtype}
    return ClusterConfig.model_validate({"model": model, "workers": workers, "threads_per_replica": chosen.threads})


def shares_since(before: Split, worker: WorkerService) -> Split:
    taken = {name: seconds - before[name] for name, seconds in worker.seconds_by_part().items()}
    total = sum(taken.values())
    return {name: seconds / total for name, seconds in taken.items()}


def _result(load: BenchLoad, ours: Measured, medians: dict[str, float]) -> BenchResult:
    rows = [["engine", "output tokens/s", "TTFT p50 (s)", "TPOT (ms)"]]
    rows.append(["weft", f"{ours.tokens_per_s:.1f}", f"{ours.ttft_s:.2f}", f"{ours.tpot_s * 1000:.1f}"])
    rows += [[name, f"{rate:.1f}", "", ""] for name, rate in medians.items()]
    bars = [
        Bar(f"weft over {name}", ours.tokens_per_s / rate, NAME_TO_BAR[name], "x") for name, rate in medians.items()
    ]
    notes = [f"{load.concurrency} requests of {load.prompt_tokens} + {load.output_tokens} tokens at once; medians."]
    return BenchResult(rows, bars, notes)


def _add_splits(result: BenchResult, split: Split, many: Split) -> None:
    result.rows.extend([f"step: {name}", f"{share:.1%}", "", ""] for name, share in split.items())
    name = f"schedule + inputs, share of a step at {MANY.concurrency} running sequences"
    result.bars.append(Bar(name, many["schedule"] + many["inputs"], 0.10, "", is_max=True))
    result.notes.append(f"{MANY.concurrency} sequences: " + ", ".join(f"{k} {v:.1%}" for k, v in many.items()))


def _add_parts(result: BenchResult, config: ClusterConfig, load: BenchLoad) -> None:
    shares = forward_shares(config, load.concurrency, load.prompt_tokens, load.prompt_tokens + load.output_tokens // 2)
    for step, kind_to_share in shares.items():
        result.rows.extend([f"{step} forward: {kind}", f"{share:.1%}", "", ""] for kind, share in kind_to_share.items())
    ours_s, loop_s, _ = splice_times()
    result.rows.append([f"splice of {PROMPT_TOKENS:,} tokens (ms)", f"{ours_s * 1e3:.2f}", "", ""])
    result.rows.append(["the same in a loop (ms)", f"{loop_s * 1e3:.2f}", "", ""])
    result.bars.append(Bar(f"splice of {PROMPT_TOKENS:,} tokens", ours_s * 1e3, SPLICE_BAR_S * 1e3, "ms", is_max=True))
    result.bars.append(Bar("splice over the loop", loop_s / ours_s, SPLICE_BAR_RATIO, "x"))
