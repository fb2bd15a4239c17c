"""Which part of a checkpoint a weight belongs to, by its name, over all families. Pure.

A loader takes one part and leaves the others alone; a name that is no part's is nobody's to leave out.
"""

from __future__ import annotations

from typing import Literal

Part = Literal["vision", "sound", "projector", "text", "speech"]

# The names have grown: `visual.`, then `model.visual.`; `language_model.model.`, then `model.language_model.`;
# `thinker.` before all of these where there are other parts.
_PART_TO_PATTERN: dict[Part, str] = {
    "vision": r"^(thinker\.)?(model\.)?(visual|vision_tower)\.|^(model\.)?image_newline$",
    "sound": r"^(thinker\.)?(model\.)?audio_tower\.",
    "projector": r"^(model\.)?multi_modal_projector\.",
    "text": r"^(thinker\.)?(model\.)?(language_model|embed_tokens|layers|norm|lm_head)\.",
    "speech": r"^(talker|code2wav|token2wav)\.",
}


def names_of_others(*own: Part) -> tuple[str, ...]:
    """Patterns of the names that belong to other parts than `own`."""
    return tuple(pattern for part, pattern in _PART_TO_PATTERN.items() if part not in own)
