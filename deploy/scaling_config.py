"""Defines the section of the configuration that scales a pool by its work. The same section stands below `encoders` and
below `workers`.

The module knows nothing of how a decision is made; `deploy/scaling/` makes it by the rules that the section gives.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from deploy.config_values import Section, default_of
from deploy.scaling import ScalingRules


class AutoscalingSection(Section):
    """Scales a pool between two sizes, by the predicted seconds of its queued work."""

    max_replicas: int | None = Field(None, ge=1)
    """Sets the largest size of the pool. With None, the pool is not scaled and has `replicas` members; with a number,
    `replicas` has no effect."""
    min_replicas: int = Field(default_of(ScalingRules, "min_replicas"), ge=1)
    """Sets the smallest size of the pool, with which it begins."""
    slo_ttft_s: float = Field(default_of(ScalingRules, "slo_ttft_s"), gt=0)
    target_queue_s: float | None = Field(default_of(ScalingRules, "target_queue_s"), gt=0)
    target_utilization: float = Field(default_of(ScalingRules, "target_utilization"), gt=0, lt=1)
    interval_s: float = Field(default_of(ScalingRules, "interval_s"), ge=0.2)
    """Sets the time between two decisions. A burst is answered within two of them. Members send their loads twice in
    this time."""
    downscale_delay_s: float = Field(default_of(ScalingRules, "downscale_delay_s"), ge=0)
    startup_s: float = Field(default_of(ScalingRules, "startup_s"), gt=0)

    @model_validator(mode="after")
    def _check_order(self) -> AutoscalingSection:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}, but it must be at least min_replicas, which is "
                f"{self.min_replicas}"
            )
        return self

    def first_size(self, replicas: int) -> int:
        """Returns the size with which the pool begins, if it has `replicas` members unless it is scaled."""
        return replicas if self.max_replicas is None else self.min_replicas

    def largest_size(self, replicas: int) -> int:
        """Returns the largest size of the pool, if it has `replicas` members unless it is scaled."""
        return replicas if self.max_replicas is None else self.max_replicas

    @property
    def queue_limit_s(self) -> float:
        """Returns how long work may wait in the pool."""
        return self.slo_ttft_s / 4 if self.target_queue_s is None else self.target_queue_s

    @property
    def rules(self) -> ScalingRules | None:
        """Returns the rules of the pool, or None if it is not scaled."""
        if self.max_replicas is None:
            return None
        return ScalingRules(
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            slo_ttft_s=self.slo_ttft_s,
            target_queue_s=self.target_queue_s,
            target_utilization=self.target_utilization,
            interval_s=self.interval_s,
            downscale_delay_s=self.downscale_delay_s,
            startup_s=self.startup_s,
        )
