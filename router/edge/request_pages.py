"""Writes the pages on which people read what happened to a request: `request_page` shows one record, and
`requests_page` lists the latest ones.

The pages are whole HTML documents that load nothing and run no script. Every value of a record is escaped where it is
written (`text`), because a record repeats words of clients. A table shows the fields that its rows have, so a term that
the planner gains needs no change here. The module knows nothing of where records come from.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from router.console import OTHER_COLOUR, SPAN_TO_COLOUR
from router.observe import milliseconds, moment, place_of, words

Record = Mapping[str, Any]

PAGE_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "vary": "accept",
}

NO_TIME_S = 1e-6
"""A part that took less than this is not shown."""
MAX_SPANS = 400
"""A page draws at most this many spans; the JSON has all of them."""
MAX_EVENTS = 600
MAX_ALTERNATIVES = 50

STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8882}
body{font:14px/1.45 system-ui,sans-serif;margin:1.5rem auto;max-width:84rem;padding:0 1rem}
h1{font-size:1.25rem;margin:0 0 .2rem;overflow-wrap:anywhere}h2{font-size:1rem;margin:1.8rem 0 .4rem}
p{margin:.3rem 0}.dim{opacity:.7}code{font-size:.92em;overflow-wrap:anywhere}
.facts{display:flex;flex-wrap:wrap;gap:.5rem 1.6rem;margin:.8rem 0}.facts div b{display:block;font-size:1.15rem}
.wide{overflow-x:auto}table{border-collapse:collapse}
th,td{padding:.2rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top;white-space:nowrap}
th{font-weight:600}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}tr.best td{background:var(--soft)}
.bar{display:flex;height:1.5rem;border-radius:4px;overflow:hidden;background:var(--soft)}
.bar i{display:block;min-width:1px}
.key{display:inline-block;width:.75rem;height:.75rem;border-radius:2px;margin-right:.4rem;vertical-align:-1px}
.tl{display:grid;grid-template-columns:minmax(13rem,auto) 1fr 6rem;gap:0 .6rem}
.tl>div{padding:1px 0;border-bottom:1px solid var(--soft);white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.tl .t{position:relative;min-height:1.1rem;overflow:visible}
.tl .t i{position:absolute;top:2px;bottom:2px;min-width:2px;border-radius:2px}
.tl .t i.now{width:0;border-left:2px solid currentColor}.tl .t u{position:absolute;top:-1px;bottom:-1px;width:0;
border-left:1px dashed #d1495b}.tl .n{text-align:right;font-variant-numeric:tabular-nums}
details{margin:.6rem 0}summary{cursor:pointer}
"""


# ------------------------------------------------------------ one request


def request_page(record: Record) -> str:
    """Returns the page of one request."""
    title = f"Request {record['request_id']}"
    parts = [
        f"<h1>{text(title)}</h1>",
        _headline(record),
        _facts(record),
        _first_token(record),
        _timeline(record),
        _stages(record),
        *(_plan(plan) for plan in record.get("plans", ())),
        _media(record),
        _clocks(record),
        _events(record),
    ]
    return _document(title, parts)


def _headline(record: Record) -> str:
    first = record.get("first_token")
    outcome = record.get("outcome")
    end = f" It ended with <b>{text(outcome)}</b>: {text(record['message'])}." if record.get("message") else ""
    if not first:
        return f"<p>No token has come.{end}</p>"
    longest = first["longest_part"]
    share = first["parts"][longest] / first["at_s"] if first["at_s"] else 0.0
    return (
        f"<p>The first token came after <b>{milliseconds(first['at_s'])}</b>. The largest part of that is "
        f"<b>{text(words(longest))}</b>: {milliseconds(first['parts'][longest])} ({share:.0%}).{end}</p>"
    )


def _facts(record: Record) -> str:
    first, timing, usage = record.get("first_token") or {}, record.get("timing") or {}, record.get("usage") or {}
    efficiency = first.get("overlap_efficiency")
    facts = {
        "Class": record.get("modality"),
        "Outcome": record.get("outcome"),
        "Router": record.get("router_id"),
        "Label": record.get("label"),
        "Arrived": moment(record.get("received_at")),
        "First token": _ms_or_none(first.get("at_s")),
        "Predicted / actual": _ratio(first.get("predicted_s"), first.get("actual_s")),
        "Bound / actual": None if efficiency is None else f"{efficiency:.2f}",
        "Total": _ms_or_none(timing.get("total_s")),
        "Prompt tokens": record.get("num_prompt_tokens"),
        "Generated tokens": usage.get("completion_tokens"),
        "Attempts": len(record.get("plans", ())),
    }
    shown = (f"<div>{text(name)}<b>{text(value)}</b></div>" for name, value in facts.items() if value not in (None, ""))
    return f'<div class="facts">{"".join(shown)}</div>'


def _first_token(record: Record) -> str:
    """Returns the time to first token as a bar and a table of its parts."""
    first = record.get("first_token")
    if not first:
        return ""
    whole_s = max(first["at_s"], 1e-9)
    bars, rows = [], []
    parts = {name: seconds for name, seconds in first["parts"].items() if abs(seconds) >= NO_TIME_S}
    for name, seconds in parts.items():
        colour = SPAN_TO_COLOUR.get(name, OTHER_COLOUR)
        share = max(0.0, seconds) / whole_s
        bars.append(f'<i style="width:{share * 100:.3f}%;background:{colour}" title="{text(words(name))}"></i>')
        key = f'<span class="key" style="background:{colour}"></span>'
        cells = f'<td class="n">{milliseconds(seconds)}</td><td class="n">{share:.1%}</td>'
        rows.append(f"<tr><td>{key}{text(words(name))}</td>{cells}</tr>")
    total = f'<tr class="best"><td>First token</td><td class="n">{milliseconds(first["at_s"])}</td><td></td></tr>'
    return (
        f'<h2>Time to first token</h2><div class="bar">{"".join(bars)}</div>'
        f'<div class="wide"><table>{"".join(rows)}{total}</table></div>'
    )


def _timeline(record: Record) -> str:
    """Returns the spans as bars under each other. The dashed line is the first token."""
    spans = record.get("timeline", ())
    if not spans:
        return ""
    shown = spans[:MAX_SPANS]
    first = record.get("first_token") or {}
    start_s = min(0.0, *(span["begin_s"] for span in shown))
    end_s = max([span["end_s"] for span in shown if span["name"] != "generate"] + [first.get("at_s") or 0.0])
    scale = 100.0 / max(end_s - start_s, 1e-9)
    rows = []
    for span in shown:
        left, right = ((min(each, end_s) - start_s) * scale for each in (span["begin_s"], span["end_s"]))
        seconds = span["end_s"] - span["begin_s"]
        is_point = not seconds
        style = f"left:{left:.3f}%" + ("" if is_point else f";width:{max(0.0, right - left):.3f}%")
        colour = "" if is_point else f";background:{SPAN_TO_COLOUR.get(span['name'], OTHER_COLOUR)}"
        at = f' <span class="dim">at {milliseconds(span["begin_s"])}</span>' if is_point else ""
        unsure = f" ± {milliseconds(span['uncertainty_s'])}" if span["uncertainty_s"] else ""
        tip = f"{span['member_id']}: {milliseconds(span['begin_s'])} to {milliseconds(span['end_s'])}{unsure}"
        mark = f'<u style="left:{(first["at_s"] - start_s) * scale:.3f}%"></u>' if first.get("at_s") is not None else ""
        rows.append(
            f'<div title="{text(tip)}">{text(words(span["name"]))} '
            f'<span class="dim">{text(place_of(span))}</span></div>'
            f'<div class="t" title="{text(tip)}"><i{" class=now" if is_point else ""} style="{style}{colour}"></i>'
            f'{mark}</div><div class="n">{at if is_point else milliseconds(seconds)}</div>'
        )
    more = f"<p class=dim>{len(spans) - len(shown)} more spans are in the JSON.</p>" if len(spans) > len(shown) else ""
    return f'<h2>Timeline</h2><div class="tl">{"".join(rows)}</div>{more}'


def _stages(record: Record) -> str:
    stages = record.get("stages", ())
    rows = [
        {
            "stage": words(each["stage"]),
            **{name: value for name, value in each.items() if name != "stage"},
            "predicted / actual": _ratio(each["predicted_s"], each["actual_s"]),
        }
        for each in stages
    ]
    return f"<h2>Predicted against actual</h2>{table(rows)}" if rows else ""


def _plan(entry: Record) -> str:
    """Returns one attempt's plan: the chosen worker first, then the alternatives, with all terms."""
    plan = entry["plan"]
    explanation = plan["explanation"]
    winner, runner_up = explanation["winner"], explanation.get("runner_up")
    others = explanation.get("alternatives") or ([runner_up] if runner_up else [])
    shown = [winner, *others[:MAX_ALTERNATIVES]]
    rows = [{name: value for name, value in each.items() if name != "items"} for each in shown]
    items = [{"worker_id": each["worker_id"], **item} for each in shown for item in each.get("items", ())]
    counts = {name: value for name, value in explanation.items() if not isinstance(value, Mapping | Sequence | None)}
    listed = ", ".join(f"{words(name).lower()}: {value}" for name, value in counts.items())
    head = f"<h2>Plan of attempt {int(entry['attempt'])}</h2>"
    lead = (
        f"<p>The router chose <b>{text(plan['worker_id'])}</b>; it predicted the first token in "
        f"{milliseconds(plan['predicted_ttft_s'])}, and with empty queues in {milliseconds(plan['lower_bound_s'])} "
        f"(the bound). Covered items: {text(plan['covered_items'] or 'none')}. {text(listed.capitalize())}.</p>"
    )
    more = len(others) - MAX_ALTERNATIVES
    rest = f"<p class=dim>{more} more alternatives are in the JSON.</p>" if more > 0 else ""
    media = f"<p>Media, as planned for each of these workers:</p>{table(items)}" if items else ""
    return f"{head}{lead}{table(rows, is_first_best=True)}{rest}{media}"


def _media(record: Record) -> str:
    media = record.get("media", ())
    return f"<h2>Media</h2>{table([{'item': at, **each} for at, each in enumerate(media)])}" if media else ""


def _clocks(record: Record) -> str:
    clocks = record.get("clocks", ())
    lead = "<p>Times of another host are brought onto the router's axis; they may be wrong by the uncertainty.</p>"
    return f"<h2>Clocks</h2>{lead}{table(clocks)}" if any(each["uncertainty_s"] for each in clocks) else ""


def _events(record: Record) -> str:
    events = record.get("events", ())
    rows = [
        {
            "at": milliseconds(e["time_s"]),
            "event": e["name"],
            "member_id": e["member_id"],
            "detail": _pairs(e["detail"]),
        }
        for e in events[:MAX_EVENTS]
    ]
    dropped = record.get("num_events_dropped") or 0
    lost = f", {dropped} not kept" if dropped else ""
    return f"<details><summary>Events ({len(events)}{lost})</summary>{table(rows)}</details>"


def _pairs(detail: Record) -> str:
    return ", ".join(f"{name}={value}" for name, value in detail.items() if name != "from_s")


# ------------------------------------------------------------ the list


def requests_page(summaries: Sequence[Record], wanted: Record, silent: Sequence[str]) -> str:
    """Returns the page that lists requests. `wanted` holds the filter, and `silent` the routers that did not answer."""
    fields = "".join(
        f'<label>{text(words(name))} <input name="{name}" value="{text(wanted.get(name, ""))}" size="12"></label> '
        for name in ("outcome", "modality", "limit")
    )
    form = f'<form><input type="hidden" name="format" value="html">{fields}<button>Show</button></form>'
    rows = []
    for each in summaries:
        link = f'<a href="/weft/requests/{text(each["request_id"])}?format=html">{text(each["request_id"])}</a>'
        rows.append({**each, "request_id": Markup(link), "received_at": moment(each.get("received_at"))})
    warning = f"<p>These routers have not answered: {text(', '.join(silent))}.</p>" if silent else ""
    listed = table(rows) if rows else "<p>There is no such request.</p>"
    return _document("Latest requests", [f"<h1>Latest requests</h1>{form}{warning}{listed}"])


# ------------------------------------------------------------ pieces of pages


class Markup(str):
    """A `Markup` is HTML that was made here, so `cell` does not escape it."""

    __slots__ = ()


def text(value: object) -> str:
    """Returns a value of a record as escaped text, fit for the content of an element and for a quoted attribute."""
    return html.escape(str(value), quote=True)


def table(rows: Iterable[Record], is_first_best: bool = False) -> str:
    """Returns a table with a column for each field that a row has, in the order in which they come."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    numeric = {name for name in columns if any(_is_number(row.get(name)) for row in rows)}
    css = {name: ' class="n"' if name in numeric else "" for name in columns}
    head = "".join(f"<th{css[name]}>{text(words(name))}</th>" for name in columns)
    body = "".join(
        f"<tr{' class=best' if is_first_best and not at else ''}>"
        + "".join(f"<td{css[name]}>{cell(name, row.get(name))}</td>" for name in columns)
        + "</tr>"
        for at, row in enumerate(rows)
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def cell(name: str, value: object) -> str:
    """Returns the content of one cell. A field whose name ends with `_s` is a time."""
    if value is None:
        return ""
    if isinstance(value, Markup):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and name.endswith("_s"):
        return milliseconds(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if name == "mm_hash":
        return f'<code title="{text(value)}">{text(str(value)[:8])}</code>'
    if isinstance(value, Mapping):
        return text(_pairs(value))
    return text(value)


def _ratio(predicted: float | None, actual: float | None) -> str | None:
    return None if predicted is None or not actual else f"{predicted / actual:.2f}"


def _ms_or_none(seconds: float | None) -> str | None:
    return None if seconds is None else milliseconds(seconds)


def _document(title: str, parts: Iterable[str]) -> str:
    nav = '<p class="dim"><a href="/weft/requests?format=html">Latest requests</a></p>'
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)} – Weft</title><style>{STYLE}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{nav}{"".join(parts)}</body></html>'
