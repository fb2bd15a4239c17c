"""Tests that every decision record has the form of a record, and that the index lists each with its title and date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

RECORDS = sorted((Path(__file__).resolve().parents[3] / "docs" / "adr").glob("[0-9]*.md"))
INDEX = RECORDS[0].with_name("README.md").read_text()
SECTIONS = ["Context", "Decision", "Consequences", "Measured"]


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_record_has_its_sections_and_stands_in_the_index(record: Path) -> None:
    text = record.read_text()
    number, title = int(record.name[:4]), text.partition("\n")[0]
    status = re.search(r"^Status: accepted, (\d{4}-\d\d-\d\d)(; .+)?$", text, re.MULTILINE)
    assert status is not None
    assert f"| [{number}]({record.name}) | {title.removeprefix(f'# {number}. ')} | {status[1]} |" in INDEX
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [section for section in sections if section != "Alternatives considered"] == SECTIONS
    assert sections[-1] == "Measured"


def test_the_index_lists_no_other_record() -> None:
    assert INDEX.count("\n| [") == len(RECORDS)
