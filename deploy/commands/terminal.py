"""Prints for people: tables, words and colours, on a terminal or into a pipe.

`console` makes the output of a command. On a terminal it has colours (not if `NO_COLOR` is set) and the terminal's
width; into a pipe it has neither, so that lines are never cut or wrapped. rich knows the rules of terminals, and
Textual, which draws `weft top`, brings it. Text that came from a cluster or its clients is escaped before it is shown
(`shown`), because a terminal obeys what it reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.printable import escaped

WIDE = 10_000
"""Is the width of what is no terminal."""


def console(stream: TextIO | None = None) -> Console:
    """Returns the console for a stream, standard output if none is given."""
    stream = stream or sys.stdout
    width = None if stream.isatty() else WIDE
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def may_animate(stream: TextIO) -> bool:
    """Tells whether a stream is a terminal that can show what changes in place."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def shown(value: object, style: str = "") -> Text:
    """Returns a value of a cluster as text that a terminal can't take for a command."""
    return Text("" if value is None else escaped(str(value)), style)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str] = ()) -> Table:
    """Returns a table without lines. The columns in `numbers` are aligned to the right. A cell is a `Text`, or a value
    that is shown as such."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else shown(cell) for cell in row))
    return made


def write(output: Console, made: Table | Text | str) -> None:
    """Prints without spaces at the ends of lines, which a table would fill up to its width."""
    with output.capture() as captured:
        output.print(made)
    for line in captured.get().splitlines():
        output.file.write(line.rstrip() + "\n")


# ------------------------------------------------------------ figures


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def duration(seconds: float | None) -> str:
    """Returns a time in the unit in which it is easiest to read."""
    if seconds is None:
        return "-"
    if seconds >= 100:
        return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.0f} ms"


def rate(per_s: float | None) -> str:
    if per_s is None:
        return "-"
    return f"{per_s:.1f}" if per_s < 100 else f"{per_s:,.0f}"
