"""Trains small tokenizers of each kind that checkpoints have, and writes directories as Llama-2 and LLaVA-1.5 have
them. Nothing is downloaded."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer, UnigramTrainer

SENTENCES = [
    "Hello there, how are you today?",
    "What is in this picture? A cat sits on a red mat, and a dog looks at it.",
    "[INST] Please say where the answer is. [/INST] The answer is in the box.",
    "USER: Compare this with that please. ASSISTANT: They are not the same.",
    "<<SYS>> You are a helpful assistant. <</SYS>> System, user and assistant.",
    'Naïve café: 12.5% of {"name": "value", "n": [1, 2, 3]} and <b>bold</b>',
    "the end of it is near the start of it; the rest is rest, and this is this",
] * 4
CONTROL_TOKENS = ["<unk>", "<s>", "</s>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
NUM_TOKENS = 600

LLAMA2_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'system' %}{{ '<<SYS>>\\n' + message['content'].strip() + '\\n<</SYS>>\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
LLAVA_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] + ' ' }}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


@functools.cache
def _trained_merges() -> dict[str, Any]:
    """Returns the JSON of a trained BPE tokenizer with byte tokens and Llama-2's normaliser."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    # The corpus is split before each "▁", so that no token reaches over a blank.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
    special = [*CONTROL_TOKENS, *BYTE_TOKENS]
    trainer = BpeTrainer(vocab_size=NUM_TOKENS, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in CONTROL_TOKENS]
    content["pre_tokenizer"] = None
    return content


def _piece_decoder() -> decoders.Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def _with_beginning(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def legacy_bpe(normalized: bool = False) -> Tokenizer:
    """Returns a tokenizer as in the tokenizer.json of Llama-2: "▁" stands before the text and after each control token.
    `normalized` is the flag of the control tokens, which is true in some versions of the file."""
    content = _trained_merges()
    added = [{**token, "normalized": normalized} for token in content["added_tokens"]]
    tokenizer = Tokenizer.from_str(json.dumps({**content, "added_tokens": added}))
    tokenizer.decoder = _piece_decoder()
    return _with_beginning(tokenizer)


def metaspace_bpe(prepend_scheme: str = "first") -> Tokenizer:
    """Returns a tokenizer as in newer versions of the file: "▁" stands before the text only."""
    tokenizer = legacy_bpe()
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    return tokenizer


def bpe_with_added_words() -> Tokenizer:
    """Returns Llama-2's tokenizer with added tokens that are words. As after each added token, a "▁" follows them."""
    tokenizer = legacy_bpe()
    words = [AddedToken(text, normalized=False, special=False) for text in ("  ", "s the", "日本", "▁a▁")]
    tokenizer.add_tokens(words)
    return tokenizer


@functools.cache
def _trained_pieces() -> tuple[tuple[str, float], ...]:
    """Returns the vocabulary of a trained Unigram tokenizer. Two trainings may order pieces of the same score
    differently."""
    trained = Tokenizer(Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = UnigramTrainer(vocab_size=300, special_tokens=CONTROL_TOKENS, unk_token="<unk>", show_progress=False)
    trained.train_from_iterator(SENTENCES, trainer)
    return tuple((text, score) for text, score in json.loads(trained.to_str())["model"]["vocab"])


def unigram(has_byte_fallback: bool = True) -> Tokenizer:
    """Returns a Unigram tokenizer with compatibility normalisation (NFKC) and the decoder Metaspace. With byte
    fallback, the decoder is that of Llama-2."""
    bytes_ = [(text, 0.0) for text in BYTE_TOKENS] if has_byte_fallback else []
    tokenizer = Tokenizer(Unigram([*_trained_pieces(), *bytes_], 0, has_byte_fallback))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = _piece_decoder() if has_byte_fallback else decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL_TOKENS])
    return _with_beginning(tokenizer)


def byte_level_bpe() -> Tokenizer:
    """Returns a byte-level tokenizer in the style of Llama 3: its pre-tokenizer is a sequence."""
    tokenizer = Tokenizer(BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=NUM_TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
    beginning = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[beginning])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


KIND_TO_TOKENIZER = {
    "byte_level": byte_level_bpe,
    "legacy": legacy_bpe,
    "normalized": functools.partial(legacy_bpe, normalized=True),
    "added": bpe_with_added_words,
    "first": metaspace_bpe,
    "always": functools.partial(metaspace_bpe, "always"),
    "never": functools.partial(metaspace_bpe, "never"),
    "unigram": unigram,
    "unigram_metaspace": functools.partial(unigram, has_byte_fallback=False),
}
"""Maps the name of a kind to the function that makes a tokenizer of it."""


def write_directory(directory: Path, tokenizer: Tokenizer, template: str, model_type: str, **settings: object) -> Path:
    """Writes the files of a checkpoint that concern text. `settings` are keys of tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "LlamaTokenizer", **names, **settings}
    config = {key: value for key, value in config.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, "eos_token_id": 2}))
    return directory


def write_llama2(directory: Path, tokenizer: Tokenizer | None = None, **settings: object) -> Path:
    """Writes a directory like that of a Llama-2 chat model."""
    return write_directory(directory, tokenizer or legacy_bpe(), LLAMA2_TEMPLATE, "llama", **settings)


def llava_tokenizer() -> Tokenizer:
    """Returns Llama-2's tokenizer with LLaVA's two tokens behind its vocabulary."""
    tokenizer = legacy_bpe()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<image>", "<pad>")])
    return tokenizer


def write_llava(directory: Path, **settings: object) -> Path:
    """Writes a directory like that of LLaVA-1.5, whose placeholder has the first id behind the vocabulary of Llama."""
    return write_directory(directory, llava_tokenizer(), LLAVA_TEMPLATE, "llava", **settings)


# ------------------------------------------------------------ the file tokenizer.model


def sentencepiece_file(tokenizer: Tokenizer, model_type: int) -> bytes:
    """Returns a tokenizer.model with the tokenizer's vocabulary, as SentencePiece writes it."""
    model = json.loads(tokenizer.to_str())["model"]
    if isinstance(model["vocab"], list):
        return pieces_file([(text, score) for text, score in model["vocab"]], model_type, bool(model["byte_fallback"]))
    by_id = sorted(model["vocab"].items(), key=lambda item: item[1])
    scored = [(text, float(-index)) for text, index in by_id]
    return pieces_file(scored, model_type, bool(model["byte_fallback"]))


def pieces_file(scored: Sequence[tuple[str, float]], model_type: int, has_byte_fallback: bool) -> bytes:
    """Returns a tokenizer.model with these pieces and their scores."""
    data = b"".join(_message(1, _piece(text, score)) for text, score in scored)
    trainer = _number(3, model_type) + _number(35, int(has_byte_fallback)) + _number(40, 0)
    rules = _message(1, b"identity") + _number(3, 1) + _number(4, 0)
    return data + _message(2, trainer) + _message(3, rules)


def _piece(text: str, score: float) -> bytes:
    kind = {"<unk>": 2, "<s>": 3, "</s>": 3}.get(text, 6 if text in BYTE_TOKENS else 1)
    return _message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + (_number(3, kind) if kind != 1 else b"")


def _varint(value: int) -> bytes:
    groups: list[int] = []
    while not groups or value:
        groups.append(value & 0x7F)
        value >>= 7
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content
