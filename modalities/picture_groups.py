"""Leaving out what nobody looks at: of a long video, only the groups of pictures that hold a wanted frame are decoded.

A group begins at a key frame and can be decoded by itself, but for the pictures that are shown before their key frame:
these lean on the group before. The file is still read forward, from its first packet. Knows packets, no pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from av.packet import Packet

from modalities.packets import is_shown

_MIN_SAVING = 0.5
"""Of the packets; for less, what the second look at the file costs is not worth it."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    is_needed: tuple[bool, ...]
    """Per group, in the order of the file."""
    times: npt.NDArray[np.int64]
    """Of all frames that are shown, ascending, in the stream's time base."""

    def number_of(self, time: int | None) -> int | None:
        """Of the frame that is shown at `time`, counted from the first; None if there is none."""
        if time is None:
            return None
        at = int(np.searchsorted(self.times, time))
        return at if at < len(self.times) and self.times[at] == time else None


def plan_groups(packets: Iterable[Packet[Any]], indices: Sequence[int], num_frames: int) -> GroupPlan | None:
    """Which groups have to be decoded for the frames `indices`, of a stream's packets in the order of the file; None
    if that saves little, or if the packets' times do not tell `num_frames` frames apart."""
    times: list[int] = []
    groups: list[int] = []
    key_times: list[int] = []
    sizes: list[int] = []
    for packet in packets:
        if packet.pts is None:
            return None
        if packet.is_keyframe or not key_times:
            key_times.append(packet.pts)
            sizes.append(0)
        sizes[-1] += 1
        if is_shown(packet):
            times.append(packet.pts)
            groups.append(len(key_times) - 1)
    order = np.argsort(np.array(times, np.int64), kind="stable")
    ascending = np.array(times, np.int64)[order]
    if len(times) != num_frames or not np.all(np.diff(ascending) > 0):
        return None
    needed = set()
    for index in set(indices):
        group = groups[order[index]]
        needed.add(group)
        if times[order[index]] < key_times[group]:
            needed.add(max(group - 1, 0))
    if sum(sizes[group] for group in needed) > (1 - _MIN_SAVING) * sum(sizes):
        return None
    return GroupPlan(tuple(group in needed for group in range(len(sizes))), ascending)
