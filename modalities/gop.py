"""Plans which groups of pictures of a long video are decoded: only those that hold a wanted frame.

A group begins at a key frame and can be decoded by itself, except for the pictures that are shown before their key
frame, which refer to the group before. The file is still read forward from its first packet. This module knows packets,
and nothing of pixels.
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
"""Limits the plan to files where at least this share of the packets is left out; a smaller saving does not pay for the
second read of the file."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Says which groups of pictures of a video are decoded, and which frame is shown at which time."""

    is_needed: tuple[bool, ...]
    """Says for each group, in the order of the file, whether it is decoded."""
    times: npt.NDArray[np.int64]
    """Holds the times of all frames that are shown, in ascending order and in the stream's time base."""

    def number_of(self, time: int | None) -> int | None:
        """Returns the number of the frame that is shown at `time`, counted from the first; None if there is no such
        frame."""
        if time is None:
            return None
        at = int(np.searchsorted(self.times, time))
        return at if at < len(self.times) and self.times[at] == time else None


def plan_groups(packets: Iterable[Packet[Any]], indices: Sequence[int], num_frames: int) -> GroupPlan | None:
    """Returns which groups have to be decoded for the frames `indices`. `packets` are a stream's packets in the order
    of the file. Returns None if this saves little, or if the packets' times do not distinguish `num_frames` frames."""
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
