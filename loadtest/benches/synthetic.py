"""Random checkpoints of a given size, for speed only: weights say nothing, shapes and dtypes are real."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

VOCAB = 32_000


def qwen2_180m() -> Path:
    """A Qwen2 of about 180M random parameters in bfloat16, with the demo model's tokenizer. Cached; seeded."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "bench-qwen2-180m-1"
    if (home / "config.json").is_file():
        return home
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from deploy.demo.build import demo_checkpoint

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=13,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        use_sliding_window=False,
        eos_token_id=0,
    )
    draft = home.with_suffix(f".{os.getpid()}")
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(draft)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(demo_checkpoint() / name, draft / name)
    (draft / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "pad_token_id": 0}))
    draft.replace(home)
    return home
