"""Says how far apart two members run: `LinkRules` gives the class of the link between two places, and the planner costs
each class by a line of its own that it learns.

The class of a pair depends on the two places alone. A `LinkPlace` is what is known of where a member runs (machine,
process, NVLink domain, RDMA fabric), with the configured overrides that name the member. Members in equal places have
equal links, so a caller keeps one place per member and looks pairs up in a table (`LinkRules.table`).

A class gives the cost of a link and nothing else: no member is ever left out because of where it runs. The module is
pure. It knows nothing of how a place is found (`deploy.topology`), or of what a link costs
(`router.planning.member_costs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fabric.contracts import Member


class LinkClass(Enum):
    """A `LinkClass` says how far apart two members run. The planner costs links by class and never filters by it: a
    fitted alpha + beta * bytes says what a topology is worth, and a name does not."""

    SAME_PROCESS = "same_process"
    NVLINK = "nvlink"
    SAME_HOST = "same_host"
    RDMA = "rdma"
    """InfiniBand and RoCE are one class, because both read remote memory at the same rates. Members on fabrics that do
    not reach each other have different `rdma_fabric`s, so their links are of the class `TCP`."""
    TCP = "tcp"


LINK_CLASSES = tuple(LinkClass)
"""Gives each class its number in `LinkRules.table`."""


class MemberSelector(NamedTuple):
    """A `MemberSelector` selects members by patterns with `*`, `?` and `[...]`. A member is selected if every pattern
    matches it."""

    member_id: str = "*"
    host: str = "*"
    """This pattern is compared with the name of the machine, as `GET /weft/members` shows it."""
    kind: str = "*"
    labels: tuple[tuple[str, str], ...] = ()
    """Pairs names of labels with patterns; a member without such a label is not selected."""

    def selects(self, member: Member) -> bool:
        name_to_value = dict(member.place.labels)
        return (
            fnmatchcase(member.member_id, self.member_id)
            and fnmatchcase(machine(member.host), self.host)
            and fnmatchcase(member.kind, self.kind)
            and all(name in name_to_value and fnmatchcase(name_to_value[name], glob) for name, glob in self.labels)
        )


class LinkOverride(NamedTuple):
    """A `LinkOverride` states the class of the links from some encoders to some workers."""

    source: MemberSelector
    target: MemberSelector
    link: LinkClass


class LinkPlace(NamedTuple):
    """A `LinkPlace` is where a member runs, as far as its links depend on it. It is hashable."""

    machine: str
    process: str = ""
    """This names the process if several members share it, as in a cluster that runs in one process."""
    nvlink_domain: str = ""
    rdma_fabric: str = ""
    source_of: tuple[int, ...] = ()
    """Lists the overrides whose `source` selects the member, in ascending order."""
    target_of: tuple[int, ...] = ()
    """Lists the overrides whose `target` selects the member, in ascending order."""


class LinkRules:
    """Gives places to members and classes to pairs of places. The first override that fits a pair wins."""

    def __init__(self, overrides: Sequence[LinkOverride] = ()) -> None:
        self._overrides = tuple(overrides)

    def place(self, member: Member) -> LinkPlace:
        numbered = list(enumerate(self._overrides))
        name, _, process = member.host.partition("/")
        return LinkPlace(
            name,
            process,
            member.place.nvlink_domain,
            member.place.rdma_fabric,
            tuple(number for number, override in numbered if override.source.selects(member)),
            tuple(number for number, override in numbered if override.target.selects(member)),
        )

    def link_class(self, source: LinkPlace, target: LinkPlace) -> LinkClass:
        """Returns the class of the link on which a member at `target` reads from one at `source`."""
        named = set(source.source_of).intersection(target.target_of)
        if named:
            return self._overrides[min(named)].link
        if source.machine == target.machine and source.process and source.process == target.process:
            return LinkClass.SAME_PROCESS
        if source.nvlink_domain and source.nvlink_domain == target.nvlink_domain:
            return LinkClass.NVLINK
        if source.machine == target.machine:
            return LinkClass.SAME_HOST
        if source.rdma_fabric and source.rdma_fabric == target.rdma_fabric:
            return LinkClass.RDMA
        return LinkClass.TCP

    def table(self, sources: Sequence[LinkPlace], targets: Sequence[LinkPlace]) -> npt.NDArray[np.int8]:
        """Returns the number in `LINK_CLASSES` of each pair's class, with shape `(num_targets, num_sources)`. It equals
        `link_class` of each pair, and costs milliseconds for 1,000 x 200 places."""
        found = np.full((len(targets), len(sources)), LINK_CLASSES.index(LinkClass.TCP), np.int8)
        machines = _alike([place.machine for place in sources], [place.machine for place in targets])
        processes = _alike([place.process for place in sources], [place.process for place in targets])
        found[_alike([place.rdma_fabric for place in sources], [place.rdma_fabric for place in targets])] = _RDMA
        found[machines] = _SAME_HOST
        found[_alike([place.nvlink_domain for place in sources], [place.nvlink_domain for place in targets])] = _NVLINK
        found[machines & processes] = _SAME_PROCESS
        for number, override in reversed(list(enumerate(self._overrides))):
            are_sources = np.fromiter((number in place.source_of for place in sources), bool, len(sources))
            are_targets = np.fromiter((number in place.target_of for place in targets), bool, len(targets))
            found[np.ix_(are_targets, are_sources)] = LINK_CLASSES.index(override.link)
        return found


def machine(host: str) -> str:
    """Returns the machine of a `Member.host`, which is `machine`, or `machine/process` for members that share a process
    with others."""
    return host.partition("/")[0]


_SAME_PROCESS, _NVLINK, _SAME_HOST, _RDMA, _TCP = range(len(LINK_CLASSES))


def _alike(sources: Iterable[str], targets: Iterable[str]) -> npt.NDArray[np.bool_]:
    """Returns which pairs have the same name, with shape `(num_targets, num_sources)`; an empty name is like no
    other."""
    name_to_number: dict[str, int] = {}
    source_numbers, target_numbers = (
        np.array([name_to_number.setdefault(name, len(name_to_number)) if name else -1 for name in names], np.int32)
        for names in (sources, targets)
    )
    are_alike: npt.NDArray[np.bool_] = target_numbers[:, None] == source_numbers[None, :]
    return are_alike & (target_numbers >= 0)[:, None]
