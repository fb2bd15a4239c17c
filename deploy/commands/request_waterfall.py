"""Implements `weft trace`: shows the record of one request in the terminal, so that a person sees where its time went,
or writes spans to a file (`span_file`).

`waterfall` makes the parts of the screen from a record (`GET /weft/requests/{id}`): the parts of the time to first
token, the timeline as bars on one axis, each stage as predicted and as measured, and what the router compared when it
chose. `weft top` shows the same. The words are those of the record's page in a browser (`router.observe`). The module
knows nothing of how records come about.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from deploy.commands.cluster_client import ClusterClient, ClusterOptions
from deploy.commands.span_file import spans_of_request, spans_of_seconds, write_spans
from deploy.commands.terminal import WIDE, console, percent, shown, table, write
from fabric.contracts import ConfigError
from router.observe import milliseconds, moment, place_of, words

Record = Mapping[str, Any]
PIPE_WIDTH = 100
"""Is the width of bars and tables in a pipe."""
MIN_BAR = 12
NO_TIME_S = 1e-6
"""A part that took less than this is not shown."""
MAX_LISTED = 1000
WAITS = frozenset({"queue", "decode_queue", "encode_queue", "waited", "held", "earlier_attempts"})
"""These spans and parts are waits; the others are work."""


def trace(arguments: argparse.Namespace) -> int:
    """Prints the record of a request, or writes spans to a file. Raises ConfigError if there is no such request."""
    seconds = None if isinstance(arguments.last, bool) else arguments.last
    if seconds is not None and arguments.perfetto is None:
        raise ConfigError(
            f"--last {seconds} takes all requests of {seconds} s, which only --perfetto FILE can show; --last alone "
            "takes the latest one"
        )
    with ClusterClient(ClusterOptions.of(arguments)) as client:
        if seconds is not None:
            spans = spans_of_seconds(client, seconds, arguments.outcome, arguments.modality)
            print(write_spans(spans, arguments.perfetto))
            return 0
        name = arguments.request or _chosen(client, arguments)
        if arguments.perfetto is not None:
            print(write_spans(spans_of_request(client, _as_path(name)), arguments.perfetto))
            return 0
        record, why_not = client.find(f"/weft/requests/{_as_path(name)}", format="json")
    if record is None:
        raise ConfigError(why_not)
    if arguments.json:
        print(json.dumps(record, indent=2, ensure_ascii=True))
        return 0
    output = console()
    width = PIPE_WIDTH if output.width == WIDE else output.width
    is_plain = not (output.encoding or "").lower().startswith("utf")
    for at, section in enumerate(waterfall(record, width, is_plain)):
        if at:
            output.file.write("\n")
        for part in section:
            write(output, part)
    return 0


def _as_path(name: str) -> str:
    """Returns the id as a part of a path. Raises ConfigError for what can't be an id, because it would ask for another
    path."""
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise ConfigError(f"{name!r} is not the id of a request; it is in the header `x-weft-request-id` of an answer")
    return name


def _chosen(client: ClusterClient, arguments: argparse.Namespace) -> str:
    """Returns the id of the latest or the slowest request that the options take."""
    wanted = {"limit": MAX_LISTED, "format": "json", "outcome": arguments.outcome, "modality": arguments.modality}
    listed = client.json("/weft/requests", **{name: value for name, value in wanted.items() if value})["requests"]
    if arguments.slowest:
        listed = [each for each in listed if each["first_token_s"] is not None]
        listed.sort(key=lambda each: -each["first_token_s"])
    if not listed:
        raise ConfigError("the routers have no record of such a request; each keeps those of its latest requests only")
    return str(listed[0]["request_id"])


# ------------------------------------------------------------ the screen


def waterfall(record: Record, width: int, is_plain: bool = False) -> Iterator[list[Table | Text]]:
    """Yields the sections of the screen. `width` limits the bars; `is_plain` draws them in ASCII."""
    pen = Pen(width, "#" if is_plain else "█", "|" if is_plain else "│")
    yield _head(record)
    for section in (_parts(record, pen), _timeline(record, pen), _stages(record)):
        if section:
            yield section
    for entry in record.get("plans", ()):
        yield _decision(entry, width)


class Pen(NamedTuple):
    """A `Pen` draws bars: `full` fills them, and `mark` stands for a moment."""

    width: int
    full: str
    mark: str

    def bar(self, begin: float, end: float, room: int, style: str) -> Text:
        """Returns a bar between two shares of `room` characters."""
        first = min(room - 1, int(begin * room))
        last = max(first + 1, min(room, round(end * room)))
        return Text(" " * first).append(self.full * (last - first), style)

    def moment(self, at: float, room: int) -> Text:
        return Text(" " * min(room - 1, int(at * room))).append(self.mark, "bold")

    def room(self, *others: int) -> int:
        """Returns how many characters are left beside columns of these widths."""
        return max(MIN_BAR, self.width - sum(others) - 2 * len(others))


def _head(record: Record) -> list[Table | Text]:
    usage, timing, first = record.get("usage") or {}, record.get("timing") or {}, record.get("first_token")
    outcome = str(record["outcome"])
    title = shown(record["request_id"], "bold").append(f"  {record['modality']}, ")
    title.append_text(shown(outcome, "green" if outcome == "ok" else "yellow" if outcome == "running" else "red"))
    facts = [f"arrived {moment(record.get('received_at')) or '-'}", f"at {record['router_id']}"]
    facts += [f"label {record['label']}"] if record.get("label") else []
    counts = [f"{record.get('num_prompt_tokens') or 0} prompt tokens"]
    counts += [f"{usage['completion_tokens']} generated tokens"] if "completion_tokens" in usage else []
    num_attempts = len(record.get("plans", ()))
    counts += [f"{num_attempts} attempt{'' if num_attempts == 1 else 's'}"]
    counts += [f"{milliseconds(timing['total_s'])} in all"] if timing else []
    lines: list[Table | Text] = [title, shown(", ".join(facts)), shown(", ".join(counts))]
    if record.get("message"):
        lines.append(shown(record["message"], "red"))
    if not first:
        return [*lines, Text("No token has come.")]
    longest = first["longest_part"]
    share = first["parts"][longest] / first["at_s"] if first["at_s"] else 0.0
    efficiency = first.get("overlap_efficiency")
    line = Text(f"The first token came after {milliseconds(first['at_s'])}", "bold")
    line.append(f". The largest part is {words(longest)}: {milliseconds(first['parts'][longest])} ({share:.0%}).")
    bound = "" if efficiency is None else f", and {efficiency:.0%} of it is the bound with empty queues"
    since = f"Since dispatch {milliseconds(first['actual_s'])}, predicted {milliseconds(first['predicted_s'])}{bound}."
    return [*lines, line, Text(since)]


def _style(name: str) -> str:
    return "yellow" if name in WAITS else "cyan"


def _parts(record: Record, pen: Pen) -> list[Table | Text]:
    first = record.get("first_token")
    if not first or first["at_s"] <= 0:
        return []
    room, begun_s = pen.room(24, 8, 4), 0.0
    rows = []
    for name, seconds in first["parts"].items():
        if seconds >= NO_TIME_S:
            bar = pen.bar(begun_s / first["at_s"], (begun_s + seconds) / first["at_s"], room, _style(name))
            rows.append((words(name), milliseconds(seconds), percent(seconds / first["at_s"]), bar))
            begun_s += seconds
    return [table(("TIME TO FIRST TOKEN", "TIME", "SHARE", ""), rows, ("TIME", "SHARE"))]


def _timeline(record: Record, pen: Pen) -> list[Table | Text]:
    spans = record.get("timeline", ())
    if not spans:
        return []
    first_s = (record.get("first_token") or {}).get("at_s") or 0.0
    start_s = min(0.0, *(span["begin_s"] for span in spans))
    end_s = max([span["end_s"] for span in spans if span["name"] != "generate"] + [first_s])
    scale = 1.0 / max(end_s - start_s, 1e-9)
    names = [f"{words(span['name'])} ({place_of(span)})" for span in spans]
    label = min(max(map(len, names)), max(16, pen.width - 22 - max(MIN_BAR, pen.width // 4)))
    room = pen.room(label, 8, 8)
    rows: list[tuple[object, ...]] = []
    for name, span in zip(names, spans, strict=True):
        begin, end = ((min(each, end_s) - start_s) * scale for each in (span["begin_s"], span["end_s"]))
        seconds = span["end_s"] - span["begin_s"]
        bar = pen.bar(begin, end, room, _style(span["name"])) if seconds else pen.moment(begin, room)
        rows.append((name, milliseconds(span["begin_s"]), milliseconds(seconds) if seconds else "", bar))
    made = table(("TIMELINE", "BEGINS", "LASTS", ""), rows, ("BEGINS", "LASTS"))
    made.columns[0].max_width = label
    unsure_s = max((span["uncertainty_s"] for span in spans), default=0.0)
    note = f"Spans of other hosts may be shifted by {milliseconds(unsure_s)} at most."
    return [made, Text(note, "dim")] if unsure_s else [made]


def _stages(record: Record) -> list[Table | Text]:
    rows = []
    for each in record.get("stages", ()):
        where = each["member_id"] if each.get("item") is None else f"item {each['item']}, {each['member_id']}"
        predicted_s, actual_s = each["predicted_s"], each["actual_s"]
        error_s = actual_s - predicted_s
        signed = f"{'+' if error_s > 0 else ''}{milliseconds(error_s)}"
        is_off = abs(error_s) > max(0.5 * actual_s, 0.005)
        far = shown(signed, "yellow" if is_off else "")
        rows.append((words(each["stage"]), milliseconds(predicted_s), milliseconds(actual_s), far, where))
    columns = ("PREDICTED AGAINST ACTUAL", "PREDICTED", "ACTUAL", "ERROR", "WHERE")
    return [table(columns, rows, ("PREDICTED", "ACTUAL", "ERROR"))] if rows else []


# ------------------------------------------------------------ the route


def _decision(entry: Record, width: int) -> list[Table | Text]:
    """Returns what the router compared: a column for the chosen worker, then one for each alternative that fits."""
    plan = entry["plan"]
    explanation = plan["explanation"]
    winner, runner_up = explanation["winner"], explanation.get("runner_up")
    others = list(explanation.get("alternatives") or ([runner_up] if runner_up else []))
    num_workers = explanation.get("num_workers", 1)
    head = f"Attempt {entry['attempt']}: the router compared {num_workers} worker{'' if num_workers == 1 else 's'}"
    near = explanation.get("num_near_equal") or 0
    head += f", of which {near} were about as good as the best" if near > 1 else ""
    head += (
        f", and tried a worker that it knows little of: {plan['worker_id']}" if explanation.get("is_explored") else ""
    )
    num_columns = max(1, (width - 26) // 20)
    shown_options = [winner, *others[: num_columns - 1]]
    titles = ["CHOSEN", "RUNNER-UP", *(f"{place}." for place in range(3, 3 + len(shown_options)))]
    rows: list[list[object]] = [["Worker", *(option["worker_id"] for option in shown_options)]]
    terms = dict.fromkeys(name for option in shown_options for name in option if name not in ("worker_id", "items"))
    ordered = sorted(terms, key=lambda name: name == "ttft_s")
    rows += [[words(name), *(_cell(name, option.get(name)) for option in shown_options)] for name in ordered]
    for at, item in enumerate(winner.get("items", ())):
        there = [option["items"][at] if at < len(option.get("items", ())) else {} for option in shown_options]
        index = item.get("item_index", at)
        rows.append([f"Item {index}: encoder", *(each.get("encoder_id") or "covered" for each in there)])
        rows.append([f"Item {index}: landed", *(_cell("landing_s", each.get("landing_s")) for each in there)])
    columns = ("ROUTE", *titles[: len(shown_options)])
    lines: list[Table | Text] = [Text(f"{head}."), table(columns, rows, columns[1:])]
    if len(others) > num_columns - 1:
        lines.append(Text(f"{len(others) - num_columns + 1} more alternatives are in the JSON (--json).", "dim"))
    return lines


def _cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return milliseconds(value) if name.endswith("_s") else f"{value:,g}"
    return str(value)


def sections_of(record: Record, width: int) -> Sequence[Table | Text]:
    """Returns all parts of the screen with empty lines between the sections, for a view that draws them itself."""
    parts: list[Table | Text] = []
    for section in waterfall(record, width):
        parts += [*([Text("")] if parts else []), *section]
    return parts
