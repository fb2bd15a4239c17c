"""Writes the report of `make gpu` (`gpu_report`) and prints it at the end of the run.

`make gpu` runs this folder in Weft's environment, and the tests of vLLM once more in the environment that `make
install-vllm VLLM=gpu` makes. Without a CUDA device, all tests are skipped and there is no report."""

from __future__ import annotations

import os

import pytest
import torch
from gpu_report import PAGE, RanTest, facts, has_vllm, report, write

from llm_workers.vllm_engine.engine_args import ENVIRONMENT

if has_vllm():  # vLLM reads these when it is imported.
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

_TESTS: dict[str, RanTest] = {}


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:  # A whole module is.
        _note(report, 0.0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _note(report, report.duration)


def _note(report: pytest.CollectReport | pytest.TestReport, seconds: float) -> None:
    before = _TESTS.get(report.nodeid)
    reason = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(report.longrepr) if crash is None else str(crash.message)
    if before is None or before.outcome == "passed":
        _TESTS[report.nodeid] = RanTest(report.nodeid, report.outcome, seconds, reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not torch.cuda.is_available():
        terminalreporter.write_line("there is no CUDA device, so there is no report of a GPU")
        return
    name = "the environment of vLLM" if has_vllm() else "Weft's environment"
    page = write(report(name, facts(), list(_TESTS.values())), PAGE, is_first=not has_vllm())
    terminalreporter.write_sep("=", f"paste this into an issue ({PAGE})")
    terminalreporter.write_line(page)
