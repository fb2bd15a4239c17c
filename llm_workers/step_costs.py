"""What a step costs, learned from the steps: seconds = overhead + per_token * tokens, recent steps counting more.

Knows nothing of what the tokens are.
"""

from __future__ import annotations

DECAY = 0.98
"""Weight that a step keeps when the next one is seen: about the last 50 steps count."""


class StepCosts:
    """A weighted least-squares line through (tokens, seconds). Both numbers are 0 until something was seen."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` took `seconds`."""
        self._weight = self._weight * DECAY + 1.0
        self._x = self._x * DECAY + num_tokens
        self._y = self._y * DECAY + seconds
        self._xx = self._xx * DECAY + num_tokens * num_tokens
        self._xy = self._xy * DECAY + num_tokens * seconds

    @property
    def s_per_token(self) -> float:
        """Never below 0. Steps of one size alone say nothing of the slope: then it is the whole cost per token."""
        if self._weight == 0.0:
            return 0.0
        spread = self._xx - self._x * self._x / self._weight
        if spread <= 1e-9 * self._xx:
            return self._y / self._x
        return max(0.0, (self._xy - self._x * self._y / self._weight) / spread)

    @property
    def overhead_s(self) -> float:
        """Never below 0."""
        if self._weight == 0.0:
            return 0.0
        return max(0.0, (self._y - self.s_per_token * self._x) / self._weight)
