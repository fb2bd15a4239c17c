"""Tests the file of learned costs: it is written as a whole, shared by routers, and never keeps a router from
starting."""

import asyncio
import logging
from pathlib import Path

import pytest

from router.cost_file import MAX_BYTES, CostFile
from router.planning import LinkClass, SavedCosts
from router.planning.plan_types import Line
from router.planning.saved_costs import CostKey, SeenLine

NOW_S = 1.79e9
ONE, OTHER = CostKey("worker", "cpu", "", "prefill"), CostKey("encoder", "cpu", "image", "decode")


def costs(key: CostKey, base_s: float, seen_at_s: float) -> SavedCosts:
    return SavedCosts({key: SeenLine(Line(base_s, 1e-4), seen_at_s)}, {}, NOW_S)


def file_at(path: Path | None, model: str = "m") -> CostFile:
    return CostFile(path, model, lambda: NOW_S)


def write(file: CostFile, saved: SavedCosts) -> None:
    asyncio.run(file.write(lambda _: saved))


def test_what_one_run_writes_the_next_one_reads(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "costs.json"
    saved = SavedCosts(
        {ONE: SeenLine(Line(0.1, 1e-4), NOW_S)}, {LinkClass.TCP: SeenLine(Line(1e-3, 1e-9), NOW_S)}, NOW_S
    )
    write(file_at(path), saved)
    assert file_at(path).read() == saved
    assert [each.name for each in path.parent.iterdir()] == ["costs.json"], "no part of a file is left behind"


def test_routers_share_a_file_and_the_newer_line_stays(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write(file_at(path), costs(ONE, 0.1, NOW_S - 5))
    write(file_at(path), costs(OTHER, 0.2, NOW_S))
    write(file_at(path), costs(ONE, 0.3, NOW_S - 60))
    found = file_at(path).read()
    assert {key: seen.line.base_s for key, seen in found.key_to_line.items()} == {ONE: 0.1, OTHER: 0.2}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not a file of learned costs"),
        (b"\x00" * (MAX_BYTES + 1), "has more than"),
    ],
)
def test_a_broken_file_is_ignored_with_a_line_in_the_log_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, says: str
) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert file_at(path).read() == SavedCosts()
    assert says in caplog.text
    write(file_at(path), costs(ONE, 0.1, NOW_S))
    assert file_at(path).read().key_to_line.keys() == {ONE}


def test_a_file_of_another_model_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "costs.json"
    write(file_at(path, "other"), costs(ONE, 0.1, NOW_S))
    with caplog.at_level(logging.WARNING):
        assert file_at(path).read() == SavedCosts()
    assert "costs of the model 'other'" in caplog.text


def test_a_folder_in_its_place_is_logged_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert file_at(tmp_path).read() == SavedCosts()
        write(file_at(tmp_path), costs(ONE, 0.1, NOW_S))
    assert "can't be read" in caplog.text
    assert "can't be written" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_without_a_path_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = file_at(None)
    write(file, costs(ONE, 0.1, NOW_S))
    asyncio.run(file.keep(lambda _: pytest.fail("nothing is asked for")))
    assert file.read() == SavedCosts()
    assert list(tmp_path.iterdir()) == []
