"""Holds FIXME."""

from deploy.sizing.budget import arena_bytes, budget_lines, check_budget, inbox_bytes, refuse_if_too_small

__all__ = [
    "arena_bytes",
    "budget_lines",
    "check_budget",
    "inbox_bytes",
    "refuse_if_too_small",
]
