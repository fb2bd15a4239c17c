"""Runs vLLM's engine (its CPU build on a machine without a GPU), with the prefix cache off because every prompt is new.

The engine gets the first `num_threads` cores and one process. By default it leaves one core to its other processes,
which on two cores halves its speed.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from loadtest.benches.peers.protocol import Prompts, serve_rounds
else:
    from protocol import Prompts, serve_rounds


def main(model_dir: str, dtype: str, num_threads: int) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # The environment of the bench's own process sets one OpenMP thread, because that process sets its threads by torch.
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{num_threads - 1}"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    out, sys.stdout = sys.stdout, sys.stderr
    llm = LLM(
        model_dir,
        dtype=dtype,
        max_model_len=1024,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
    )
    sys.stdout = out

    def generate(prompts: Prompts, output_tokens: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    serve_rounds(generate)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
