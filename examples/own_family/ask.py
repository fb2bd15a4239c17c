"""Asks a cluster that runs with `weft_mistral`, and compares its tokens with those of transformers.

The weights are random, so the answer means nothing. But both have to compute the same, token for token.

    .venv/bin/python examples/own_family/ask.py /tmp/tiny-mistral
    .venv/bin/python examples/own_family/ask.py /tmp/tiny-mistral http://127.0.0.1:9000   # another address
"""

import argparse
from pathlib import Path

import httpx
import torch
from transformers import MistralForCausalLM

NUM_TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares a cluster with transformers.")
    parser.add_argument("model", type=Path, help="is the model directory that the cluster serves")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="is the URL of the cluster")
    arguments = parser.parse_args()

    body = {
        "model": arguments.model.name,
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = httpx.post(f"{arguments.url}/v1/chat/completions", json=body, timeout=120)
    answer = response.raise_for_status().json()
    ours = answer["choices"][0]["token_ids"]
    print(f"Weft:         {ours}")

    model = MistralForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    prompt = torch.tensor([answer["prompt_token_ids"]])
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_TOKENS, do_sample=False)
    theirs = tokens[0, prompt.shape[1] :].tolist()
    print(f"transformers: {theirs}")
    print("The tokens are equal." if ours == theirs else "The tokens differ.")


if __name__ == "__main__":
    main()
