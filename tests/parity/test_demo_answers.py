"""Tests that the shipped checkpoint answers correctly, and that the cluster answers as transformers does.

A manual test has shown that a bad checkpoint fails. With the untrained weights of `build_demo_checkpoint`, no answer is
correct. With the first layer's `down_proj` of the shipped weights set to zero, 64 % of the answers about pictures and
66 % of the others are correct.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from reference_model import Comparison, ReferenceModel
from transformers import AutoTokenizer

from deploy.config import ClusterConfig
from deploy.demo import ask as wire
from deploy.demo.build import demo_checkpoint
from deploy.demo.drawing.facts import Sample
from deploy.demo.evaluate import GOAL, fresh_samples
from deploy.demo.tasks.catalogue import TASKS
from deploy.testing import in_process_cluster

pytestmark = pytest.mark.torch

NUM_QUESTIONS = 50
MAX_TOKENS = 32
SEED = 97
PICTURE_TASKS = [task for task in TASKS if task.modality == "image"]
WORD_TASKS = [task for task in TASKS if task.modality == "text"]


def questions(tasks: list[Any], num_questions: int) -> list[Sample]:
    """Takes questions from the tasks in turn."""
    per_task = -(-num_questions // len(tasks))
    columns = zip(*(fresh_samples(task, per_task, SEED) for task in tasks), strict=True)
    return [sample for column in columns for sample in column][:num_questions]


PICTURES = questions(PICTURE_TASKS, NUM_QUESTIONS)
WORDS = questions(WORD_TASKS, 12)


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    return ReferenceModel(demo_checkpoint())


def is_right(reference: ReferenceModel, tokenizer: Any, sample: Sample) -> bool:
    answer = reference.answer(wire.messages(sample), MAX_TOKENS)
    return bool(tokenizer.decode(answer.token_ids, skip_special_tokens=True) == sample.answer)


def test_pictures_are_answered_rightly_by_transformers(reference: ReferenceModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint())
    right = [is_right(reference, tokenizer, sample) for sample in PICTURES]
    assert np.mean(right) >= GOAL, [sample.task for sample, ok in zip(PICTURES, right, strict=True) if not ok]


def test_text_is_answered_rightly_by_transformers(reference: ReferenceModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint())
    assert all(is_right(reference, tokenizer, sample) for sample in WORDS)


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("max_step_tokens", [16, 4096], ids=["chunked", "whole"])
@pytest.mark.parametrize("num_at_once", [1, 16], ids=["alone", "batched"])
async def test_the_cluster_answers_the_same(
    num_at_once: int, max_step_tokens: int, prefix_cache: bool, reference: ReferenceModel
) -> None:
    workers = {"replicas": 1, "max_step_tokens": max_step_tokens, "prefix_cache": prefix_cache}
    config = ClusterConfig.model_validate({"workers": workers, "encoders": {"decode_processes": 0}})
    comparison, turnstile = Comparison(), asyncio.Semaphore(num_at_once)
    async with in_process_cluster(config) as (_, client):

        async def ask(sample: Sample) -> int:
            messages = wire.messages(sample)
            body = {
                "model": "weft-demo",
                "messages": messages,
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
                "return_token_ids": True,
            }
            async with turnstile:
                response = await client.post("/v1/chat/completions", json=body)
            answer = response.json()
            assert response.status_code == 200, answer
            expected = reference.answer(messages, MAX_TOKENS)
            tokens = answer["choices"][0]["token_ids"]
            comparison.check(expected, answer["prompt_token_ids"], tokens, sample.task)
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        asked = [*PICTURES, *WORDS]
        await asyncio.gather(*map(ask, asked))
        again = await asyncio.gather(*map(ask, asked))
    comparison.finish()
    assert (sum(again) > 0) == prefix_cache
