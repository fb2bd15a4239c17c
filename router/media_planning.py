"""Turns probed media into items with plans that fit the context: items of fixed size come first, then the videos share
what is left.

A video may become two items, its pictures and its sound. Items that the degradation policy removed are left out here,
and items that it reduced are planned smaller. The module decodes nothing; of a request it knows only the media and
their options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fabric.errors import InvalidMedia
from fabric.messages import MediaItem
from modalities.family import DEFAULT_OPTIONS, Family, ItemPlan, MediaHeader, MediaOptions
from modalities.identify import plan_media
from router.media_budget import share_tokens
from router.media_probing import SOUND, ProbedMedium

VIDEO = "video"
"""This is the modality whose frames are thinned out to fit."""


class ItemKey(NamedTuple):
    """An `ItemKey` names an item of a request, and stays the same however often the item is planned. A part has one
    item per modality."""

    part: str
    modality: str


@dataclasses.dataclass(frozen=True, slots=True)
class Losses:
    """Holds what the degradation policy has reduced or removed so far."""

    item_to_reduction: Mapping[ItemKey, int] = dataclasses.field(default_factory=dict)
    """Maps an item to the number of times it was reduced, as in `MediaOptions.reduction`."""
    removed: frozenset[ItemKey] = frozenset()


NOTHING_LOST = Losses()


class PlannedItem(NamedTuple):
    plan: ItemPlan
    item: MediaItem
    data: bytes


class _Wanted(NamedTuple):
    """Holds an item before it is planned."""

    medium: ProbedMedium
    modality: str
    header: MediaHeader
    options: MediaOptions
    anchor: int


class MediaPlanner:
    """A `MediaPlanner` has no state; each router has one. The `video_options` of a call combine the deployment's
    defaults with the request's wishes."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def plan(
        self, media: Sequence[ProbedMedium], video_options: MediaOptions, room: int, salt: str, losses: Losses
    ) -> list[PlannedItem]:
        """Plans all items of a request. `room` is the number of tokens that all media together may have in the context.
        Videos get what the other items leave of it, at most `video_options.max_tokens` together; a video that wants no
        more than its share keeps its options, and so its identity. Other items are planned as they are, whether they
        fit or not. Raises InvalidMedia naming the part."""
        wanted = self._wanted(media, video_options, losses)
        plans = [self._plan(each) for each in wanted]
        at = [index for index, each in enumerate(wanted) if each.modality == VIDEO]
        others = sum(sum(plan.unit_tokens) for index, plan in enumerate(plans) if index not in set(at))
        tokens = [sum(plans[index].unit_tokens) for index in at]
        shares = share_tokens(tokens, min(room - others, video_options.max_tokens))
        for index, share, natural in zip(at, shares, tokens, strict=True):
            if share < natural:
                options = dataclasses.replace(wanted[index].options, max_tokens=max(1, share))
                wanted[index] = wanted[index]._replace(options=options)
        return [self._item(index, each, salt) for index, each in enumerate(wanted)]

    def is_reducible(self, medium: ProbedMedium, key: ItemKey, video_options: MediaOptions, reduction: int) -> bool:
        """Returns whether the item would cost less if it were reduced once more than `reduction` times. (A sound never
        does; nor does a picture that is already as small as the model takes pictures.)"""
        losses = [Losses({key: times}) for times in (reduction, reduction + 1)]
        now, less = (
            next(each for each in self._wanted([medium], video_options, loss) if each.modality == key.modality)
            for loss in losses
        )
        return self._plan(less).cost < self._plan(now).cost

    # ------------------------------------------------------------ helpers

    def _wanted(self, media: Sequence[ProbedMedium], video_options: MediaOptions, losses: Losses) -> list[_Wanted]:
        wanted: list[_Wanted] = []
        for medium in media:
            key = ItemKey(medium.part, medium.modality)
            if key in losses.removed:
                continue
            options = video_options if medium.modality == VIDEO else DEFAULT_OPTIONS
            reduction = losses.item_to_reduction.get(key, 0)
            options = dataclasses.replace(options, reduction=reduction, max_pixels=medium.max_pixels)
            anchor = len(wanted)
            wanted.append(_Wanted(medium, medium.modality, medium.header, options, -1))
            if medium.sound is not None and ItemKey(medium.part, SOUND) not in losses.removed:
                wanted.append(_Wanted(medium, SOUND, medium.sound, DEFAULT_OPTIONS, anchor))
        return wanted

    def _plan(self, wanted: _Wanted) -> ItemPlan:
        try:
            return self._family.plan(wanted.header, wanted.options)
        except InvalidMedia as error:
            raise InvalidMedia(f"{wanted.medium.part}: {error.message}", param=wanted.medium.part) from error

    def _item(self, index: int, wanted: _Wanted, salt: str) -> PlannedItem:
        medium = wanted.medium
        planned = plan_media(
            self._family,
            medium.data,
            wanted.header,
            index,
            medium.part,
            salt,
            wanted.options,
            wanted.anchor,
            medium.digest,
        )
        return PlannedItem(planned.plan, planned.item, medium.data)
