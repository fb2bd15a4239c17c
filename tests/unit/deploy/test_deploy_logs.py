"""Tests the format of log lines, where they go, and which of them are written."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.config import ClusterConfig, LoggingSection
from deploy.logs import (
    JsonFormatter,
    TextFormatter,
    collect_library_logs,
    configure_logs,
    where_logs_are,
    with_run_folder,
)
from fabric.contracts import as_member, enter_request


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    """Puts back what `configure_logs` sets in this process."""
    loggers = [logging.getLogger(), *(each for each in logging.root.manager.loggerDict.values())]
    named = [each for each in loggers if isinstance(each, logging.Logger)]
    before = [(each, each.level, each.propagate, list(each.handlers)) for each in named]
    hooks = sys.excepthook, threading.excepthook
    yield
    logging.captureWarnings(False)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.close()
    for each, level, propagate, handlers in before:
        each.setLevel(level)
        each.propagate = propagate
        each.handlers = handlers
    sys.excepthook, threading.excepthook = hooks


def record(message: str = "hello %s", *args: object, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": message, "args": args or ("you",), "levelname": "INFO", "name": "router.x"})
    vars(made).update(extra)
    return made


def lines(folder: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / f"{name}.log").read_text().splitlines()]


async def test_a_json_line_has_member_request_and_what_its_writer_added() -> None:
    async def work() -> str:
        enter_request("req-1")
        return JsonFormatter("worker-7").format(record(num_tokens=3))

    line = json.loads(await asyncio.create_task(work()))
    assert line["message"] == "hello you"
    assert (line["level"], line["logger"]) == ("info", "router.x")
    assert (line["member_id"], line["request_id"], line["num_tokens"]) == ("worker-7", "req-1", 3)
    assert line["time"].endswith("+00:00")
    assert json.loads(JsonFormatter("worker-7").format(record()))["request_id"] is None, "the task's alone"


def test_a_thread_names_the_request_itself_and_one_process_may_hold_several_members() -> None:
    with as_member("encoder-1"):
        line = json.loads(JsonFormatter("serve").format(record(request_id="req-2")))
    assert (line["member_id"], line["request_id"]) == ("encoder-1", "req-2")


@pytest.mark.parametrize("kind", [TextFormatter, JsonFormatter])
def test_a_fault_has_its_trace(kind: type[TextFormatter]) -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        text = kind("m").format(record(exc_info=(type(error), error, error.__traceback__)))
    assert "ValueError: broken" in text
    assert "in test_a_fault_has_its_trace" in text


def test_text_is_one_line_with_its_origin() -> None:
    text = TextFormatter("router-1").format(record(request_id="req-9"))
    assert text.endswith(" INFO router-1 req-9 router.x: hello you")
    assert "\n" not in text


FORGED = "a\r\n2026-01-01 00:00:00.000 CRITICAL router-1 - deploy: forged"
HOSTILE = [FORGED, "\x1b[31mred", "a\x85b", "a\u2028b", "a\u202eb", "a\x00\x08\x7f", "half \ud800"]


@pytest.mark.parametrize("said", HOSTILE)
@pytest.mark.parametrize("kind", [TextFormatter, JsonFormatter])
def test_text_of_a_client_forges_no_line(kind: type[TextFormatter], said: str) -> None:
    """A message quotes what a client sent, so nothing of it may begin a line or speak to a terminal."""
    text = kind("router-1").format(record("the field %s is unknown", said))
    assert len(text.splitlines()) == 1
    assert text.replace("\x7f", "" if kind is JsonFormatter else "\x7f").isprintable()


def test_a_trace_forges_no_line_either() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        text = TextFormatter("m").format(record(exc_info=(type(error), error, error.__traceback__)))
    first, *others = text.splitlines()
    assert first.endswith("hello you")
    assert [line for line in others if not line.startswith("    ")] == []


def test_letters_of_all_scripts_stay_as_they_are() -> None:
    assert TextFormatter("m").format(record("%s", "é 日本 עברית 🙂")).endswith("é 日本 עברית 🙂")


def test_levels_are_ours_by_config_and_a_library_is_heard_from_warning_on(tmp_path: Path) -> None:
    section = LoggingSection(format="json", dir=tmp_path, level="info", levels={"router.quiet": "error", "av": "info"})
    configure_logs(section, "router-1", "m1")
    for name in ("router.http", "router.quiet", "torch", "av"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger(name).log(level, "%s", logging.getLevelName(level))
    written = [(line["logger"], line["message"]) for line in lines(tmp_path, "router-1")]
    assert written == [
        ("router.http", "INFO"),
        ("router.http", "WARNING"),
        ("torch", "WARNING"),
        ("av", "INFO"),
        ("av", "WARNING"),
    ]
    assert {line["member_id"] for line in lines(tmp_path, "router-1")} == {"m1"}


@pytest.mark.parametrize("is_imported_first", [True, False])
def test_a_library_with_handlers_of_its_own_writes_to_our_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_imported_first: bool
) -> None:
    def import_it() -> None:
        """Does to the loggers of torch what `import torch` does."""
        for name in ("torch", "torch.part"):
            library = logging.getLogger(name)
            library.propagate = False
            library.setLevel(logging.WARNING)
            library.addHandler(logging.StreamHandler())

    section = LoggingSection(format="json", dir=tmp_path, levels={"torch.part": "info"})
    if is_imported_first:
        import_it()
    configure_logs(section, "p")
    if not is_imported_first:
        import_it()
        collect_library_logs(section)
    logging.getLogger("torch").info("not asked for")
    logging.getLogger("torch").warning("first")
    logging.getLogger("torch.part").info("second")
    assert [(line["logger"], line["message"]) for line in lines(tmp_path, "p")] == [
        ("torch", "first"),
        ("torch.part", "second"),
    ]
    assert capsys.readouterr().err == ""


def test_what_ends_a_thread_is_logged_with_its_trace(tmp_path: Path) -> None:
    configure_logs(LoggingSection(format="json", dir=tmp_path), "p")
    thread = threading.Thread(target=lambda: [][0])
    thread.start()
    thread.join()
    (line,) = lines(tmp_path, "p")
    assert line["level"] == "critical"
    assert "IndexError" in str(line["trace"])


def test_a_folder_that_can_not_be_written_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    configure_logs(LoggingSection(dir=tmp_path / "file" / "below"), "p")
    logging.getLogger("router").info("still heard")
    said = capsys.readouterr().err
    assert "the log can't be written to" in said
    assert "still heard" in said


def make_runs(above: Path, days: range) -> None:
    for day in days:
        (above / f"202001{day}-000000-1" / "ray").mkdir(parents=True)
    (above / "mine").mkdir()


def names(above: Path) -> list[str]:
    return sorted(path.name for path in above.iterdir())


def test_each_run_has_a_folder_and_the_oldest_go(tmp_path: Path) -> None:
    make_runs(tmp_path, range(10, 35))
    config = with_run_folder(ClusterConfig.model_validate({"logging": {"dir": str(tmp_path)}}))
    assert config.logging.dir is not None
    assert config.logging.dir.parent == tmp_path
    assert str(config.logging.dir) in where_logs_are(config.logging)
    configure_logs(config.logging, "serve")
    kept = [f"202001{day}-000000-1" for day in range(16, 35)]
    assert names(tmp_path) == [*kept, config.logging.dir.name, "mine"]


def test_the_oldest_runs_go_on_every_machine_where_a_member_logs(tmp_path: Path) -> None:
    """A member of a joined Ray receives the folder of the run; on its machine there may be folders of other runs, and
    newer ones."""
    make_runs(tmp_path, range(10, 35))
    section = LoggingSection(dir=tmp_path / "20200120-120000-7")
    configure_logs(section, "worker-1")
    kept = ["20200120-120000-7", *(f"202001{day}-000000-1" for day in range(16, 35))]
    assert names(tmp_path) == sorted([*kept, "mine"])
    (tmp_path / "20200109-000000-1").mkdir()
    configure_logs(section, "encoder-1")
    assert "20200109-000000-1" in names(tmp_path), "once for each run and machine"
    assert {path.name for path in (tmp_path / "20200120-120000-7").iterdir()} == {"worker-1.log", "encoder-1.log"}


def test_a_folder_that_is_no_runs_is_left_alone(tmp_path: Path) -> None:
    make_runs(tmp_path, range(10, 35))
    before = names(tmp_path)
    configure_logs(LoggingSection(dir=tmp_path / "logs"), "worker-1")
    assert names(tmp_path) == sorted([*before, "logs"])
