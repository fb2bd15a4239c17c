"""Tests that the shipped demo is understood when it speaks, with transformers' own classes and stored recordings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from spoken_templates import SENTENCES, stored_judge
from tokenizers import Tokenizer
from transformers import Qwen3OmniMoeForConditionalGeneration

from deploy.demo.build import demo_checkpoint
from deploy.demo.drawing.facts import ChatTurn, Sample
from deploy.demo.speech.judges import Judge, features
from deploy.demo.speech.script import WORDS, script
from deploy.demo.speech.speaking import answer, load_voice, sound, speak
from deploy.demo.speech.speech_data import Ints
from deploy.demo.training.encoding import SampleEncoder

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def judge() -> Judge:
    return stored_judge()


@pytest.fixture(scope="module")
def model() -> Any:
    return load_voice(demo_checkpoint())


def ids(text: str) -> Ints:
    tokenizer = Tokenizer.from_file(str(demo_checkpoint() / "tokenizer.json"))
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids)


def test_words_and_sentences_that_were_not_learned_are_recognised(model: Any, judge: Judge) -> None:
    assert set(SENTENCES) <= set(script(0).held_out)
    texts = [*WORDS[::4], *SENTENCES]
    prompt = ids("<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n")
    codes = speak(model, prompt, [ids(text) for text in texts], "ethan")
    sounds = {text: features(sound(model, code)) for code, text in zip(codes, texts, strict=True)}
    right = {text: judge.words_of_parts(said, [text]) for text, said in sounds.items()}
    assert sum(all(right[word]) for word in WORDS[::4]) >= len(WORDS[::4]) - 1, right
    assert sum(sum(right[text]) for text in SENTENCES) >= 8, right  # There are nine words.


def test_the_whole_model_answers_in_speech(model: Any, judge: Judge) -> None:
    sample = Sample("repeat", (ChatTurn("user", ("Say blue.",)),), "blue")
    tokens, samples = answer(model, SampleEncoder(demo_checkpoint()), sample, "ethan")
    assert tokens == [*ids("blue<|im_end|>")]
    assert judge.word(features(samples)) == "blue"
    assert 0.01 < np.sqrt(np.mean(samples**2)) < 0.2


def test_no_weight_of_the_whole_model_is_missing_or_left_over() -> None:
    _, info = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        demo_checkpoint(), dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
