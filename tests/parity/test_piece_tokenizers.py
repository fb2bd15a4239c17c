"""Tests that prompts and texts of SentencePiece-like checkpoints (Llama-2, LLaVA-1.5) equal those of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from piece_tokenizers import (
    KIND_TO_TOKENIZER,
    LLAMA2_TEMPLATE,
    SENTENCES,
    byte_level_bpe,
    legacy_bpe,
    metaspace_bpe,
    unigram,
    write_directory,
    write_llama2,
    write_llava,
)
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from modalities.family import FeatureRows, ItemPlan, expand_pieces
from modalities.text import IncrementalDetokenizer, TextCodec

pytestmark = pytest.mark.torch

PLANS = [ItemPlan("image", (1, 1, 3), (3,), 3, (8, 8)) for _ in range(3)]
TEXTS = [
    "",
    " ",
    "Hi",
    " white  space \n\n",
    "\n\nnew lines\n",
    "It's 12.5% — naïve café, 日本語, 😀👩‍👩‍👧, \u212b e\u0301",
    "a < b | c > d, and <b>bold</b> <0x0A> ▁",
    "def f(x):\n    return {'a': x}\t# done\r\n",
    *SENTENCES[:7],
]
LLAMA2: dict[str, dict[str, Any]] = {
    "as in the hub": {"legacy": False, "add_bos_token": True, "add_eos_token": False},
    "legacy": {"legacy": True},
    "no settings": {},
    "without prefix": {"add_prefix_space": False},
    "with settings that the file overrules": {"add_bos_token": False, "add_eos_token": True},
    "as the file says": {"tokenizer_class": "PreTrainedTokenizerFast"},
    "no class": {"tokenizer_class": None},
    "code": {"tokenizer_class": "CodeLlamaTokenizer", "legacy": True},
}


def conversations(num: int, seed: int) -> list[list[dict[str, Any]]]:
    rng = random.Random(seed)
    roles = ["user", "assistant"] * 3
    return [[{"role": role, "content": rng.choice(TEXTS)} for role in roles[: rng.randint(1, 6)]] for _ in range(num)]


def check(directory: Path, num: int = 60) -> None:
    codec, tokenizer = TextCodec.load(directory), AutoTokenizer.from_pretrained(directory)
    for messages in conversations(num, seed=7):
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert codec.render(messages) == expected, messages
        if messages[-1]["role"] == "assistant":
            expected = tokenizer.apply_chat_template(messages, continue_final_message=True, return_dict=False)
            assert codec.render(messages, continue_final_message=True) == expected, messages
    rng = random.Random(5)
    for text in TEXTS:
        assert codec.encode_text_prompt(text) == tokenizer(text)["input_ids"]
        assert codec.encode_text_prompt(text, add_special_tokens=False) == codec.encode(text)
    for _ in range(num):
        ids = rng.choices(range(len(tokenizer)), k=rng.randint(0, 20)) + codec.encode(rng.choice(TEXTS))
        stream = IncrementalDetokenizer(codec)
        expected_text = tokenizer.decode(ids, skip_special_tokens=True)
        assert codec.decode(ids) == expected_text
        assert "".join([*(stream.push([token_id]) for token_id in ids), stream.flush()]) == expected_text


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", LLAMA2)
def test_llama2(tmp_path: Path, name: str, normalized: bool) -> None:
    """Tests files in which control tokens have the flag `normalized`, as some versions do. Where transformers ignores
    the file's normaliser, the flag changes nothing; where it doesn't, it takes control tokens for letters, and Weft
    does not."""
    is_rebuilt = name not in ("as the file says", "no class")
    if normalized and not is_rebuilt:
        check_control_tokens(write_llama2(tmp_path, legacy_bpe(normalized=True), **LLAMA2[name]))
        return
    check(write_llama2(tmp_path, legacy_bpe(normalized=normalized), **LLAMA2[name]))


def check_control_tokens(directory: Path) -> None:
    codec = TextCodec.load(directory)
    messages = [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")]
    ids = codec.render(messages)
    assert [token_id for token_id in ids if token_id in codec.special_token_ids] == [1, 2, 1]
    assert codec.decode(ids) == "[INST] Hi [/INST] Hi  [INST] Hi [/INST]"


@pytest.mark.parametrize(
    ("model_type", "make"),
    [("mistral", legacy_bpe), ("llama", metaspace_bpe), ("internlm2", legacy_bpe), ("t5", unigram)],
)
def test_other_directories(tmp_path: Path, model_type: str, make: Any) -> None:
    tokenizer: Tokenizer = make()
    kind = "PreTrainedTokenizerFast" if make is unigram else "LlamaTokenizer"
    check(write_directory(tmp_path, tokenizer, LLAMA2_TEMPLATE, model_type, tokenizer_class=kind))


def test_llama3(tmp_path: Path) -> None:
    """The tokenizer is byte-level, with sequences of pre-tokenizers and of post-processors."""
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "unk_token": None}
    kind = "PreTrainedTokenizerFast"
    check(write_directory(tmp_path, byte_level_bpe(), LLAMA2_TEMPLATE, "llama", tokenizer_class=kind, **names))


@pytest.mark.parametrize("kind", sorted(KIND_TO_TOKENIZER.keys() - {"normalized", "unigram_metaspace"}))
def test_text_that_a_family_writes_equals_that_in_the_whole_prompt(tmp_path: Path, kind: str) -> None:
    """Tests the numbers and times between the frames of a video, which transformers writes before it tokenises the
    prompt. Of the tokenizers that are left out, one merges letters over a line break, and the library takes the
    control tokens of the other for letters."""
    tokenizer = KIND_TO_TOKENIZER[kind]()
    kind_of_class = "PreTrainedTokenizerFast"
    names = {"bos_token": None, "eos_token": None, "unk_token": None} if kind == "byte_level" else {}
    directory = write_directory(tmp_path, tokenizer, "<s>", "llama", tokenizer_class=kind_of_class, **names)
    codec, reference = TextCodec.load(directory), AutoTokenizer.from_pretrained(directory)
    control = "<|eot_id|>" if kind == "byte_level" else "</s>"
    behind = codec.token_id(control)
    for text in ("Frame1: ", "\nFrame2: ", "<1.5 seconds>"):
        whole = reference(f"{control}{text}{control}", add_special_tokens=False)["input_ids"]
        assert codec.encode_inside(text, behind) == whole[1:-1], text
        whole = reference(f"{control}user\n{text}{control}", add_special_tokens=False)["input_ids"]
        assert codec.encode_inside("user\n", behind) + codec.encode_inside(text) == whole[1:-1], text


IN_ORDER = (
    "{% for message in messages %}USER: {% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %} ASSISTANT:{% endfor %}"
)


@pytest.mark.parametrize("kind", ["legacy", "first", "always", "never", "unigram"])
def test_pictures_between_texts_are_expanded_as_in_the_whole_prompt(tmp_path: Path, kind: str) -> None:
    """Tests the rule by which LLaVA's processor writes a prompt: it repeats the placeholder in the text."""
    tokenizer = KIND_TO_TOKENIZER[kind]()
    tokenizer.add_special_tokens([AddedToken("<image>", normalized=False, special=True)])
    directory = write_directory(tmp_path, tokenizer, IN_ORDER, "llava", tokenizer_class="PreTrainedTokenizerFast")
    codec, reference = TextCodec.load(directory), AutoTokenizer.from_pretrained(directory)
    image = codec.token_id("<image>")
    assert image is not None
    for text in TEXTS:
        parts = [{"type": "text", "text": text}, {"type": "image"}, {"type": "text", "text": text}, {"type": "image"}]
        messages = [{"role": "user", "content": [*parts, {"type": "image"}]}]
        written = reference.apply_chat_template(messages, tokenize=False).replace("<image>", "<image>" * 3)
        expanded = expand_pieces(
            codec.render(messages), {"image": image}, PLANS, lambda index: [FeatureRows(index, 0, 3)]
        )
        assert expanded.token_ids == reference(written, add_special_tokens=False)["input_ids"], text


def test_llava(tmp_path: Path) -> None:
    directory = write_llava(tmp_path)
    codec, tokenizer = TextCodec.load(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        parts = [{"type": "image"}, {"type": "text", "text": text}, {"type": "image"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": text}]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        ids = codec.render(messages)
        assert ids == expected
        assert ids.count(codec.token_id("<image>")) == 2
    assert codec.token_id("<image>") == codec.vocab_size - 2
