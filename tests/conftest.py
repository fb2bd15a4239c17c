"""Shared by all tests: what must hold for every one of them."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from deploy.environment import set_local_switches, set_switches

# What a test, or a process that it starts, keeps in the temporary folder lies in one of this run, which must be empty
# at the end but for pytest's own. A short name: Ray puts sockets below it.
TEMP_DIR = tempfile.mkdtemp(prefix="w-")
os.environ["TMPDIR"] = tempfile.tempdir = TEMP_DIR
atexit.register(shutil.rmtree, TEMP_DIR, ignore_errors=True)  # where a run ends before its session does

# A run may have been started to ignore them, and what it starts would inherit that: `weft serve` does as it is told.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# Read by libraries at import; set before any test module imports them.
set_switches()
set_local_switches()

# What a run says belongs to the commit, so everybody's run draws the same examples. `make explore` draws new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
# `make mutants` runs the properties hundreds of times: few examples each, and no shrinking of what fails.
settings.register_profile(
    "mutants",
    derandomize=True,
    deadline=None,
    max_examples=25,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("same")

# What a property of `make mutants` may draw: what survives is killed by a unit test, not by the 300th example.
MUTANT_EXAMPLES = int(os.environ.get("WEFT_MUTANT_EXAMPLES", "20"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under the profile `mutants`, caps the examples that a test asks for itself and keeps a tenth of the histories."""
    if settings.get_current_profile_name() != "mutants":
        return
    items[:] = [item for item in items if not item.name.startswith("test_histories[") or item.name.endswith("[0]")]
    for item in items:
        test = getattr(item, "function", None)
        asked = getattr(test, "_hypothesis_internal_use_settings", None)
        if asked is not None:
            test._hypothesis_internal_use_settings = settings(
                asked, max_examples=min(asked.max_examples, MUTANT_EXAMPLES)
            )
        machine = getattr(getattr(item, "cls", None), "settings", None)
        if isinstance(machine, settings):
            item.cls.settings = settings(machine, max_examples=min(machine.max_examples, MUTANT_EXAMPLES))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that leaves something in the temporary folder fails. (Those of `make mutants` are many in one process and
    its forks, which share the folder; the campaign removes it.)"""
    if settings.get_current_profile_name() == "mutants":
        return
    if (rig := sys.modules.get("worker_rig")) is not None:
        rig.remove_folder()
    left = sorted(path.name for path in Path(TEMP_DIR).iterdir() if not path.name.startswith("pytest-of-"))
    shutil.rmtree(TEMP_DIR, ignore_errors=True)
    if left:
        print(f"\nleft in the temporary folder: {', '.join(left)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
