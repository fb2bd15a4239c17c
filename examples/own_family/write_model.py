"""Writes a tiny Mistral with random weights, and with the demo model's tokenizer and chat template.

A checkpoint of a real Mistral without a sliding window (from version 0.3 on) needs no such step.

    .venv/bin/python examples/own_family/write_model.py /tmp/tiny-mistral
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import MistralConfig, MistralForCausalLM

from deploy.demo.build import demo_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a tiny random Mistral.")
    parser.add_argument("directory", type=Path, help="is the directory in which the checkpoint is written")
    directory = parser.parse_args().directory
    demo = demo_checkpoint()
    config = json.loads((demo / "config.json").read_text())
    vocab_size = config["thinker_config"]["text_config"]["vocab_size"]
    torch.manual_seed(0)
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            sliding_window=None,
            initializer_range=0.2,  # With small weights, all next tokens would be almost equally likely.
        )
    )
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(demo / name, directory)
    print(f"The model is in {directory}.")


if __name__ == "__main__":
    main()
