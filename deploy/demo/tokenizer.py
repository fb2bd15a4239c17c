"""Trains and writes the demo's tokenizer: a small byte-level BPE in the style of Qwen's, trained on the text of
`corpus.py`.

The module does not know the model. It needs `tokenizers` only: no torch and no transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from deploy.demo.corpus import sentences
from modalities.text.tokenizer_files import qwen_tokenizer

NUM_BPE_TOKENS = 2038
NUM_SENTENCES = 20_000

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
# These stand in the order of Qwen3-Omni's own ids.
SPECIAL_TOKENS = (
    END_OF_TEXT,
    TURN_START,
    TURN_END,
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Qwen3OmniMoeProcessor reads these attributes from its tokenizer.
NAME_TO_TOKEN = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
CHAT_TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")


class Vocabulary(NamedTuple):
    num_tokens: int
    special_token_to_id: dict[str, int]
    user_token_id: int
    """Holds the id of the word `user`; the model's config contains it."""


def train_tokenizer(seed: int) -> Tokenizer:
    """Returns a tokenizer trained on the corpus of `seed`. The special tokens take the ids after the learned ones."""
    tokenizer = qwen_tokenizer(BPE(fuse_unk=False, byte_fallback=False))
    trainer = BpeTrainer(
        vocab_size=NUM_BPE_TOKENS,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(sentences(NUM_SENTENCES, seed), trainer=trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def write_text_files(out_dir: Path, seed: int) -> Vocabulary:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `out_dir`."""
    tokenizer = train_tokenizer(seed)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "processor_class": "Qwen3OmniMoeProcessor",
        "model_max_length": 8192,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "split_special_tokens": False,
        "bos_token": None,
        "unk_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "extra_special_tokens": NAME_TO_TOKEN,
    }
    (out_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (out_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE_FILE.read_text(encoding="utf-8"), encoding="utf-8")
    token_to_id = tokenizer.get_vocab(with_added_tokens=True)
    ids = {token: token_to_id[token] for token in SPECIAL_TOKENS}
    user_token_id = tokenizer.encode("user").ids[0]
    return Vocabulary(tokenizer.get_vocab_size(with_added_tokens=True), ids, user_token_id)
