"""Tests that a config with LoRA adapters is checked before anything starts: its keys, and the files that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lora_files import write_adapter
from modalities_files import write_config
from pydantic import ValidationError

from deploy import compose
from deploy.cli import main
from deploy.config import ClusterConfig
from deploy.lora_adapters import open_adapters
from deploy.worker_pools import worker_lacks
from fabric.contracts import ADAPTERS, ConfigError
from llm_workers.vllm_engine.engine_args import VllmSettings, check_reserved

Captured = pytest.CaptureFixture[str]
VLLM = {"engine": "vllm"}


def config(adapters: dict[str, Any], workers: dict[str, Any] | None = None, **model: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"model": {"adapters": adapters} | model, "workers": workers or VLLM})


@pytest.mark.parametrize(
    ("adapters", "workers", "model", "message"),
    [
        ({"poet": "/a"}, {}, {}, "workers.engine is weft, which computes no adapters; set workers.engine: vllm"),
        ({"poet": "/a"}, VLLM, {"embeddings": "last"}, "model.embeddings is last, but vLLM gives no embeddings"),
        ({"poet": "/a"}, VLLM, {"name": "poet"}, "the name poet, which model.name gives to the model itself"),
        ({"poet": "/a"}, VLLM | {"vllm": {"max_loras": 2}}, {}, "max_loras can't be set on a CPU"),
        ({}, VLLM | {"vllm": {"max_loras": 2}}, {}, "workers.vllm.max_loras is set, but there are no adapters"),
        ({"": "/a"}, VLLM, {}, "should match pattern"),
        ({"a b": "/a"}, VLLM, {}, "should match pattern"),
        ({"a/": "/a"}, VLLM, {}, "should match pattern"),
        ({"a" * 129: "/a"}, VLLM, {}, "at most 128 characters"),
        ({f"a{number}": "/a" for number in range(257)}, VLLM, {}, "at most 256 items"),
        ({"poet": "ftp://host/a"}, VLLM, {}, "names no model: a URL begins with s3://"),
        ({"poet": "hf://owner"}, VLLM, {}, "write it as hf://OWNER/NAME"),
    ],
)
def test_keys_that_do_not_fit_are_refused(
    adapters: dict[str, str], workers: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        ClusterConfig.model_validate({"model": {"adapters": adapters} | model, "workers": workers})


def test_speech_has_no_adapters() -> None:
    with pytest.raises(ValidationError, match=r"model\.adapters has poet, but workers\.engine is weft"):
        ClusterConfig.model_validate({"model": {"adapters": {"poet": "/a"}}, "stages": {}})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"stages": {}}, r"has poet, but the cluster speaks \(stages\), and workers with vLLM"),
        ({"model": {"embeddings": "last"}}, "has poet, but model.embeddings is last, and workers with vLLM"),
        (
            {"more_workers": {"fast": VLLM | {"vllm": {"max_loras": 1}}}},
            r"more_workers\.fast\.vllm\.max_loras can't be set on a CPU",
        ),
        ({"more_workers": {"small": {}}}, "has poet, but workers.engine is weft"),
    ],
)
def test_adapters_need_a_pool_that_computes_them_and_nothing_that_leaves_them_out(
    sections: dict[str, Any], message: str
) -> None:
    adapters = {"adapters": {"poet": "/a"}}
    whole = {"more_workers": {"fast": VLLM}} | sections | {"model": adapters | sections.get("model", {})}
    with pytest.raises(ValidationError, match=message):
        ClusterConfig.model_validate(whole)


def test_workers_with_wefts_own_engine_leave_adapters_to_others() -> None:
    whole = ClusterConfig.model_validate({"model": {"adapters": {"poet": "/a"}}, "more_workers": {"fast": VLLM}})
    assert worker_lacks(whole) == (ADAPTERS,)
    assert ADAPTERS not in worker_lacks(whole.of_pool("fast"))
    assert worker_lacks(ClusterConfig()) == ()


def test_paths_are_absolute_and_urls_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = config({"poet": "adapters/poet", "org/clerk": "hf://owner/clerk@main"}).model.adapters
    assert found == {"poet": tmp_path / "adapters" / "poet", "org/clerk": "hf://owner/clerk@main"}


def test_what_weft_decides_of_adapters_is_reserved() -> None:
    for key in ("enable_lora", "lora_target_modules", "enable_tower_connector_lora", "default_mm_loras"):
        with pytest.raises(ConfigError, match=f"workers.vllm.{key} can't be set"):
            check_reserved({key: True})
    check_reserved({"max_lora_rank": 64, "max_cpu_loras": 8, "lora_dtype": "bfloat16"})
    assert VllmSettings("/m", "float32", 32, 1, 1, True).num_adapters == 0


def test_a_directory_that_is_none_is_named_with_its_node(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"model.adapters.poet is {tmp_path}/nowhere, which is not a directory on "):
        open_adapters(config({"poet": tmp_path / "nowhere"}), tmp_path)


def test_a_flaw_of_the_files_is_named_with_the_adapter(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "poet", {"model.layers.0.mlp.up_proj": (4, 2)}, 2, use_dora=True)
    with pytest.raises(ConfigError, match=r"model\.adapters\.poet: .*poet/adapter_config\.json: .*DoRA"):
        open_adapters(config({"poet": adapter}), tmp_path)


def test_a_rank_that_does_not_fit_is_named(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "poet", {"model.layers.0.mlp.up_proj": (4, 2)}, 24)
    low = VLLM | {"vllm": {"max_lora_rank": 16}}
    with pytest.raises(ConfigError, match=r"poet has rank 24, but workers\.vllm\.max_lora_rank is 16"):
        open_adapters(config({"poet": adapter}, low), tmp_path)
    write_adapter(adapter, {"model.layers.0.mlp.up_proj": (4, 2)}, 513)
    with pytest.raises(ConfigError, match="poet has rank 513, but vLLM takes at most 512"):
        open_adapters(config({"poet": adapter}), tmp_path)


def test_adapters_are_opened_by_their_names(tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one", {"model.layers.0.mlp.up_proj": (4, 2)}, 2)
    two = write_adapter(tmp_path / "two", {"model.layers.0.mlp.up_proj": (4, 2)}, 8)
    found = open_adapters(config({"poet": one, "clerk": two}), tmp_path)
    assert {name: (each.directory, each.max_rank) for name, each in found.items()} == {
        "poet": (one, 2),
        "clerk": (two, 8),
    }


# ------------------------------------------------------------ with a model

LAYER = {"model.layers.0.mlp.up_proj": (96, 64)}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Has a text model as a node without its weights sees it: with an index of them."""
    text = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    directory = tmp_path / "qwen"
    write_config(directory, {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"} | text)
    index = {"weight_map": {f"{module}.weight": "model-1.safetensors" for module in LAYER}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def test_routers_serve_what_the_cluster_has_opened(tmp_path: Path, model_dir: Path) -> None:
    adapter = write_adapter(tmp_path / "poet", LAYER, 4)
    opened, model = compose.open_model(config({"poet": adapter}, path=model_dir))
    settings = compose.router_config(opened, model)
    assert settings.model_names == ("qwen", "poet")
    assert settings.adapters == {"poet": str(adapter)}


def test_the_name_of_the_models_directory_is_taken(tmp_path: Path, model_dir: Path) -> None:
    adapter = write_adapter(tmp_path / "poet", LAYER, 4)
    with pytest.raises(
        ConfigError, match=r"model\.adapters has the name qwen, which the model itself has; set model\.name"
    ):
        compose.open_model(config({"qwen": adapter}, path=model_dir))
    assert compose.open_model(config({"qwen": adapter}, path=model_dir, name="base"))[1].name == "base"


def test_check_names_an_adapter_of_another_model(tmp_path: Path, model_dir: Path, capsys: Captured) -> None:
    adapter = write_adapter(tmp_path / "poet", {"model.layers.3.mlp.up_proj": (96, 64)}, 4)
    file = tmp_path / "weft.yaml"
    model = f"model: {{path: {model_dir}, adapters: {{poet: {adapter}}}}}"
    file.write_text(f"{model}\nworkers: {{engine: vllm}}\nencoders: {{replicas: 0}}\n")
    assert main(["check", str(file)]) == 1
    said = capsys.readouterr().err
    assert f"{file}: model.adapters.poet: {adapter}/adapter_model.safetensors: this model has no model.layers.3" in said
    write_adapter(adapter, LAYER, 4)
    assert main(["check", str(file)]) == 0
    adapter.rename(tmp_path / "elsewhere")
    assert main(["check", str(file)]) == 0, "as for a model that is not here"
    assert f"model.adapters.poet is {adapter}, which is not a directory on" in capsys.readouterr().out
