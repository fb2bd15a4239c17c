"""Says what a router keeps of its learned costs for the next run, and how a file holds it.

`SavedCosts` holds a line for each kind of member, hardware, modality and stage, and for each link class, with the wall
time of the last observation. A line that was saved long ago weighs less, and none weighs as much as an observation of
this run. The file is JSON, so that an operator can read it. The module knows nothing of where the file
is, or of how costs are learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp2
from typing import Annotated, NamedTuple

import msgspec

from router.planning.link_classes import LinkClass
from router.planning.plan_types import Line

FORMAT = "weft learned costs"
VERSION = 1
SAVED_WEIGHT = 0.5
"""A line that was saved just now weighs this much: the machine is the same, but what else runs on it may differ."""
SAVED_HALF_LIFE_S = 24 * 3600.0
"""The weight of a saved line halves in this time."""
MAX_AGE_S = 30 * SAVED_HALF_LIFE_S
"""Lines that were not observed for this long are not saved again."""
MAX_LINES = 4096


class CostKey(NamedTuple):
    """A `CostKey` names a cost that members of one kind on equal hardware share."""

    kind: str
    hardware: str
    modality: str
    """This is empty for workers, and for the costs of an encoder over all modalities."""
    stage: str


class SeenLine(NamedTuple):
    line: Line
    seen_at_s: float
    """This is the wall time of the last observation, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class SavedCosts:
    """Holds the saved lines, and the wall time at which they were read."""

    key_to_line: Mapping[CostKey, SeenLine] = field(default_factory=dict)
    link_to_line: Mapping[LinkClass, SeenLine] = field(default_factory=dict)
    read_at_s: float = 0.0

    def start(self, key: CostKey) -> tuple[Line, float] | None:
        """Returns the line with its weight against lines of this run, which falls with its age, or None if there is
        none."""
        seen = self.key_to_line.get(key)
        if seen is None:
            return None
        age_s = max(0.0, self.read_at_s - seen.seen_at_s)
        return seen.line, SAVED_WEIGHT * exp2(-age_s / SAVED_HALF_LIFE_S)

    def link(self, link: LinkClass) -> Line | None:
        seen = self.link_to_line.get(link)
        return seen.line if seen else None

    def merged(self, other: SavedCosts) -> SavedCosts:
        """Returns the newer line of both for each cost."""
        costs, links = dict(other.key_to_line), dict(other.link_to_line)
        costs.update((key, seen) for key, seen in self.key_to_line.items() if _is_newer(seen, costs.get(key)))
        links.update((link, seen) for link, seen in self.link_to_line.items() if _is_newer(seen, links.get(link)))
        return SavedCosts(costs, links, self.read_at_s)

    def updated(
        self, key_to_line: Mapping[CostKey, SeenLine], link_to_line: Mapping[LinkClass, SeenLine], now_s: float
    ) -> SavedCosts:
        """Returns these costs with newer lines in place of older ones, and without those that are too old."""
        costs, links = {**self.key_to_line, **key_to_line}, {**self.link_to_line, **link_to_line}
        return SavedCosts(
            {key: seen for key, seen in costs.items() if now_s - seen.seen_at_s <= MAX_AGE_S},
            {link: seen for link, seen in links.items() if now_s - seen.seen_at_s <= MAX_AGE_S},
            now_s,
        )


def _is_newer(seen: SeenLine, other: SeenLine | None) -> bool:
    return other is None or seen.seen_at_s >= other.seen_at_s


# ------------------------------------------------------------ the file

_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]


class _CostRecord(msgspec.Struct, forbid_unknown_fields=True):
    kind: _Name
    hardware: _Name
    modality: _Name
    stage: _Name
    base_s: _Seconds
    per_unit_s: _Seconds
    seen_at_s: float


class _LinkRecord(msgspec.Struct, forbid_unknown_fields=True):
    link: LinkClass
    base_s: _Seconds
    s_per_byte: _Seconds
    seen_at_s: float


class _CostsFile(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    model: str
    costs: Annotated[list[_CostRecord], msgspec.Meta(max_length=MAX_LINES)]
    links: Annotated[list[_LinkRecord], msgspec.Meta(max_length=MAX_LINES)]


def encode_costs(saved: SavedCosts, model: str) -> bytes:
    """Returns the content of a file for a cluster that serves `model`."""
    costs = [_CostRecord(*key, *line, seen_at_s) for key, (line, seen_at_s) in sorted(saved.key_to_line.items())]
    named = sorted(saved.link_to_line.items(), key=lambda item: item[0].value)
    links = [_LinkRecord(link, *line, seen_at_s) for link, (line, seen_at_s) in named]
    content = msgspec.json.encode(_CostsFile(FORMAT, VERSION, model, costs, links))
    return msgspec.json.format(content, indent=1) + b"\n"


def decode_costs(content: bytes, model: str, now_s: float) -> SavedCosts:
    """Returns the costs in the content of a file. Lines from the future, which a clock that was ahead has left, count
    as seen at `now_s`, so that later ones replace them. Raises ValueError if it is no such file, or one for another
    model."""
    try:
        found = msgspec.json.decode(content, type=_CostsFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not a file of learned costs: {error}") from error
    if (found.format, found.version) != (FORMAT, VERSION):
        raise ValueError(
            f"it has the format {found.format!r} {found.version}, but this router reads {FORMAT!r} {VERSION}"
        )
    if found.model != model:
        raise ValueError(f"it holds costs of the model {found.model!r}, but this router serves {model!r}")
    return SavedCosts(
        {
            CostKey(each.kind, each.hardware, each.modality, each.stage): SeenLine(
                Line(each.base_s, each.per_unit_s), min(each.seen_at_s, now_s)
            )
            for each in found.costs
            if each.base_s + each.per_unit_s > 0.0
        },
        {
            each.link: SeenLine(Line(each.base_s, each.s_per_byte), min(each.seen_at_s, now_s))
            for each in found.links
            if each.base_s + each.s_per_byte > 0.0
        },
        now_s,
    )
