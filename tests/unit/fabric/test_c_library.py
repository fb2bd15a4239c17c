"""Tests the use of a C file as a library: it is compiled once, and is never loaded from a place where other users could
have put it."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest

from fabric import c_library
from fabric.c_library import load_c_library

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="the compiler's options are those of Linux"),
]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "weft"


def answer(library: ctypes.CDLL | None) -> int:
    assert library is not None
    return int(library.answer())


def kept(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


def test_it_is_compiled_once(source: Path, cache: Path) -> None:
    assert answer(load_c_library(source)) == 42
    (first,) = kept(cache)
    made_at = first.stat().st_mtime_ns
    assert answer(load_c_library(source)) == 42
    assert kept(cache) == [first]
    assert first.stat().st_mtime_ns == made_at
    assert first.stat().st_mode & 0o022 == cache.stat().st_mode & 0o022 == 0


def test_other_sources_headers_options_and_compilers_are_other_libraries(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_c_library(source)
    monkeypatch.setattr(c_library, "COMPILE_OPTIONS", ("-O1", "-fPIC", "-c"))
    load_c_library(source)
    newer = tmp_path / "newer"
    newer.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec echo 99\nexec {shutil.which("cc")} "$@"\n')
    newer.chmod(0o700)
    monkeypatch.setattr(c_library.shutil, "which", lambda _: str(newer))
    load_c_library(source)
    newer.write_text(newer.read_text().replace("99", "100"))
    load_c_library(source)
    source.write_text("int answer(void) { return 43; }\n")
    assert answer(load_c_library(source)) == 43
    source.write_text('#include "number.h"\nint answer(void) { return NUMBER; }\n')
    for number in (44, 45):
        source.with_name("number.h").write_text(f"#define NUMBER {number}\n")
        assert answer(load_c_library(source)) == number
    assert len(kept(cache)) == 7


def test_a_shared_header_is_found_and_changes_the_library(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (c_library.SHARED_HEADERS / "vectors.h").is_file()
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(c_library, "SHARED_HEADERS", shared)
    source.write_text('#include "number.h"\nint answer(void) { return NUMBER; }\n')
    for number in (46, 47):
        (shared / "number.h").write_text(f"#define NUMBER {number}\n")
        assert answer(load_c_library(source)) == number
    assert len(kept(cache)) == 2


@pytest.mark.parametrize("is_directory", [True, False])
def test_what_others_may_write_to_is_not_loaded(
    source: Path, cache: Path, caplog: pytest.LogCaptureFixture, is_directory: bool
) -> None:
    load_c_library(source)
    (library,) = kept(cache)
    (cache if is_directory else library).chmod(0o770)
    assert load_c_library(source) is None
    assert "belongs to another user, or other users may write to it" in caplog.text


@pytest.mark.parametrize("is_directory", [True, False])
def test_what_others_own_is_not_loaded(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, is_directory: bool
) -> None:
    """A link is refused as well, because it may belong to another user regardless of its target."""
    load_c_library(source)
    (library,) = kept(cache)
    path = cache if is_directory else library
    path.symlink_to(path.rename(source.with_name("elsewhere")))
    assert load_c_library(source) is None
    path.unlink()
    source.with_name("elsewhere").rename(path)
    assert answer(load_c_library(source)) == 42
    monkeypatch.setattr(c_library.os, "geteuid", lambda: os.getuid() + 1)
    assert load_c_library(source) is None


def test_a_broken_library_is_made_again(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken file lies in a cache from which this process has loaded nothing, because the system finds a loaded
    library by its path, even if the file there has changed since."""
    load_c_library(source)
    (library,) = kept(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    broken = tmp_path / "other" / "weft" / library.name
    broken.parent.mkdir(mode=0o700, parents=True)
    broken.write_bytes(b"cut short")
    broken.chmod(0o700)
    assert answer(load_c_library(source)) == 42
    assert broken.read_bytes() == library.read_bytes()


def test_what_the_compiler_says_is_logged(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    source.write_text("#error not for this processor\n")
    assert load_c_library(source) is None
    assert "not for this processor" in caplog.text


def test_without_a_home_there_is_none(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", dict[int, str]().__getitem__)
    with caplog.at_level(logging.WARNING):
        assert load_c_library(source) is None
    assert "home" in caplog.text
