"""Writes the dashboards as JSON beside this module: `python -m deploy.grafana.write_boards`, or `make dashboards`."""

from __future__ import annotations

from pathlib import Path

from deploy.grafana import BOARDS, board_json

FOLDER = Path(__file__).parent


def write_all(folder: Path = FOLDER) -> None:
    """Writes a file for each board."""
    for board in BOARDS:
        (folder / f"{board.slug}.json").write_text(board_json(board))


if __name__ == "__main__":
    write_all()
