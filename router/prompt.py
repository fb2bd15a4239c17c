"""A prompt is a request as the cluster sees it: ids, media and stops. It is frozen, and is kept until the request's
terminal event. It knows nothing of the client's format.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fabric.ids import BlockHash
from fabric.messages import MediaItem, PlaceholderRange, SamplingParams, StopConditions


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    """Holds one id per position, with placeholders expanded."""
    placeholders: tuple[PlaceholderRange, ...]
    media: tuple[MediaItem, ...]
    media_bytes: tuple[bytes, ...]
    """Holds the encoded file of each medium, because an encoding may be needed again at any time."""
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
        """Returns the ids that end a choice; the id that ends it adds no text."""
        eos = () if self.stop.ignore_eos else self.stop.eos_token_ids
        return frozenset((*eos, *self.stop.stop_token_ids))

    @property
    def facts(self) -> dict[str, object]:
        """Returns facts for the trace: the length of the prompt, and what each medium became."""
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
        """Returns the number of prompt tokens per modality."""
        counts: Counter[str] = Counter()
        for run in self.placeholders:
            counts[self.media[run.item].modality] += run.length
        return dict(counts)
