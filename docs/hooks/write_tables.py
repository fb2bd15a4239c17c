"""Writes the table of metrics into its page, where a forge shows it too: run `make tables`.

The documentation site makes the same table when it is built. The table is committed, because operators read it without
the site; `tests/unit/house/test_docs_reference.py` fails while the page and the code differ.
"""

from __future__ import annotations

from pathlib import Path

from reference_tables import metrics
from site_pages import ROOT

PAGE = ROOT / "docs" / "metrics.md"
BEGIN, END = "<!-- table: metrics -->", "<!-- end of table -->"


def written(page: str) -> str:
    """Returns the text of the page with the present table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{metrics()}\n{END}{after}"


def write(path: Path = PAGE) -> None:
    path.write_text(written(path.read_text()))


if __name__ == "__main__":
    write()
