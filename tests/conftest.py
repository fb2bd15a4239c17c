"""Sets up what all tests share, and checks what must hold for every run."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from inherited_signals import restore_signals

from deploy.process_setup import set_local_switches, set_switches

# Tests and the processes that they start keep temporary files in this folder of the run. At its end the folder must be
# empty except for pytest's own folders. Each process of pytest-xdist has its own folder in that of the run. The names
# are short because Ray puts sockets below them, and the path of a socket has at most 107 bytes.
XDIST_PROCESS = os.environ.get("PYTEST_XDIST_WORKER")
if XDIST_PROCESS is None:
    TEMP_DIR = tempfile.mkdtemp(prefix="w-")
    atexit.register(shutil.rmtree, TEMP_DIR, ignore_errors=True)  # This covers a run that ends before its session.
else:
    TEMP_DIR = os.path.join(tempfile.gettempdir(), XDIST_PROCESS.removeprefix("gw"))
    os.mkdir(TEMP_DIR)
os.environ["TMPDIR"] = tempfile.tempdir = TEMP_DIR

restore_signals()

# Libraries read these switches at import, so they are set before any test module imports a library.
set_switches()
set_local_switches()

# The result of a run must depend only on the commit, so each run draws the same examples. `make explore` draws others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
# `make mutants` runs the properties hundreds of times, so they have few examples and failures are not shrunk.
settings.register_profile(
    "mutants",
    derandomize=True,
    deadline=None,
    max_examples=25,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("same")

# Limits the examples of a property in `make mutants`: a unit test must kill a mutant, not the 300th example.
MUTANT_EXAMPLES = int(os.environ.get("WEFT_MUTANT_EXAMPLES", "20"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limits the examples that each test asks for, and keeps a tenth of the histories, under the profile `mutants`."""
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
    """Fails a run that leaves something in the temporary folder. It skips the check in `make mutants`, where many runs
    in one process and its forks share the folder; the campaign removes that folder."""
    if settings.get_current_profile_name() == "mutants":
        return
    if (rig := sys.modules.get("worker_rig")) is not None:
        rig.remove_folder()
    if (models := sys.modules.get("contract_model")) is not None:
        models.remove_contract_models()
    if XDIST_PROCESS is not None:
        # The process that started this one reports what the folder still contains. This removes an empty folder only.
        with contextlib.suppress(OSError):
            os.rmdir(TEMP_DIR)
        return
    folders = [Path(TEMP_DIR), *(path for path in Path(TEMP_DIR).iterdir() if path.name.isdigit())]
    found = [path for folder in folders for path in folder.iterdir() if path not in folders]
    left = sorted(path.name for path in found if not path.name.startswith("pytest-of-"))
    shutil.rmtree(TEMP_DIR, ignore_errors=True)
    if left:
        print(f"\nleft in the temporary folder: {', '.join(left)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
