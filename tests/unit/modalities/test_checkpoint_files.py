"""Tests how the JSON files of a checkpoint are read, and what a file that can't be used is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric.contracts import ConfigError
from modalities.checkpoint_files import read_json, read_json_if_present


def test_a_file_is_read_with_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b'{"name": "\xc3\xa9"}')
    assert read_json(file) == (b'{"name": "\xc3\xa9"}', {"name": "é"})
    assert read_json_if_present(file) == {"name": "é"}


def test_only_a_file_that_may_be_absent_is_empty(tmp_path: Path) -> None:
    assert read_json_if_present(tmp_path / "config.json") == {}
    with pytest.raises(ConfigError, match=r"can't read .*config\.json"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"can't read .*config\.json"),
        (b"\xff\xfe\xff", r"can't read .*config\.json"),
        (b"[]", r"config\.json must contain a JSON object, not a value of type list"),
    ],
)
def test_a_broken_file_is_named_whether_or_not_it_may_be_absent(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_json(file)
    with pytest.raises(ConfigError, match=message):
        read_json_if_present(file)


def test_a_directory_in_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="can't read"):
        read_json_if_present(tmp_path / "config.json")
