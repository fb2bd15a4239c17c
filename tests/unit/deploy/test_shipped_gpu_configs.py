"""Tests that the shipped configs for GPUs fit the GPUs that they name, with the published shapes of their models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from modalities_files import PREPROCESSOR, TOKENS, write_config

import deploy
from deploy import compose
from deploy.config import ClusterConfig
from deploy.config_file import load_config
from deploy.gpu_devices import GIB, named_devices
from deploy.sizing import budget as budgets
from deploy.sizing import budget_lines, too_few_gpus, worker_utilization
from deploy.sizing.budget import Budget, plan_budget
from deploy.sizing.stored_weights import StoredWeights

CONFIGS = Path(deploy.__file__).with_name("configs")
PIXELS = {"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}}
QWEN2_5_VL_7B = (3584, 28, 4, 28)
QWEN2_5_VL_3B = (2048, 36, 2, 16)
"""Hold hidden size, layers, KV heads and heads of the models' config.json."""


def qwen2_5_vl(folder: Path, numbers: tuple[int, int, int, int]) -> compose.Model:
    hidden, layers, kv_heads, heads = numbers
    text = {
        "vocab_size": 152_064,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 128_000,
    }
    config: dict[str, Any] = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"out_hidden_size": hidden, "hidden_size": 1280},
    }
    return compose.load_model(ClusterConfig(), write_config(folder, config, PREPROCESSOR | PIXELS | {"patch_size": 14}))


def qwen3_omni(folder: Path) -> compose.Model:
    text = {
        "vocab_size": 152_064,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 65_536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    thinker: dict[str, Any] = {
        "text_config": text,
        "vision_config": {"out_hidden_size": 2048, "hidden_size": 1152, "deepstack_visual_indexes": [8, 16, 24]},
        "audio_config": {"output_dim": 2048, "num_mel_bins": 128, "n_window": 50, "n_window_infer": 800},
        **TOKENS,
    }
    talker = {"num_hidden_layers": 20, "num_key_value_heads": 2, "head_dim": 128}
    config = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "thinker_config": thinker,
        "talker_config": {
            "text_config": talker,
            "accept_hidden_layer": 24,
            "speaker_id": {"ethan": 1},
            "codec_eos_token_id": 2150,
            "num_code_groups": 16,
        },
        "code2wav_config": {},
    }
    return compose.load_model(
        ClusterConfig(), write_config(folder, config, PREPROCESSOR | PIXELS | {"feature_size": 128})
    )


def planned(name: str, model: compose.Model, weights: StoredWeights, gpus: str) -> tuple[ClusterConfig, Budget]:
    config, devices = load_config(CONFIGS / name), named_devices(gpus)
    assert too_few_gpus(config, len(devices)) == []
    return config, plan_budget(config, model, weights, device_bytes=min(each.memory_bytes for each in devices))


def test_the_node_with_eight_gpus(tmp_path: Path) -> None:
    weights = StoredWeights(num_encoder=676_000_000, num_language=7_616_000_000)
    for gpus in ("8x80GB", "8xH100"):
        config, budget = planned("gpu-node.yaml", qwen2_5_vl(tmp_path, QWEN2_5_VL_7B), weights, gpus)
        assert budget.problems == (), "\n".join(budget_lines(budget))
        assert [use.name for use in budget.uses] == ["encoder", "worker"]
    assert too_few_gpus(config, 7) == ["the cluster takes 8 GPUs, but there are 7"]


def test_the_node_that_speaks(tmp_path: Path) -> None:
    weights = StoredWeights(1_200_000_000, 30_500_000_000, num_talker=3_300_000_000, num_code2wav=200_000_000)
    config, budget = planned("gpu-speech.yaml", qwen3_omni(tmp_path), weights, "8xH100")
    assert budget.problems == (), "\n".join(budget_lines(budget))
    assert [use.name for use in budget.uses] == ["encoder", "worker", "talker + code2wav"]
    (kv,) = (row for each in budget.processes if each.kind == "worker" for row in each.rows if row.name == "KV")
    assert kv.nbytes is not None
    per_token = 2 * 48 * 4 * 128 * 2
    assert kv.nbytes // per_token >= 65_536, "a request as long as the context has room"
    assert config.workers.block_size % 256 == 0


@pytest.mark.parametrize("gpus", ["1x24GB", "1xL4", "1x80GB"])
def test_the_one_gpu_that_encoder_and_vllm_share(tmp_path: Path, gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen2_5_vl(tmp_path, QWEN2_5_VL_3B)
    weights = StoredWeights(num_encoder=669_000_000, num_language=3_086_000_000)
    config, budget = planned("one-gpu.yaml", model, weights, gpus)
    assert budget.problems == (), "\n".join(budget_lines(budget))
    assert [use.name for use in budget.uses] == ["encoder + worker"]
    monkeypatch.setattr(budgets, "read_stored_weights", lambda directory: weights)
    share = worker_utilization(config, model, budget.device_bytes)
    assert share is not None
    assert budget.device_bytes is not None
    (encoder,) = (each for each in budget.processes if each.kind == "encoder")
    taken = sum(row.nbytes or 0 for row in encoder.rows if row.place == "cuda")
    assert taken + GIB + share * budget.device_bytes <= budget.device_bytes
