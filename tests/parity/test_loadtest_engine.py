"""Tests what the engine bench requests and what it counts. It does not measure speed."""

from __future__ import annotations

import base64
import json

import pytest
import torch
from transformers import AutoTokenizer

from deploy.config import ClusterConfig
from deploy.demo.build import demo_checkpoint
from deploy.local import serving
from fabric.contracts import ConfigError, UnitKey
from llm_workers.compute import PlacedSplice, Runner, splice_features
from llm_workers.scheduling import Splice
from loadtest.benches.chat_load import (
    BenchLoad,
    picture_messages,
    run_chats,
    transformers_body,
    weft_body,
    word_messages,
)
from loadtest.benches.engine_bench import options, start_peers
from loadtest.benches.engine_host import NUM_STEPS, measure
from loadtest.benches.engine_parts import forward_shares

LOAD = BenchLoad(concurrency=3, prompt_tokens=20, output_tokens=5)


def test_words_are_as_many_tokens_as_asked_for() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint())
    (first, *_), (other, *_) = (word_messages(LOAD, seed, demo_checkpoint()) for seed in (1, 2))
    assert len(tokenizer(first[0]["content"]).input_ids) == LOAD.prompt_tokens
    assert first != other


def test_pictures_are_all_different_and_the_same_for_every_server() -> None:
    urls = [messages[0]["content"][0]["image_url"]["url"] for messages in picture_messages(LOAD, 1)]
    assert len(set(urls)) == LOAD.concurrency
    assert base64.b64decode(urls[0].partition(",")[2]).startswith(b"\x89PNG")
    assert [messages[0]["content"][0]["image_url"]["url"] for messages in picture_messages(LOAD, 1)] == urls
    body = transformers_body("m", picture_messages(LOAD, 1)[0], 5)
    assert json.loads(body["generation_config"]) == {"min_new_tokens": 5, "do_sample": False}


async def test_a_round_counts_the_tokens_that_were_made() -> None:
    config = ClusterConfig.model_validate({"server": {"port": 0}, "encoders": {"decode_processes": 0}})
    async with serving(config) as (_, port):
        url = f"http://127.0.0.1:{port}"
        bodies = [weft_body("weft-demo", messages, 5) for messages in picture_messages(LOAD, 1)]
        assert (await run_chats(url, bodies)).tokens == 15
        with pytest.raises(ConfigError, match="answered with status 404"):
            await run_chats(url, [weft_body("another", picture_messages(LOAD, 1)[0], 5)])


def test_shares_of_a_forward_are_all_of_it() -> None:
    steps = forward_shares(ClusterConfig(), num_sequences=3, prompt_tokens=9, context=20)
    assert list(steps) == ["decode", "prefill"]
    for shares in steps.values():
        assert sum(shares.values()) == pytest.approx(1.0)
        assert min(shares[kind] for kind in ("products", "attention", "pages")) > 0


def test_a_peer_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no peer 'another'"):
        start_peers(options(["--against", "another"]), demo_checkpoint())


def test_the_splice_is_what_the_loop_would_write() -> None:
    features = {UnitKey("cat", 0): torch.randn(2, 6, 4), UnitKey("dog", 0): torch.randn(2, 3, 4)}

    class Landed:
        def feature(self, unit: UnitKey) -> torch.Tensor:
            return features[unit]

    (cat, dog), embeddings = features, torch.randn(12, 4).bfloat16()
    placed = [PlacedSplice(1, Splice(1, 4, cat, 2)), PlacedSplice(8, Splice(8, 3, dog, 0))]
    expected = embeddings.clone()
    for at, splice in placed:
        for row in range(splice.length):
            expected[at + row] = features[splice.unit][0, splice.row + row].bfloat16()
    rows, levels = splice_features(embeddings, placed, Landed())
    assert torch.equal(embeddings, expected)
    assert rows is not None
    assert rows.tolist() == [1, 2, 3, 4, 8, 9, 10]
    assert levels is not None
    assert torch.equal(levels[0], torch.cat([features[cat][1, 2:6], features[dog][1]]).bfloat16())
    assert splice_features(embeddings, [], Landed()) == (None, None)


def test_features_with_and_without_deeper_levels_share_a_step() -> None:
    """Uses pictures and sounds as in Qwen3-Omni: the rows of a sound have no levels to add."""
    cat, bark = UnitKey("cat", 0), UnitKey("bark", 0)
    features = {cat: torch.randn(3, 4, 5), bark: torch.randn(1, 6, 5)}

    class Landed:
        def feature(self, unit: UnitKey) -> torch.Tensor:
            return features[unit]

    placed = [PlacedSplice(0, Splice(0, 2, bark, 1)), PlacedSplice(3, Splice(3, 4, cat, 0))]
    placed.append(PlacedSplice(8, Splice(8, 3, bark, 3)))
    embeddings = torch.zeros(12, 5)
    rows, levels = splice_features(embeddings, placed, Landed())
    assert torch.equal(embeddings[0:2], features[bark][0, 1:3])
    assert torch.equal(embeddings[3:7], features[cat][0])
    assert torch.equal(embeddings[8:11], features[bark][0, 3:6])
    assert rows is not None
    assert rows.tolist() == [3, 4, 5, 6]
    assert levels is not None
    assert torch.equal(levels, features[cat][1:])
    rows, levels = splice_features(embeddings, placed[:1], Landed())
    assert rows is not None
    assert rows.tolist() == [0, 1]
    assert levels is not None
    assert levels.shape == (0, 2, 5)


@pytest.mark.parametrize("block_size", [16, 256])
def test_the_hosts_share_is_timed_around_steps_of_rows(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    prepare = Runner.prepare
    monkeypatch.setattr(Runner, "prepare", lambda runner, plan: plans.append(plan) or prepare(runner, plan))
    times = measure(5, block_size)
    assert min(times) > 0
    assert times.total_s == pytest.approx(sum(times))
    timed = plans[-2 * NUM_STEPS :]  # Each plan is prepared alone, to be timed, and then executed.
    assert {(plan.num_decodes, plan.others) for plan in timed} == {(5, ())}
    assert len({plan.step for plan in timed}) == NUM_STEPS
