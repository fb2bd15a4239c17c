"""Keeps what all members of one kind cost as arrays, so that the planner gets the believed lines of a thousand members
in about a millisecond. `CostColumns` has a row for each member and a column for each stage; the estimators
(`member_costs`) write into it when they change, and `believed` computes from it what the scalar functions of
`member_costs` compute for one estimate.

Members of one kind that compute on equal hardware share a common line; members on other hardware have another one. The
module knows nothing of what a row or a column stands for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from router.planning.member_costs import LEAST_TRUST, NOISE, CostEstimator

Floats = npt.NDArray[np.float64]
_FIRST_ROWS = 16


class CostColumns:
    """Holds the estimates of the members of one kind. Lines have shape `(columns, 2, rows)`: base and slope of each
    stage, by member. A cell that no estimator has written holds nan.

    With `is_ageing`, a believed line lies between the member's own and the common one, in proportion to the trust.
    Otherwise it is the member's own as soon as there is evidence, and the mean of the others before."""

    def __init__(self, num_columns: int, is_ageing: bool = True) -> None:
        self._is_ageing = is_ageing
        self._num_columns = num_columns
        self._num_rows = 0
        """Counts the rows up to the last one that was ever in use."""
        self._free: list[int] = []
        self._row_to_group: dict[int, str] = {}
        self._groups: list[npt.NDArray[np.intp] | slice] | None = None
        """Holds the rows of each group; it is None after members came or went."""
        self._lines: Floats = np.full((num_columns, 2, _FIRST_ROWS), np.nan)
        self._at_s: Floats = np.zeros((num_columns, _FIRST_ROWS))
        self._per_half_life: Floats = np.zeros((num_columns, _FIRST_ROWS))
        self._start_trust: Floats = np.zeros((num_columns, _FIRST_ROWS))
        self._has_evidence: npt.NDArray[np.bool_] = np.zeros((num_columns, _FIRST_ROWS), bool)

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
        self._lines[:, :, row] = np.nan
        self._has_evidence[:, row] = False
        self._start_trust[:, row] = 0.0
        self._free.append(row)
        self._groups = None

    def add_columns(self, num_columns: int) -> None:
        """Adds columns at the end."""
        self._num_columns += num_columns
        self._grow(self._num_columns, self._lines.shape[2])

    def put(self, row: int, column: int, cost: CostEstimator) -> None:
        """Takes the estimator's present line and evidence into a cell."""
        evidence = cost.evidence
        self._lines[column, 0, row], self._lines[column, 1, row] = cost.line
        self._per_half_life[column, row] = 1.0 / evidence.half_life_s
        self._start_trust[column, row] = evidence.start_trust
        if evidence.at_s is not None:
            self._at_s[column, row] = evidence.at_s
            self._has_evidence[column, row] = True

    def believed(self, now: float) -> Floats:
        """Returns the believed lines, with shape `(columns, 2, rows)`. A cell holds nan if nothing is known of that
        stage, of the member itself or of the others."""
        lines = self._lines[:, :, : self._num_rows].copy()
        trust = self._trust(now)
        for rows in self._rows_by_group():
            own, weights = lines[:, :, rows], trust[:, rows]
            lines[:, :, rows] = self._believed_in_group(own, weights)
        lines[:, :, self._free] = np.nan
        return lines

    def common(self, now: float) -> dict[str, tuple[Floats, Floats]]:
        """Maps each group to its common lines, with shape `(columns, 2)`, and to the times of the last evidence, with
        shape `(columns,)`; a time is -inf where there was none."""
        trust = self._trust(now)
        found: dict[str, tuple[Floats, Floats]] = {}
        for group in sorted(set(self._row_to_group.values())):
            rows = np.array([row for row, name in self._row_to_group.items() if name == group], np.intp)
            seen_at_s = np.where(self._has_evidence[:, rows], self._at_s[:, rows], -np.inf).max(axis=1)
            found[group] = self._common_of(self._lines[:, :, rows], trust[:, rows]), seen_at_s
        return found

    def _believed_in_group(self, own: Floats, trust: Floats) -> Floats:
        common = self._common_of(own, trust)[:, :, None]
        if not self._is_ageing:
            return np.where((trust > 0.0)[:, None, :] | np.isnan(common), own, common)
        return _drawn(own, common, trust[:, None, :])

    def _common_of(self, lines: Floats, trust: Floats) -> Floats:
        return weighted_median(lines, trust) if self._is_ageing else _weighted_mean(lines, trust)

    def _trust(self, now: float) -> Floats:
        rows = slice(0, self._num_rows)
        age_s = np.maximum(0.0, now - self._at_s[:, rows])
        aged = np.maximum(LEAST_TRUST, np.exp2(-age_s * self._per_half_life[:, rows]))
        trust: Floats = np.where(self._has_evidence[:, rows], aged, self._start_trust[:, rows])
        return trust

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
        self._at_s = np.pad(self._at_s, ((0, columns), (0, rows)))
        self._per_half_life = np.pad(self._per_half_life, ((0, columns), (0, rows)))
        self._start_trust = np.pad(self._start_trust, ((0, columns), (0, rows)))
        self._has_evidence = np.pad(self._has_evidence, ((0, columns), (0, rows)))


def weighted_median(lines: Floats, weights: Floats) -> Floats:
    """Returns the median of each coefficient over the members, weighted by trust, as `member_costs.common_line` does.
    `lines` has shape `(columns, 2, rows)`, `weights` `(columns, rows)`, and the result `(columns, 2)`; it is nan where
    all weights are 0."""
    if lines.shape[2] == 0:
        return np.full(lines.shape[:2], np.nan)
    order = np.argsort(lines, axis=2)
    summed = np.cumsum(np.take_along_axis(np.broadcast_to(weights[:, None, :], lines.shape), order, axis=2), axis=2)
    total = summed[:, :, -1:]
    at = np.argmax(summed >= 0.5 * total, axis=2)[:, :, None]
    middle = np.take_along_axis(np.take_along_axis(lines, order, axis=2), at, axis=2)
    return np.where(total > 0.0, middle, np.nan)[:, :, 0]


def _weighted_mean(lines: Floats, weights: Floats) -> Floats:
    known = np.where(weights[:, None, :] > 0.0, lines, 0.0)
    total = weights.sum(axis=1)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Floats = (known * weights[:, None, :]).sum(axis=2) / total
    return mean


def _drawn(own: Floats, common: Floats, trust: Floats) -> Floats:
    """Returns lines between the members' own and the common ones, as `member_costs.believed` does."""
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = np.log(own / common)
        left = trust * np.abs(apart)
        left = np.where(left < 2.0 * NOISE, np.maximum(0.0, 2.0 * (left - NOISE)), left)
        drawn = common * np.exp(np.copysign(left, apart))
        drawn = np.where((own <= 0.0) | (common <= 0.0), own, drawn)
    return np.where(np.isnan(common), own, np.where(trust == 0.0, common, drawn))
