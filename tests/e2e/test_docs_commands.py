"""Runs the commands of every document against a real cluster, as a reader does, and compares what they print with what
the page says. `doc_session.py` says what differs from the page, and `tests/unit/house/test_doc_blocks.py` checks the
commands that can't be run here."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from cluster_process import ClusterProcess
from doc_blocks import DocBlock, all_blocks, blocks_of, documents
from doc_session import PageSession

pytestmark = pytest.mark.ray
PAGES = [document for document in documents() if any(block.is_run for block in blocks_of(document))]


@pytest.mark.parametrize("document", PAGES)
def test_the_commands_of_a_document_run(document: str, cluster: ClusterProcess, tmp_path: Path) -> None:
    blocks = blocks_of(document)
    with PageSession(tmp_path, cluster) as session:
        for number, block in enumerate(blocks):
            if block.file is not None:
                session.save(block)
            if not block.is_run:
                continue
            printed = session.run(block)
            shown = output_of(blocks[number + 1 :])
            if shown is not None:
                assert flaws_of_output(shown, printed) == [], f"{shown.place} shows other output than:\n{printed}"


def output_of(following: Sequence[DocBlock]) -> DocBlock | None:
    """Returns the block that shows the output of the commands before it: the next one, if it is text or JSON and not a
    file that the reader saves."""
    is_output = bool(following) and following[0].language in ("text", "json") and following[0].file is None
    return following[0] if is_output else None


# ---------------------------------------------------------------- what pages say of outputs


def flaws_of_output(shown: DocBlock, printed: str) -> list[str]:
    """Returns the lines or fields of a shown output that the printed one lacks. Figures may differ, and a page may
    leave out lines and fields."""
    if shown.language == "json":
        return list(_lacking(json.loads(shown.text), json.loads(printed), ""))
    lines = [pattern_of(line) for line in printed.splitlines()]
    missing, start = [], 0
    for line in shown.text.splitlines():
        pattern = pattern_of(line)
        if not pattern or pattern == "...":
            continue
        try:
            start = lines.index(pattern, start) + 1
        except ValueError:
            missing.append(line)
    return missing


def pattern_of(line: str) -> str:
    """Returns a line with one sign for each figure and one blank for several. Lines and dots of tables do not count."""
    figures = re.sub(r"[+-]?\d[\d,.:]*", "#", re.sub(r"https?://[\d.:]+", "URL", line))
    return re.sub(r"[─━│|\s]+", " ", figures).strip()


def _lacking(shown: object, printed: object, path: str) -> list[str]:
    """Returns the paths of fields that the printed JSON lacks, or that have another type there."""
    if isinstance(shown, dict) and isinstance(printed, dict):
        flaws = [f"{path}.{name}" for name in shown if name not in printed]
        for name in shown.keys() & printed.keys():
            flaws += _lacking(shown[name], printed[name], f"{path}.{name}")
        return flaws
    if isinstance(shown, list) and isinstance(printed, list):
        pairs = zip(shown, printed, strict=False)
        return [flaw for one, other in pairs for flaw in _lacking(one, other, f"{path}[]")]
    return [] if type(shown) is type(printed) else [path]


def test_an_output_that_differs_is_found() -> None:
    (_, shown) = [block for block in all_blocks() if block.document == "docs/install.md"][:2]
    assert shown.language == "text"
    assert flaws_of_output(shown, "weft: the cluster is ready at http://127.0.0.1:3 (model weft-demo)\n") == []
    assert flaws_of_output(shown, "weft: the cluster is ready at http://127.0.0.1:3 (model other)\n") != []
    assert _lacking({"a": [{"b": 1}], "c": "x"}, {"a": [{"b": "1"}]}, "") == [".c", ".a[].b"]
