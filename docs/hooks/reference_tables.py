"""Writes the reference tables of the documentation from the code: the config keys, the metrics, the errors and
the commands.

Everything that the documentation takes from the product is imported here and nowhere else, so a module that moves
changes one line of this file. The meanings of keys come from the docstrings under the fields, those of errors from the
docstrings of the classes, and those of metrics from their help texts. The module knows nothing of MkDocs; each of its
public functions returns Markdown or plain rows.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast, get_origin

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import Metric
from pydantic import BaseModel

from deploy import config as cluster_config
from deploy.commands import WeftParser, build_parser
from deploy.config_file import section_in
from fabric.contracts import errors
from router.api import status_of
from router.observe import (
    UP_TEXT,
    MemberReports,
    MembershipSeries,
    PlannerSeries,
    RouterMetrics,
    SpanExport,
    TracingSettings,
)

EXAMPLES = Path(cluster_config.__file__).parent / "configs"

WORD_TO_UNIT = {
    "bytes": "bytes",
    "s": "seconds",
    "seconds": "seconds",
    "ms": "milliseconds",
    "fps": "frames per second",
    "tokens": "tokens",
    "ngram": "tokens",
    "pixels": "pixels",
    "frames": "frames",
    "cost": "patches or mel frames",
    "blocks": "KV blocks",
    "items": "items",
    "sequences": "sequences",
    "gpus": "GPUs",
}
"""Maps a word of a key's name to the unit of its value. The first entry of this mapping that the name contains wins."""
KEY_TO_UNIT = {
    "block_size": "tokens",
    "max_in_flight": "requests",
    "keep_fraction": "a share of 1",
    "target_utilization": "a share of 1",
}


NAME_TO_METRIC_UNIT = {
    "seconds": "seconds",
    "bytes": "bytes",
    "ratio": "ratio",
    "efficiency": "ratio",
    "tokens": "tokens",
    "blocks": "KV blocks",
    "cost": "patches or mel frames",
    "info": "1",
    "up": "0 or 1",
}
"""Maps the last word of a metric's name to the unit of its values."""


class ConfigKey(NamedTuple):
    """A `ConfigKey` is one row of the configuration reference."""

    path: str
    """Names the key with its sections, for example `workers.num_blocks`."""
    type: str
    default: str
    unit: str
    meaning: str


class MetricRow(NamedTuple):
    """A `MetricRow` is one row of the table of metrics."""

    name: str
    """Names the metric as a query does: a counter ends in `_total`."""
    type: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def unit(self) -> str:
        """Returns the unit of the values, which the name tells: what is not a time, a size or a ratio is a number of
        things."""
        words = self.name.removesuffix("_total").split("_")
        if words[-2:-1] == ["per"]:
            return f"{NAME_TO_METRIC_UNIT.get(words[-3], 'seconds')} per {words[-1]}"
        return NAME_TO_METRIC_UNIT.get(words[-1], "number")


class ErrorRow(NamedTuple):
    """An `ErrorRow` is one row of the table of errors."""

    code: str
    status: int
    is_retryable: bool
    meaning: str
    advice: str


# ---------------------------------------------------------------- docstrings


def field_docstrings(owner: type) -> dict[str, str]:
    """Maps the fields of a class to the docstrings that stand under them."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            found[statement.target.id] = " ".join(following.value.value.split())
    return found


def inherited_docstrings(section: type) -> dict[str, str]:
    """Maps the keys of a section whose default is `default_of(Owner, "field")` to the docstring of that field."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for statement in definition.body:
        if not isinstance(statement, ast.AnnAssign) or statement.value is None:
            continue
        for call in ast.walk(statement.value):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "default_of":
                owner, field = call.args
                assert isinstance(statement.target, ast.Name)
                assert isinstance(owner, ast.Name)
                assert isinstance(field, ast.Constant)
                docstrings = field_docstrings(getattr(sys.modules[section.__module__], owner.id))
                if field.value in docstrings:
                    found.setdefault(statement.target.id, docstrings[field.value])
    return found


# ---------------------------------------------------------------- configuration


def config_keys(section: type[BaseModel] = cluster_config.ClusterConfig, prefix: str = "") -> Iterator[ConfigKey]:
    """Yields every key of the config, in the order of the schema. `meaning` is empty if no docstring describes it."""
    schema = section.model_json_schema()
    meanings = inherited_docstrings(section) | field_docstrings(section)
    for name, field in section.model_fields.items():
        key, annotation = field.alias or name, field.annotation
        inner = section_in(annotation)
        if inner is not None and annotation in (inner, inner | None):
            # A section that may be absent has the same keys.
            yield from config_keys(inner, f"{prefix}{key}.")
            continue
        like = [other for other, each in section.model_fields.items() if each.annotation is inner]
        if like and get_origin(annotation) is dict:
            kind = f"mapping of names to sections like `{like[0]}`"
            yield ConfigKey(f"{prefix}{key}", kind, "none", "", meanings.get(name, ""))
            continue
        if inner is not None and get_origin(annotation) is dict:
            # The author of a file chooses the names in such a mapping.
            yield from config_keys(inner, f"{prefix}{key}.NAME.")
            continue
        described = schema["properties"][key]
        described = schema["$defs"][described["$ref"].rpartition("/")[2]] if "$ref" in described else described
        is_size = "bytes" in name.split("_")
        yield ConfigKey(
            f"{prefix}{key}",
            "size" if is_size else "list of mappings" if inner else _type(described),
            "required" if field.is_required() else _default(described.get("default"), is_size),
            _unit(name),
            meanings.get(name, ""),
        )
        if inner is not None:
            yield from config_keys(inner, f"{prefix}{key}[].")


def configuration() -> str:
    """Returns the configuration reference: a heading and a table for each section."""
    sections: dict[str, list[ConfigKey]] = {}
    for key in config_keys():
        name, dot, _ = key.path.partition(".")
        sections.setdefault(name if dot else "", []).append(key)
    parts = []
    for name, keys in sections.items():
        heading = f"`{name}`" if name else "Other keys"
        field = cluster_config.ClusterConfig.model_fields.get(name)
        intro = _own_docstring(section_in(field.annotation)) if field is not None else ""
        rows = [
            (f'<a id="{key.path}"></a>`{key.path.removeprefix(name + ".")}`', *key[1:4], _capitalised(key.meaning))
            for key in keys
        ]
        table = markdown_table(("key", "type", "default", "unit", "meaning"), rows)
        parts += [f"### {heading}", intro, table]
    return "\n\n".join(part for part in parts if part)


def config_examples() -> str:
    """Returns the example configs that are shipped, each with its file name."""
    files = sorted(EXAMPLES.glob("*.yaml"))
    return "\n\n".join(f"`{path.name}`:\n\n```yaml\n{path.read_text().strip()}\n```" for path in files)


def _own_docstring(owner: object) -> str:
    text = vars(owner).get("__doc__") or ""
    return " ".join(text.split())


def _type(schema: Mapping[str, Any] | bool) -> str:
    """Returns a short name of the values that a JSON schema allows. The schema True allows any value."""
    if isinstance(schema, bool):
        return "values"
    if "anyOf" in schema:
        return " or ".join("none" if each.get("type") == "null" else _type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    match schema.get("type"):
        case "array":
            return f"list of {_type(schema['items'])}"
        case "object":
            inner = schema.get("additionalProperties")
            return f"mapping of names to {_type(inner) if isinstance(inner, Mapping) else 'values'}"
        case "boolean":
            return "`true` or `false`"
        case "string":
            return "path" if schema.get("format") == "path" else "text"
        case kind:
            return " ".join([str(kind), ", ".join(_bounds(schema))]).strip()


def _bounds(schema: Mapping[str, Any]) -> Iterator[str]:
    words = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    for word, sign in words.items():
        if word in schema:
            yield f"{sign} {schema[word]:g}" if abs(schema[word]) < 10**6 else f"{sign} {schema[word]}"


def _default(value: object, is_size: bool) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if is_size and isinstance(value, int):
        return f"`{_size(value)}`"
    return f"`{value}`"


def _size(num_bytes: int) -> str:
    for name, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes % factor == 0:
            return f"{num_bytes // factor}{name}"
    return str(num_bytes)


def _unit(name: str) -> str:
    words = name.split("_")
    return KEY_TO_UNIT.get(name) or next((unit for word, unit in WORD_TO_UNIT.items() if word in words), "")


# ---------------------------------------------------------------- metrics


def metric_rows() -> list[MetricRow]:
    """Returns every metric of a cluster: those that a router registers (its own, those of the planner, and those of the
    members), and what the scrape endpoint of a node adds."""
    metrics = RouterMetrics(lambda: 0, lambda: 0)
    metrics.watch_waiting(lambda: 0)
    metrics.watch_prompts(lambda: 0)
    metrics.watch_silent(lambda: 0)
    # The series of the planner read these values only; an empty cluster has no stages and empty indexes.
    no_keys = SimpleNamespace(num_keys=0, num_out_of_step=0, num_refused=0, num_evicted=0, num_bytes=0)
    no_cluster = SimpleNamespace(accuracy=dict, prefix_stats=lambda: no_keys, feature_stats=lambda: no_keys)
    planner, spans = PlannerSeries(cast(Any, no_cluster)), SpanExport(TracingSettings(), {})
    for series in (MemberReports(), MembershipSeries({}), planner, spans):
        metrics.registry.register(series)
    Gauge("weft_member_up", UP_TEXT, ["member", "kind"], registry=metrics.registry)
    rows = []
    for family, labels in _families(metrics.registry):
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append(MetricRow(name, family.type, labels, family.documentation))
    return rows


def _families(registry: CollectorRegistry) -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Yields each metric with the names of its labels. prometheus_client tells the labels of a metric that has no
    series yet only in private attributes."""
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            owner = family if hasattr(family, "_labelnames") else collector
            yield family, tuple(getattr(owner, "_labelnames", ()))


METRIC_GROUPS = {
    "weft_router_": "The router's own requests",
    "weft_worker_": "Workers",
    "weft_encoder_": "Encoders",
    "weft_stage_": "Stages that speak",
    "weft_planner_": "The planner's predictions",
    "weft_index_": "The router's indexes",
    "weft_process_": "Processes",
    "weft_member_": "The scrape endpoint of a node",
    "weft_build_": "The build",
    "weft_autoscaling_": "Autoscaling",
}


def metrics() -> str:
    """Returns the tables of metrics, one for each group of names."""
    rows = metric_rows()
    parts = []
    for prefix, heading in METRIC_GROUPS.items():
        table = [
            (
                f"`{row.name}`",
                row.type,
                ", ".join(f"`{label}`" for label in row.labels),
                row.unit,
                _capitalised(row.meaning),
            )
            for row in sorted(rows)
            if row.name.startswith(prefix)
        ]
        parts += [f"### {heading}", markdown_table(("name", "type", "labels", "unit", "meaning"), table)]
    return "\n\n".join(parts)


# ---------------------------------------------------------------- errors


def error_rows() -> list[ErrorRow]:
    """Returns every leaf of the error tree, in the order of the tree. The first paragraph of a class's docstring is the
    meaning, and the second one the advice."""
    rows = []
    for kind in errors.leaves():
        text = vars(kind).get("__doc__") or ""
        meaning, _, advice = (" ".join(each.split()) for each in text.partition("\n\n"))
        rows.append(ErrorRow(kind.code, status_of(kind("")), kind.retryable, meaning, advice))
    return rows


INTERNAL = (errors.Aborted, errors.TransferError, errors.ConfigError)
"""Lists the classes whose errors no client receives in the normal course."""


def client_errors() -> str:
    """Returns the table of the errors that clients receive, in the order of their statuses."""
    return _error_table(row for row in sorted(error_rows(), key=lambda row: row.status) if not _is_internal(row))


def internal_errors() -> str:
    """Returns the table of the errors that stand in logs and traces only."""
    return _error_table(row for row in error_rows() if _is_internal(row))


def _is_internal(row: ErrorRow) -> bool:
    return issubclass(errors.CODE_TO_ERROR[row.code], INTERNAL)


def _error_table(rows: Iterable[ErrorRow]) -> str:
    listed = [
        (f"`{row.code}`", str(row.status), "yes" if row.is_retryable else "no", row.meaning, row.advice) for row in rows
    ]
    return markdown_table(("code", "status", "retryable", "meaning", "what to do"), listed)


# ---------------------------------------------------------------- commands


def command_parsers() -> dict[str, WeftParser]:
    """Maps each command that does something, such as `weft key new`, to its parser."""
    found: dict[str, WeftParser] = {}
    open_parsers = [("weft", build_parser())]
    while open_parsers:
        name, parser = open_parsers.pop(0)
        below = parser.commands()
        open_parsers[:0] = [(f"{name} {word}", each) for word, each in below.items()]
        if not below:
            found[name] = parser
    return found


def commands() -> str:
    """Returns a section for each command: what it does, and a table of its arguments and options."""
    sections = []
    for name, parser in command_parsers().items():
        rows = [
            (f"`{_spelled(action)}`", _capitalised(str(action.help or "")) + ".")
            for action in parser._actions
            if action.help not in (argparse.SUPPRESS, None) and "-h" not in action.option_strings
        ]
        told = _capitalised(_help_of(name))
        sections.append(f"### {name}\n\n{told}.")
        if rows:
            sections.append(markdown_table(("argument or option", "meaning"), rows))
    return "\n\n".join(sections)


def _help_of(name: str) -> str:
    """Returns what the list of commands says of a command."""
    parser, told = build_parser(), ""
    for word in name.split()[1:]:
        listed = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        told = next(str(each.help) for each in listed._choices_actions if each.dest == word)
        parser = parser.commands()[word]
    return told


def _spelled(action: argparse.Action) -> str:
    """Returns how an argument or option is written."""
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    if not action.option_strings:
        return str(value)
    takes_value = action.nargs != 0
    return f"{max(action.option_strings, key=len)}{f' {value}' if takes_value else ''}"


# ---------------------------------------------------------------- Markdown


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table. A bar in a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def _capitalised(text: str) -> str:
    """Returns the text with its first letter in upper case, unless the text begins with code."""
    return re.sub(r"^[a-z]", lambda first: first[0].upper(), text)


NAME_TO_TABLE = {
    "configuration": configuration,
    "config-examples": config_examples,
    "metrics": metrics,
    "client-errors": client_errors,
    "internal-errors": internal_errors,
    "commands": commands,
}
"""Maps the name that a page uses for a table to the function that writes it."""
