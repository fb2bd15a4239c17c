"""Holds FIXME."""

from router.prompt.prompt_builder import Draft, Prompt, PromptBuilder
from router.prompt.request_media import NOTHING_LOST, ItemKey, Losses

__all__ = [
    "NOTHING_LOST",
    "Draft",
    "ItemKey",
    "Losses",
    "Prompt",
    "PromptBuilder",
]
