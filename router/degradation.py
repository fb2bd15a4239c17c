"""The degradation policy decides what happens to a request whose medium could not be encoded: the medium is made
smaller, then removed, or the request fails. Each step down ends the attempt and plans a new prompt, and the answer
reports the step.

    on_encode_failure   steps
    error               none: the failure is the answer (the default)
    reduce              the item once at half its size (every other frame, half the side of a picture)
    text_only           the same, and if that fails too, or can't be done, without the item

It knows nothing of attempts or tokens; it asks the intake what an item would become.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from fabric.errors import DeadlineExceeded, EncodeFailed, WeftError
from fabric.messages import MediaItem
from router.config import Policy
from router.media_planning import NOTHING_LOST, ItemKey, Losses
from router.prompt import Prompt

REDUCED, REMOVED = "reduced", "removed"
FAILURES = (EncodeFailed, DeadlineExceeded)
"""These are failures that an encoder may avoid with less work. A deadline is one that a silent encoder missed. A broken
medium, a lost member and an encoder that reports that it is busy are never among them."""
MAX_REDUCTIONS = 1


class StepDown(NamedTuple):
    """A `StepDown` is one medium that the model did not get as the client sent it."""

    key: ItemKey
    action: str
    """This is `reduced` or `removed`."""
    reason: WeftError

    def to_json(self) -> dict[str, object]:
        return {
            "part": self.key.part,
            "modality": self.key.modality,
            "action": self.action,
            "reason": self.reason.code,
            "message": self.reason.message,
        }


class DegradationPolicy:
    """A `DegradationPolicy` serves one request. `is_reducible(item, times)` returns whether the item, already reduced
    `times` times, could be reduced once more; `replan` makes the prompt without what was lost."""

    def __init__(
        self,
        policy: Policy,
        is_reducible: Callable[[ItemKey, int], bool],
        replan: Callable[[Losses], Awaitable[Prompt]],
    ) -> None:
        self.degraded: tuple[StepDown, ...] = ()
        """Holds the last step of each item, in the order of their first steps."""
        self._policy = policy
        self._is_reducible = is_reducible
        self._replan = replan
        self._losses = NOTHING_LOST

    async def step_down(self, error: WeftError, items: Sequence[MediaItem]) -> tuple[Prompt, list[StepDown]] | None:
        """Takes a step down after `items` failed with `error`, and returns the new prompt and the steps that lead to
        it. It reduces the items that can be reduced; only if none can, it removes the items. Returns None, and changes
        nothing, if the policy allows no further step."""
        if self._policy == "error" or not items or not isinstance(error, FAILURES):
            return None
        keys = list(dict.fromkeys(ItemKey(item.part, item.modality) for item in items))
        smaller = [key for key in keys if self._can_reduce(key)]
        if not smaller and self._policy != "text_only":
            return None
        steps = [StepDown(key, REDUCED if smaller else REMOVED, error) for key in smaller or keys]
        losses = self._with(steps)
        prompt = await self._replan(losses)
        self._losses = losses
        self.degraded = tuple(
            ({step.key: step for step in self.degraded} | {step.key: step for step in steps}).values()
        )
        return prompt, steps

    def _can_reduce(self, key: ItemKey) -> bool:
        times = self._losses.item_to_reduction.get(key, 0)
        return times < MAX_REDUCTIONS and self._is_reducible(key, times)

    def _with(self, steps: Sequence[StepDown]) -> Losses:
        before = self._losses
        reduced = {step.key: before.item_to_reduction.get(step.key, 0) + 1 for step in steps if step.action == REDUCED}
        removed = {step.key for step in steps if step.action == REMOVED}
        return Losses({**before.item_to_reduction, **reduced}, before.removed | removed)
