"""Keeps what all members of one kind cost as arrays, so that the planner gets the lines of a thousand members at once.
`CostColumns` has a row for each member and a column for each stage; the learned lines (`member_costs`) write into it
when they change, and `believed` fills in what a member that was never seen costs.

Members of one kind that compute on equal hardware share a common line; members on other hardware have another one. The
module knows nothing of what a row or a column stands for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from router.planning.member_costs import LearnedLine

Floats = npt.NDArray[np.float64]
_FIRST_ROWS = 16


class CostColumns:
    """Holds the lines of the members of one kind. Lines have shape `(columns, 2, rows)`: base and slope of each stage,
    by member. A cell that no line has written holds nan.

    A believed line is the member's own as soon as it has a weight, and before that the mean of the others of its group,
    by their weights."""

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self._num_rows = 0
        """Counts the rows up to the last one that was ever in use."""
        self._free: list[int] = []
        self._row_to_group: dict[int, str] = {}
        self._groups: list[npt.NDArray[np.intp] | slice] | None = None
        """Holds the rows of each group; it is None after members came or went."""
        self._lines: Floats = np.full((num_columns, 2, _FIRST_ROWS), np.nan)
        self._weights: Floats = np.zeros((num_columns, _FIRST_ROWS))
        self._seen_at_s: Floats = np.full((num_columns, _FIRST_ROWS), -np.inf)
        """Holds when the last evidence came, or -inf where there was none."""

    @property
    def num_rows(self) -> int:
        return self._num_rows

    def add_row(self, group: str) -> int:
        """Returns the row of a new member; it is one that no member uses. Members of one `group` share common lines."""
        if self._free:
            row = self._free.pop()
        else:
            row = self._num_rows
            self._num_rows += 1
            if row == self._lines.shape[2]:
                self._grow(self._lines.shape[0], 2 * row)
        self._row_to_group[row] = group
        self._groups = None
        return row

    def remove_row(self, row: int) -> None:
        """Forgets the member of a row."""
        del self._row_to_group[row]
        self._lines[:, :, row], self._weights[:, row], self._seen_at_s[:, row] = np.nan, 0.0, -np.inf
        self._free.append(row)
        self._groups = None

    def add_columns(self, num_columns: int) -> None:
        """Adds columns at the end."""
        self._num_columns += num_columns
        self._grow(self._num_columns, self._lines.shape[2])

    def put(self, row: int, column: int, cost: LearnedLine) -> None:
        """Takes the present line of a stage into a cell."""
        self._lines[column, 0, row], self._lines[column, 1, row] = cost.line
        self._weights[column, row] = cost.weight
        if cost.seen_at_s is not None:
            self._seen_at_s[column, row] = cost.seen_at_s

    def believed(self) -> Floats:
        """Returns the believed lines, with shape `(columns, 2, rows)`. A cell holds nan if nothing is known of that
        stage, of the member itself or of the others."""
        lines = self._lines[:, :, : self._num_rows].copy()
        weights = self._weights[:, : self._num_rows]
        for rows in self._rows_by_group():
            own, its_weights = lines[:, :, rows], weights[:, rows]
            common = weighted_mean(own, its_weights)[:, :, None]
            lines[:, :, rows] = np.where((its_weights > 0.0)[:, None, :] | np.isnan(common), own, common)
        lines[:, :, self._free] = np.nan
        return lines

    def common(self) -> dict[str, tuple[Floats, Floats]]:
        """Maps each group to its common lines, with shape `(columns, 2)`, and to the times of the last evidence, with
        shape `(columns,)`; a time is -inf where there was none."""
        found: dict[str, tuple[Floats, Floats]] = {}
        for group in sorted(set(self._row_to_group.values())):
            rows = np.array([row for row, name in self._row_to_group.items() if name == group], np.intp)
            seen_at_s = self._seen_at_s[:, rows].max(axis=1)
            found[group] = weighted_mean(self._lines[:, :, rows], self._weights[:, rows]), seen_at_s
        return found

    def _rows_by_group(self) -> list[npt.NDArray[np.intp] | slice]:
        if self._groups is None:
            group_to_rows: dict[str, list[int]] = {}
            for row, group in sorted(self._row_to_group.items()):
                group_to_rows.setdefault(group, []).append(row)
            if len(group_to_rows) <= 1:
                self._groups = [slice(0, self._num_rows)]
            else:
                self._groups = [np.array(rows, np.intp) for rows in group_to_rows.values()]
        return self._groups

    def _grow(self, num_columns: int, num_rows: int) -> None:
        old_columns, _, old_rows = self._lines.shape
        columns, rows = num_columns - old_columns, num_rows - old_rows
        self._lines = np.pad(self._lines, ((0, columns), (0, 0), (0, rows)), constant_values=np.nan)
        self._weights = np.pad(self._weights, ((0, columns), (0, rows)))
        self._seen_at_s = np.pad(self._seen_at_s, ((0, columns), (0, rows)), constant_values=-np.inf)


def weighted_mean(lines: Floats, weights: Floats) -> Floats:
    """Returns the mean of each coefficient over the members. `lines` has shape `(columns, 2, rows)`, `weights`
    `(columns, rows)`, and the result `(columns, 2)`; it is nan where all weights are 0."""
    known = np.where(weights[:, None, :] > 0.0, lines, 0.0)
    total = weights.sum(axis=1)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Floats = (known * weights[:, None, :]).sum(axis=2) / total
    return mean
