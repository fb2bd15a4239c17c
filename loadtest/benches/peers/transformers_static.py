"""Runs transformers' own `generate` on one static batch, as a simple script would."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

import torch
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from loadtest.benches.peers.protocol import Prompts, serve_rounds
else:
    from protocol import Prompts, serve_rounds


def main(model_dir: str, dtype: str, num_threads: int, device: str) -> None:
    torch.set_num_threads(num_threads)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(device).eval()

    @torch.inference_mode()
    def generate(prompts: Prompts, output_tokens: int) -> int:
        ids = torch.tensor(prompts, device=device)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_tokens,
            min_new_tokens=output_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return int(out.shape[1] - ids.shape[1]) * ids.shape[0]

    serve_rounds(generate)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
