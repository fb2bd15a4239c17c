"""Measures the host's share of vLLM's decode step: its own scheduler and input preparation around a model that does
nothing.

Everything runs in one process and one thread, so that thread times show what each part takes. The process reads lines
of `{"sequences": n, "prompt_tokens": p, "steps": s}`. It answers with means per step, in seconds, of `schedule`,
`inputs` (state of the batch, inputs and attention metadata), `commit` (of the scheduler alone) and `tokens` (writing
sampled tokens into the batch's own rows). It uses only the standard library and vLLM, because it runs in another
environment than Weft's.
"""

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

RUNNER_PARTS = {
    "_update_states": "inputs",
    "_prepare_inputs": "inputs",
    "_get_slot_mappings": "inputs",
    "_build_attention_metadata": "inputs",
    "_bookkeeping_sync": "tokens",
}
SCHEDULER_PARTS = {"schedule": "schedule", "update_from_output": "commit"}


class Timed:
    """Sums the thread time of each part in the present step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, method: str, part: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            begun = time.thread_time()
            try:
                return inner(*arguments, **named)
            finally:
                self.seconds[part] += time.thread_time() - begun

        setattr(owner, method, timed)


def main(model_dir: str, block_size: int, max_sequences: int) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM, SamplingParams

    out, sys.stdout = sys.stdout, sys.stderr
    llm = LLM(
        model_dir,
        dtype="bfloat16",
        load_format="dummy",
        block_size=block_size,
        max_num_seqs=max_sequences,
        max_model_len=2048,
        max_num_batched_tokens=8192,
        enable_prefix_caching=True,
        enforce_eager=True,
        async_scheduling=False,
        skip_tokenizer_init=True,
    )
    sys.stdout = out
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    hidden_size = runner.model_config.get_hidden_size()

    def do_nothing(input_ids: Any = None, positions: Any = None, *_: Any, **__: Any) -> Any:
        return torch.zeros(len(positions), hidden_size, dtype=torch.bfloat16)

    runner._model_forward = do_nothing
    timed = Timed()
    for owner, parts in ((runner, RUNNER_PARTS), (core.scheduler, SCHEDULER_PARTS)):
        for method, part in parts.items():
            timed.wrap(owner, method, part)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=asked["steps"] + 64, ignore_eos=True, detokenize=False)
        names = [f"r{number}" for number in range(asked["sequences"])]
        for number, name in enumerate(names):
            prompt = [(number + place) % 100 for place in range(asked["prompt_tokens"])]
            llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while core.scheduler.waiting or any(not one.num_output_tokens for one in core.scheduler.running):
            core.step()
        steps: list[dict[str, float]] = []
        for _ in range(asked["steps"]):
            timed.seconds.clear()
            core.step()
            steps.append(dict(timed.seconds))
        llm.llm_engine.abort_request(names)
        core.abort_requests([one.request_id for one in core.scheduler.running])
        core.step()
        print(json.dumps({part: statistics.fmean(one[part] for one in steps) for part in steps[0]}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
