"""Tests models that come from an object store or a hub, against servers of both kinds on the loopback: what arrives,
what a node asks for again, and what is said when something is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lora_files import write_adapter
from model_servers import REVISION, ModelServer, model_server

from deploy import compose
from deploy.config import ClusterConfig
from deploy.demo.build import demo_checkpoint
from deploy.lora_adapters import open_adapters, pin_adapters
from deploy.models import ModelUrl, fetch_model
from fabric.contracts import ConfigError, Unavailable, WeftError
from modalities.adapter_files import layer_modules

STORES = ("s3://bucket/models/demo", "hf://owner/demo")
FILES = {
    "config.json": b'{"model_type": "x"}',
    "tokenizer.json": b"{}",
    "model-1.safetensors": bytes(range(256)) * 100_000,
    "model-2.safetensors": b"weights",
    "pytorch_model.bin": b"not read",
    ".gitattributes": b"hidden",
}
SMALL = ["config.json", "tokenizer.json"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    with model_server(FILES) as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running


def fetch(url: str, cache: Path, has_weights: bool = True) -> tuple[ModelUrl, dict[str, bytes]]:
    found, folder = fetch_model(ModelUrl.parse(url), cache, has_weights)
    return found, {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize("url", STORES)
def test_a_router_gets_the_small_files_and_a_worker_the_weights_too(
    url: str, server: ModelServer, tmp_path: Path
) -> None:
    _, small = fetch(url, tmp_path, has_weights=False)
    assert small == {name: FILES[name] for name in SMALL}
    pinned, whole = fetch(url, tmp_path)
    assert whole == {name: FILES[name] for name in (*SMALL, "model-1.safetensors", "model-2.safetensors")}
    assert all(server.asked[name] for name in whole)
    assert server.asked["pytorch_model.bin"] == 0
    assert pinned.version
    assert pinned.version == REVISION or pinned.scheme != "hf"


@pytest.mark.parametrize("url", STORES)
def test_replicas_of_a_node_that_start_together_download_once(url: str, server: ModelServer, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: fetch(url, tmp_path), range(2))
    assert first == second
    assert server.asked["model-2.safetensors"] == 1
    server.status = 503
    assert fetch(str(first[0]), tmp_path) == first, "what is there is found without the store"


@pytest.mark.parametrize("url", STORES)
def test_a_damaged_file_is_refused_and_fetched_again(url: str, server: ModelServer, tmp_path: Path) -> None:
    server.damaged.add("model-2.safetensors")
    with pytest.raises(Unavailable, match=r"model-2.safetensors of .* was damaged on its way"):
        fetch(url, tmp_path)
    server.damaged.clear()
    assert fetch(url, tmp_path)[1]["model-2.safetensors"] == FILES["model-2.safetensors"]
    assert server.asked["config.json"] == 1, "what had arrived is kept"


def test_a_killed_download_goes_on_where_it_was(server: ModelServer, tmp_path: Path) -> None:
    pinned, _ = fetch(STORES[0], tmp_path, has_weights=False)
    (folder,) = (tmp_path / "s3").glob("*/*")
    data, chunk = FILES["model-1.safetensors"], 8 * 2**20
    (folder / "model-1.safetensors.part").write_bytes(data[: 2 * chunk])
    assert fetch(str(pinned), tmp_path)[1]["model-1.safetensors"] == data
    assert server.asked["model-1.safetensors"] == -(-(len(data) - 2 * chunk) // chunk)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://nowhere/models/demo", "the bucket.* does not exist"),
        ("s3://bucket/other", "there is no model at s3://bucket/other"),
        ("hf://owner/other", "there is no model at hf://owner/other.*HF_TOKEN"),
        ("hf://owner/demo@beef", "has no such revision"),
    ],
)
@pytest.mark.usefixtures("server")
def test_what_is_not_there_is_named(url: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        fetch(url, tmp_path)


@pytest.mark.parametrize(("url", "status", "kind"), [(STORES[0], 403, ConfigError), (STORES[1], 500, Unavailable)])
def test_a_store_that_refuses_or_fails_is_named(
    url: str, status: int, kind: type[WeftError], server: ModelServer, tmp_path: Path
) -> None:
    server.status = status
    with pytest.raises(kind, match=url):
        fetch(url, tmp_path)


@pytest.mark.parametrize("url", STORES)
def test_a_store_that_is_not_there_is_named(
    url: str, server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "HF_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match=f"of {url} does not answer"):
        fetch(url, tmp_path)
    assert not server.asked


def test_objects_that_change_under_a_cluster_are_noticed(server: ModelServer, tmp_path: Path) -> None:
    pinned, _ = fetch(STORES[0], tmp_path, has_weights=False)
    server.files["config.json"] = b'{"model_type": "y"}'
    with pytest.raises(ConfigError, match=f"have changed since {pinned.version}.*start the cluster again"):
        fetch(str(pinned), tmp_path)
    assert fetch(STORES[0], tmp_path)[0].version != pinned.version


@pytest.mark.parametrize("url", STORES)
def test_a_cluster_opens_a_model_by_its_url(url: str, server: ModelServer, tmp_path: Path) -> None:
    demo = demo_checkpoint()
    server.files = {path.name: path.read_bytes() for path in demo.iterdir() if path.is_file()}
    config = ClusterConfig.model_validate({"model": {"path": url, "cache_dir": tmp_path}})
    pinned, model = compose.open_model(config)
    assert (model.name, str(pinned.model.path)) == ("demo", f"{url}@{pinned.model.path.partition('@')[2]}")
    assert not list(model.directory.glob("*.safetensors"))
    whole = compose.resolve_model_dir(pinned)
    assert whole == model.directory
    names = {path.name for path in demo.glob("*.safetensors")}
    assert {path.name for path in whole.glob("*.safetensors")} == names != set()


@pytest.mark.parametrize("url", STORES)
def test_adapters_come_by_their_urls_once_for_a_node(url: str, server: ModelServer, tmp_path: Path) -> None:
    demo = demo_checkpoint()
    module = next(name for name in layer_modules(demo) or () if name.endswith("q_proj"))
    outputs, inputs = (layer_modules(demo) or {})[module]
    adapter = write_adapter(tmp_path / "poet", {f"thinker.model.{module}": (outputs, inputs)}, 4)
    server.files = {path.name: path.read_bytes() for path in adapter.iterdir()} | {"README.md": b"", "old.bin": b"x"}
    model = {"path": demo, "cache_dir": tmp_path / "cache", "adapters": {"poet": url}}
    config = ClusterConfig.model_validate({"model": model, "workers": {"engine": "vllm"}})
    pinned = pin_adapters(config, "demo", demo)
    assert pinned.model.adapters["poet"] == f"{url}@{str(pinned.model.adapters['poet']).partition('@')[2]}"
    server.status = 503
    found = open_adapters(pinned, demo)["poet"]
    assert (found.max_rank, found.directory.is_relative_to(tmp_path / "cache")) == (4, True)
    assert server.asked["adapter_model.safetensors"] == 1
    assert server.asked["old.bin"] == 0
