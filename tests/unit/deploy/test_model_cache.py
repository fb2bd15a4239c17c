"""Tests how a node keeps models: what counts as present, what a full disk and a store that fails leave, and which URLs
name a model."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import pytest

from deploy.config import ClusterConfig
from deploy.config_file import check_config
from deploy.models.model_cache import SPARE_BYTES, ModelCache, needed
from deploy.models.model_stores import Advance, Listing, RemoteFile
from deploy.models.model_urls import ModelUrl
from fabric.contracts import ConfigError, Unavailable

URL = ModelUrl("s3", "bucket/demo", "v1")
CONTENT = {"config.json": b"{}", "a.safetensors": b"aaaa", "b.safetensors": b"bb", "old.bin": b"x"}
FILES = tuple(
    RemoteFile(name, len(data), hashlib.md5(data).hexdigest(), "md5") for name, data in sorted(CONTENT.items())
)
LISTING = Listing("v1", FILES)


class FakeStore:
    """Writes what a test says, and fails at one file."""

    def __init__(self, fails_at: str = "", error: Exception | None = None) -> None:
        self.fails_at, self.error, self.asked = fails_at, error, []

    def list_files(self) -> Listing:
        return LISTING

    def download(self, file: RemoteFile, part: Path, advance: Advance) -> None:
        self.asked.append(file.name)
        if file.name == self.fails_at and self.error is not None:
            part.write_bytes(CONTENT[file.name][:1])
            raise self.error
        with part.open("ab") as target:
            target.write(CONTENT[file.name][part.stat().st_size :])
        advance(file.num_bytes)


def test_small_files_come_first_and_other_formats_not_at_all() -> None:
    assert [file.name for file in needed(FILES, has_weights=True)] == ["config.json", "a.safetensors", "b.safetensors"]
    assert [file.name for file in needed(FILES, has_weights=False)] == ["config.json"]


def test_voices_are_read_before_any_weights() -> None:
    files = tuple(RemoteFile(name, 1, "", "") for name in ("spk_dict.pt", "model.pt", "config.json"))
    assert [file.name for file in needed(files, has_weights=False)] == ["spk_dict.pt", "config.json"]


def test_a_model_is_ready_only_when_all_that_is_asked_for_is_there(tmp_path: Path) -> None:
    cache, store = ModelCache(tmp_path), FakeStore()
    assert cache.ready_folder(URL, has_weights=False) is None
    folder = cache.fetch(URL, store, LISTING, has_weights=False)
    assert cache.ready_folder(URL, has_weights=False) == folder
    assert cache.ready_folder(URL, has_weights=True) is None
    assert cache.ready_folder(ModelUrl("s3", "bucket/demo"), has_weights=False) is None, "the present files may differ"
    cache.fetch(URL, store, LISTING, has_weights=True)
    assert cache.ready_folder(URL, has_weights=True) == folder
    assert store.asked == ["config.json", "a.safetensors", "b.safetensors"], "each once"


def test_what_arrived_before_a_failure_is_kept_and_continued(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    with pytest.raises(Unavailable, match="gone"):
        cache.fetch(URL, FakeStore("b.safetensors", Unavailable("gone")), LISTING, has_weights=True)
    assert not (cache.folder(URL) / "b.safetensors").exists(), "a file appears whole"
    store = FakeStore()
    folder = cache.fetch(URL, store, LISTING, has_weights=True)
    assert store.asked == ["b.safetensors"]
    assert (folder / "b.safetensors").read_bytes() == b"bb"
    assert not list(folder.glob("*.part*"))


def test_a_part_that_is_longer_than_its_file_is_not_continued(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    cache.folder(URL).mkdir(parents=True)
    (cache.folder(URL) / "a.safetensors.part").write_bytes(b"too long")
    folder = cache.fetch(URL, FakeStore(), LISTING, has_weights=True)
    assert (folder / "a.safetensors").read_bytes() == b"aaaa"


def test_a_disk_without_room_is_refused_before_the_download(tmp_path: Path) -> None:
    store = FakeStore()
    cache = ModelCache(tmp_path, free_bytes=lambda _: SPARE_BYTES + 7)
    with pytest.raises(ConfigError, match=r"needs .* GB more .* set model\.cache_dir"):
        cache.fetch(URL, store, LISTING, has_weights=True)
    assert store.asked == []
    ModelCache(tmp_path, free_bytes=lambda _: SPARE_BYTES + 8).fetch(URL, store, LISTING, has_weights=True)


def test_a_disk_that_fills_up_is_named(tmp_path: Path) -> None:
    store = FakeStore("a.safetensors", OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(Unavailable, match=r"model\.cache_dir\): the disk is full"):
        ModelCache(tmp_path).fetch(URL, store, LISTING, has_weights=True)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("s3://bucket/models/qwen/", "qwen"),
        ("gs://bucket/qwen", "qwen"),
        ("hf://Qwen/Qwen2.5-VL-3B@main", "Qwen2.5-VL-3B"),
    ],
)
def test_a_url_names_a_model(text: str, name: str) -> None:
    url = ModelUrl.parse(text)
    assert url.name == name
    assert ModelUrl.parse(str(url)) == url


@pytest.mark.parametrize("text", ["s3://bucket", "hf://name", "hf://a/b/c", "http://x/y", "s3://b/../x", "hf://a/b@"])
def test_a_config_refuses_what_names_no_model(text: str) -> None:
    config, problems = check_config(f"model: {{path: '{text}'}}")
    assert config is None
    assert "names no model" in str(problems[0])


def test_paths_stay_paths() -> None:
    assert ClusterConfig.model_validate({"model": {"path": "models/qwen"}}).model.path == Path("models/qwen")
    assert ClusterConfig.model_validate({"model": {"path": "hf://a/b"}}).model.path == "hf://a/b"
