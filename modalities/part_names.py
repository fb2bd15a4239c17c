"""Says to which part of a checkpoint a weight belongs. This follows from the weight's name, for all families. This
module is pure.

A loader takes one part and leaves out the names of the other parts. A name that belongs to no part is never left out.
"""

from __future__ import annotations

from typing import Literal

Part = Literal["vision", "sound", "projector", "text", "speech"]

# The names changed over time: `visual.` became `model.visual.`, and `language_model.model.` became
# `model.language_model.`. `thinker.` is in front of all of these in models with other parts.
_PART_TO_PATTERN: dict[Part, str] = {
    "vision": r"^(thinker\.)?(model\.)?(visual|vision_tower)\.|^(model\.)?image_newline$",
    "sound": r"^(thinker\.)?(model\.)?audio_tower\.",
    "projector": r"^(model\.)?multi_modal_projector\.",
    "text": r"^(thinker\.)?(model\.)?(language_model|embed_tokens|layers|norm|lm_head)\.",
    "speech": r"^(talker|code2wav|token2wav)\.",
}


def names_of_others(*own: Part) -> tuple[str, ...]:
    """Returns patterns of the names that belong to other parts than `own`."""
    return tuple(pattern for part, pattern in _PART_TO_PATTERN.items() if part not in own)
