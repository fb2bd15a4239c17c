"""Tests which models a node removes: never one that a process reads, and of the others the one first that was opened
longest ago."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.cli import main
from deploy.models import CachedModel, CleaningRule, cached_models, remove, superfluous
from deploy.models.model_cache import ModelCache
from deploy.models.model_leases import lock_path, reading
from deploy.models.model_stores import Advance, Listing, RemoteFile
from deploy.models.model_urls import ModelUrl

GB = 10**9
READER = """
import sys
from pathlib import Path
from deploy.models.model_leases import hold_model
hold_model(Path(sys.argv[1]), Path(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


class Store:
    """Holds a model of one file."""

    def __init__(self, num_bytes: int) -> None:
        self.listing = Listing("v1", (RemoteFile("config.json", num_bytes, ""),))

    def list_files(self) -> Listing:
        return self.listing

    def download(self, file: RemoteFile, part: Path, advance: Advance) -> None:
        part.write_bytes(b"x" * file.num_bytes)


def downloaded(root: Path, name: str, num_bytes: int, opened_at_s: float, max_bytes: int | None = None) -> Path:
    url, store = ModelUrl("s3", f"bucket/{name}", "v1"), Store(num_bytes)
    folder = ModelCache(root, max_bytes=max_bytes).fetch(url, store, store.listing, has_weights=True)
    os.utime(lock_path(root, folder), (opened_at_s, opened_at_s))
    return folder


@contextmanager
def read_by_a_process(root: Path, folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", READER, str(root), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def names(root: Path) -> list[str]:
    return [model.name for model in cached_models(root)]


def test_models_are_listed_by_when_they_were_opened(tmp_path: Path) -> None:
    downloaded(tmp_path, "new", 5, 300.0)
    downloaded(tmp_path, "old", 7, 100.0)
    found = cached_models(tmp_path)
    assert [(each.name, each.num_bytes, each.opened_at_s, each.is_read) for each in found] == [
        ("s3://bucket/old@v1", 7, 100.0, False),
        ("s3://bucket/new@v1", 5, 300.0, False),
    ]
    assert cached_models(tmp_path) == found, "looking is not opening"


def test_a_model_that_a_process_reads_stays_until_the_process_ends(tmp_path: Path) -> None:
    folder = downloaded(tmp_path, "demo", 5, 100.0)
    with read_by_a_process(tmp_path, folder) as process:
        (model,) = cached_models(tmp_path)
        assert model.is_read
        assert model.opened_at_s > 100.0
        assert superfluous([model], CleaningRule(0, 0.0), 1e12) == []
        assert not remove(tmp_path, model._replace(is_read=False)), "it was opened after somebody looked"
        assert (folder / "config.json").exists()
        process.kill()
        process.wait()
        assert remove(tmp_path, model)
    assert not folder.exists()
    assert names(tmp_path) == []


def test_a_download_keeps_its_model(tmp_path: Path) -> None:
    folder = downloaded(tmp_path, "demo", 5, 100.0)
    (model,) = cached_models(tmp_path)
    with reading(tmp_path, folder):
        assert not remove(tmp_path, model)
    assert remove(tmp_path, model)


def test_a_download_makes_room_for_itself_within_the_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, name in enumerate(("a", "b", "c")):
        downloaded(tmp_path, name, 10, 100.0 + number)
    with read_by_a_process(tmp_path, tmp_path / "s3" / "bucket--a" / "v1"):
        downloaded(tmp_path, "d", 10, 900.0, max_bytes=35)
        assert names(tmp_path)[:1] == ["s3://bucket/c@v1"], "the oldest that nobody reads has gone"
        assert len(names(tmp_path)) == 3
        with caplog.at_level("WARNING"):
            downloaded(tmp_path, "e", 10, 901.0, max_bytes=15)
    assert sorted(names(tmp_path)) == ["s3://bucket/a@v1", "s3://bucket/e@v1"], "what is read stays all the same"
    assert "all others are read by processes" in caplog.text


def test_what_was_removed_is_downloaded_again(tmp_path: Path) -> None:
    folder = downloaded(tmp_path, "demo", 5, 100.0)
    assert remove(tmp_path, cached_models(tmp_path)[0])
    assert ModelCache(tmp_path).ready_folder(ModelUrl("s3", "bucket/demo", "v1"), True) is None
    assert downloaded(tmp_path, "demo", 5, 100.0) == folder
    assert (folder / "config.json").stat().st_size == 5


@given(
    models=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.booleans()), max_size=8),
    max_bytes=st.none() | st.integers(0, 40),
    unused_s=st.none() | st.integers(0, 99),
)
def test_what_goes_is_enough_and_no_more(
    models: list[tuple[int, int, bool]], max_bytes: int | None, unused_s: int | None
) -> None:
    cached = sorted(
        (
            CachedModel(Path(str(at)), "", size, float(opened), is_read)
            for at, (size, opened, is_read) in enumerate(models)
        ),
        key=lambda model: model.opened_at_s,
    )
    gone = superfluous(cached, CleaningRule(max_bytes, unused_s), 100.0)
    kept = [model for model in cached if model not in gone]
    assert not any(model.is_read for model in gone)
    if unused_s is not None:
        assert all(model.is_read or 100.0 - model.opened_at_s <= unused_s for model in kept)
    if max_bytes is not None and any(not model.is_read for model in kept):
        assert sum(model.num_bytes for model in kept) <= max_bytes
    young = [model for model in gone if unused_s is None or 100.0 - model.opened_at_s <= unused_s]
    if young:  # Without the last one that goes for the limit, the models would take more.
        assert max_bytes is not None
        after = cached[cached.index(young[-1]) :]
        assert sum(model.num_bytes for model in cached if model in after or model.is_read) > max_bytes


# ------------------------------------------------------------ the command


def test_the_command_lists_first_and_removes_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, opened_at_s in (("old", 100.0), ("new", 4e9)):
        downloaded(tmp_path, name, 5, opened_at_s)
    clean = ["node", "clean", "--cache-dir", str(tmp_path)]
    assert main(clean) == 0
    assert "nothing was removed" in capsys.readouterr().out
    assert main([*clean, "--unused-days", "30", "--dry-run"]) == 0
    assert "would go: 1 of 2 models" in capsys.readouterr().out
    assert len(names(tmp_path)) == 2
    with read_by_a_process(tmp_path, tmp_path / "s3" / "bucket--new" / "v1"):
        assert main([*clean, "--max-bytes", "0MB"]) == 0
    printed = capsys.readouterr().out
    assert "removed: 1 of 2 models" in printed
    rows = {line.split()[0]: line for line in printed.splitlines() if line.startswith("s3://")}
    assert rows["s3://bucket/old@v1"].endswith("removed")
    assert rows["s3://bucket/new@v1"].endswith("in use")
    assert names(tmp_path) == ["s3://bucket/new@v1"]


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["node", "clean", "--cache-dir", str(tmp_path / "none")]) == 0
    assert "no model was downloaded" in capsys.readouterr().out
    for options, said in ((["--max-bytes", "much"], "is not a size"), (["--unused-days=-1"], "must be 0 or more")):
        assert main(["node", "clean", "--cache-dir", str(tmp_path), *options]) == 1
        assert said in capsys.readouterr().err
    config = tmp_path / "cluster.yaml"
    config.write_text(f"model: {{cache_dir: {tmp_path / 'models'}}}\n")
    downloaded(tmp_path / "models", "demo", 5, 100.0)
    assert main(["node", "clean", "--config", str(config)]) == 0
    assert "s3://bucket/demo@v1" in capsys.readouterr().out
