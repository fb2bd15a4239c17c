"""Shared by all tests: what must hold for every one of them."""

from __future__ import annotations

from deploy.environment import set_local_switches, set_switches

# Read by libraries at import; set before any test module imports them.
set_switches()
set_local_switches()
