"""A request as the cluster sees it: ids, media and stops. Frozen; kept until the request's terminal event."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fabric.ids import BlockHash
from fabric.messages import MediaItem, PlaceholderRange, SamplingParams, StopConditions


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    """One per position, placeholders expanded."""
    placeholders: tuple[PlaceholderRange, ...]
    media: tuple[MediaItem, ...]
    media_bytes: tuple[bytes, ...]
    """The encoded file of each medium: an encoding may be needed again at any time."""
    block_hashes: tuple[BlockHash, ...]
    sampling: SamplingParams
    stop: StopConditions
    stop_strings: tuple[str, ...] = ()
    num_choices: int = 1
    cache_salt: str = ""
    priority: int = 0
    ignored_fields: tuple[str, ...] = ()

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Ids that end a choice, and are no text then."""
        eos = () if self.stop.ignore_eos else self.stop.eos_token_ids
        return frozenset((*eos, *self.stop.stop_token_ids))

    @property
    def facts(self) -> dict[str, object]:
        """For the trace: its length, and what each medium became."""
        media = [
            {
                "part": item.part,
                "modality": item.modality,
                "num_tokens": item.num_tokens,
                "cost": item.cost,
                "options": item.options,
            }
            for item in self.media
        ]
        return {"num_prompt_tokens": len(self.token_ids), "num_media": len(media), "media": media}

    @property
    def modality_to_tokens(self) -> dict[str, int]:
        """Prompt tokens per modality."""
        counts: Counter[str] = Counter()
        for run in self.placeholders:
            counts[self.media[run.item].modality] += run.length
        return dict(counts)
