"""The source keeps to the figures of `make house`, and the check of docstrings knows sentences from fragments."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from house import LONGEST_MODULE, ROOT, docstrings, names_used_twice, source_files
from sentences import is_sentence

UNIT = ROOT / "tests" / "unit"


def test_every_docstring_is_a_sentence() -> None:
    fragments = [each.place for path in source_files() for each in docstrings(path) if not is_sentence(each.text)]
    assert fragments == []


def test_every_class_and_every_module_of_the_product_has_a_name_of_its_own() -> None:
    assert names_used_twice() == {}


def test_no_module_is_too_long() -> None:
    paths = [*source_files(), *(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))]
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in paths}
    assert {path: length for path, length in lengths.items() if length > LONGEST_MODULE} == {}


def test_unit_tests_stand_in_the_folders_of_what_they_test() -> None:
    folders = {path.parent.relative_to(UNIT) for path in UNIT.rglob("test_*.py")}
    assert [str(folder) for folder in folders if folder == Path() or not (ROOT / folder).is_dir()] == ["house"]


def test_every_test_and_rig_has_a_name_of_its_own() -> None:
    """pytest and the tests import them by the bare name."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    "text",
    [
        "Returns the priority of the earliest request that still needs `unit`.",
        "A lease is a promise with a time limit.",
        "The scheduler calls `commit` once for each step.",
        "Names the file that broke.",
        "Units wait here until their batch starts.",
        "The inbox doesn't evict what a sequence reads.",
        "Records that a unit found no room.",
        "It counts tokens, not bytes.",
    ],
)
def test_sentences_are_known(text: str) -> None:
    assert is_sentence(text)


@pytest.mark.parametrize(
    "text",
    [
        "Of the first that still has to be read: its priority.",
        "Names of parameters in malloc.h.",
        "The queue of sounds.",
        "Bytes, not tokens. They are counted once.",
        "`(num_tokens, hidden)`, float32.",
        "Items in the order of their age.",
        "Missing keys of the tower, sizes always among them.",
        "",
    ],
)
def test_fragments_are_known(text: str) -> None:
    assert not is_sentence(text)
