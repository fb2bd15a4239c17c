"""Shared by all tests: what must hold for every one of them."""

from __future__ import annotations

from hypothesis import settings

from deploy.environment import set_local_switches, set_switches

# Read by libraries at import; set before any test module imports them.
set_switches()
set_local_switches()

# What a run says belongs to the commit, so everybody's run draws the same examples. `make explore` draws new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
settings.load_profile("same")
