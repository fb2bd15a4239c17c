"""Sets up where log lines go and how they look: text for people, JSON for machines.

It configures the standard library's `logging` once in each process; there is no further dependency, because the project
needs only a formatter of its own. Each line has its time, level, logger, member and request. A JSON line is an object;
its further fields are those that the calling code added (`extra=`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import threading
import traceback
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

from deploy.config import ClusterConfig, LoggingSection
from deploy.printable import escaped
from fabric.contracts import member_id, request_id

logger = logging.getLogger(__name__)
OUR_PACKAGES = ("fabric", "modalities", "kv_index", "encoder_pool", "llm_workers", "router", "deploy", "loadtest")
OWN_HANDLERS = ("torch", "transformers", "huggingface_hub")
"""The loggers of these libraries get handlers of their own when the libraries are imported, and then pass no lines
on."""
NUM_KEPT_FILES = 3
NUM_KEPT_RUNS = 20
_STANDARD_FIELDS = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logs(
    section: LoggingSection, process: str, member_id: str = "", terminal_level: int | None = None
) -> None:
    """Sets up the log of this process. Side effects: it replaces the root logger's handlers, sets levels, and logs
    warnings and uncaught exceptions. The first process of a run on a machine creates the folder and removes those
    of the oldest runs.

    `process` names the log file. A line that no other member's code writes carries `member_id`, or `process` if that
    is empty. With `terminal_level`, lines from that level on also go to standard error, as text. If the folder can't be
    written to, lines go to standard error instead, and one of them says so."""
    member_id = member_id or process
    handlers: list[logging.Handler] = []
    why_not = None
    if section.to == "files" and section.dir is not None:
        try:
            if not section.dir.is_dir():
                section.dir.mkdir(parents=True, exist_ok=True)
                _remove_oldest_runs(section.dir)
            file = section.dir / f"{process}.log"
            handlers.append(
                RotatingFileHandler(file, maxBytes=section.max_file_bytes, backupCount=NUM_KEPT_FILES, encoding="utf-8")
            )
        except OSError as error:
            why_not = error
    if not handlers:
        handlers.append(logging.StreamHandler())
    elif terminal_level is not None:
        terminal = logging.StreamHandler()
        terminal.setLevel(terminal_level)
        terminal.setFormatter(TextFormatter(member_id))
        handlers.append(terminal)
    for handler in handlers:
        if handler.formatter is None:
            kind = JsonFormatter if section.format == "json" else TextFormatter
            handler.setFormatter(kind(member_id))
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    set_levels(section)
    collect_library_logs(section)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    if why_not is not None:
        logger.warning("the log can't be written to %s, so it goes to standard error: %s", section.dir, why_not)


def set_levels(section: LoggingSection, before: LoggingSection | None = None) -> None:
    """Sets the levels of our own loggers and of those that the section names. A logger that only `before` named, the
    section that held until now, follows the loggers above it again."""
    for name in () if before is None else before.levels.keys() - section.levels.keys():
        logging.getLogger(name).setLevel(logging.NOTSET)
    for name in OUR_PACKAGES:
        logging.getLogger(name).setLevel(section.level.upper())
    for name, level in section.levels.items():
        logging.getLogger(name).setLevel(level.upper())


def collect_library_logs(section: LoggingSection) -> None:
    """Sends the lines that libraries log to where all lines go, from the levels in `section.levels` on. Side effect:
    libraries that were imported with handlers of their own (`OWN_HANDLERS`) lose the handlers that write to a stream.
    Call it again after importing such a library, because the import sets its handlers and level."""
    for name, each in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] not in OWN_HANDLERS or not isinstance(each, logging.Logger):
            continue
        for handler in [one for one in each.handlers if type(one) is logging.StreamHandler]:
            each.removeHandler(handler)
            each.propagate = True
    for name, level in section.levels.items():
        logging.getLogger(name).setLevel(level.upper())


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: object) -> None:
    if issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    logger.critical("an exception was not caught", exc_info=error)


class _Formatter(logging.Formatter):
    def __init__(self, member_id: str) -> None:
        super().__init__()
        self._member_id = member_id

    def origin(self, record: logging.LogRecord) -> tuple[str, str]:
        """Returns the member and the request of a line. It must run in the thread that wrote the line."""
        named = getattr(record, "request_id", None)
        return member_id() or self._member_id, str(named or request_id())


class TextFormatter(_Formatter):
    """Formats a record as text, for example
    `2026-01-31 12:00:00.123 INFO router-x1 req-7f3 router.access_log: POST ... 200 in 12 ms`. What a message quotes can
    forge no line: unprintable characters are escaped, and the lines of a trace are indented."""

    def format(self, record: logging.LogRecord) -> str:
        member, request = self.origin(record)
        when = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        line = f"{when} {record.levelname} {member} {request or '-'} {record.name}: {record.getMessage()}"
        trace = _trace(record).split("\n") if record.exc_info else []
        return "\n".join([escaped(line), *(f"    {escaped(each)}" for each in trace)])


class JsonFormatter(_Formatter):
    """Formats a record as a JSON object, in one line of ASCII characters."""

    def format(self, record: logging.LogRecord) -> str:
        member, request = self.origin(record)
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "member_id": member,
            "request_id": request or None,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS | line.keys()}
        if record.exc_info:
            line["trace"] = _trace(record)
        return json.dumps(line, default=str)


def _trace(record: logging.LogRecord) -> str:
    assert record.exc_info is not None
    return "".join(traceback.format_exception(*record.exc_info)).rstrip()


# ---------------------------------------------------------------- folders of runs


def with_run_folder(config: ClusterConfig) -> ClusterConfig:
    """Returns the config with a `logging.dir` that is a folder for this run alone. The first process on a machine that
    logs there creates the folder."""
    above = config.logging.dir or _state_folder() / "logs"
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    logs = config.logging.model_copy(update={"dir": above.absolute() / name})
    return config.model_copy(update={"logging": logs})


def _remove_oldest_runs(folder: Path) -> None:
    """Removes the folders of the oldest runs next to this run's `folder`, on this machine, until `NUM_KEPT_RUNS` are
    left. Several processes of a run may do so at the same time."""
    if not _is_run(folder):
        return
    others = sorted(path for path in folder.parent.glob("*") if _is_run(path) and path != folder)
    for old in others[: max(0, len(others) + 1 - NUM_KEPT_RUNS)]:
        shutil.rmtree(old, ignore_errors=True)


def _is_run(path: Path) -> bool:
    return re.fullmatch(r"\d{8}-\d{6}-\d+", path.name) is not None and path.is_dir()


def where_logs_are(section: LoggingSection) -> str:
    """Returns the sentence that says where the logs are, for people who start a cluster."""
    if section.to == "terminal":
        return f"the log of every process follows ({section.format}, from level {section.level})"
    return f"the log of every process is in {section.dir} ({section.format}, from level {section.level})"


def _state_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "weft"
