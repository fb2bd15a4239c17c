"""Writes the page on which people read the API: its operations with parameters, examples for curl, answers and schemas.

The page is a whole HTML document that loads nothing and runs no script. It is made from the OpenAPI document alone, so
it says what that says.
"""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

Fields = Mapping[str, Any]
STYLE = """:root{color-scheme:light dark;--line:#8884;--soft:#8882}
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:1.5rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.15rem;margin:2.2rem 0 .4rem;border-bottom:1px solid var(--line)}
h3{font-size:1rem;margin:1.6rem 0 .2rem;overflow-wrap:anywhere}p{margin:.3rem 0}.dim{opacity:.7}
code,pre{font-size:.92em;overflow-wrap:anywhere}pre{background:var(--soft);padding:.6rem;border-radius:4px;
overflow-x:auto;white-space:pre-wrap;margin:.3rem 0}.method{font-weight:700;text-transform:uppercase;margin-right:.5rem}
table{border-collapse:collapse;margin:.3rem 0;width:100%}th,td{padding:.2rem .6rem;border-bottom:1px solid var(--line);
text-align:left;vertical-align:top;overflow-wrap:anywhere}th{font-weight:600}details{margin:.4rem 0}
summary{cursor:pointer}nav a{margin-right:.9rem;white-space:nowrap}
"""
MAX_SHOWN_CHARS = 400
"""A string of an example is cut after this many characters on the page."""


def document_page(document: Fields) -> str:
    """Returns the page of an OpenAPI document. Its commands name the server by a variable of the shell, because the
    address that one client uses is no business of the next."""
    info = document["info"]
    head = [f"<h1>{text(info['title'])} API <span class=dim>{text(info['version'])}</span></h1>"]
    head += [f"<p>{prose(info['description'])}</p>", _key_note(document)]
    head.append('<p>The same as an OpenAPI document: <a href="/openapi.json">/openapi.json</a></p>')
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    links = "".join(f'<a href="#{text(each["operationId"])}">{text(path)}</a> ' for path, _, each in operations)
    head.append("<p>The commands below need the address of this server, for example:</p>")
    head.append("<pre>URL=http://127.0.0.1:8000</pre>")
    parts = [*head, f"<nav>{links}</nav>"]
    for tag in document["tags"]:
        parts.append(f"<h2>{text(tag['name'])}</h2><p>{prose(tag['description'])}</p>")
        parts += [_operation(*each, document) for each in operations if tag["name"] in each[2]["tags"]]
    parts.append("<h2>Schemas</h2>")
    parts += [_schema(name, schema) for name, schema in document["components"]["schemas"].items()]
    return _html(f"{info['title']} API", parts)


def _key_note(document: Fields) -> str:
    if not document.get("security"):
        return "<p>No key is asked for.</p>"
    return "<p>Send an API key as <code>Authorization: Bearer KEY</code>.</p>"


def _operation(path: str, method: str, operation: Fields, document: Fields) -> str:
    name = text(operation["operationId"])
    title = f'<h3 id="{name}"><span class=method>{text(method)}</span><code>{text(path)}</code></h3>'
    lead = f"<p><b>{text(operation['summary'])}.</b> {prose(operation['description'])}</p>"
    needs_key = bool(operation.get("security", document.get("security")))
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    parts = [title, lead, _parameters(operation.get("parameters", ()))]
    if body is not None:
        parts.append(f"<p>Body: {kind_of(body['schema'])}</p>")
        for example in body.get("examples", {}).values():
            command = curl(path, example["value"], needs_key)
            parts.append(f"<details><summary>{text(example['summary'])}</summary><pre>{text(command)}</pre></details>")
    elif "{" not in path:
        parts.append(f"<pre>{text(curl(path, None, needs_key))}</pre>")
    return "".join([*parts, _responses(operation["responses"], document)])


def _parameters(parameters: Iterable[Fields]) -> str:
    rows = [
        (f"<code>{text(each['name'])}</code>", text(each["in"]), kind_of(each["schema"]), prose(each["description"]))
        for each in parameters
    ]
    return _table(("Parameter", "In", "Type", "Meaning"), rows)


def _responses(responses: Fields, document: Fields) -> str:
    rows = []
    for status, named in responses.items():
        response = document["components"]["responses"][named["$ref"].rpartition("/")[2]] if "$ref" in named else named
        kinds = "<br>".join(
            f"<code>{text(media_type)}</code> {kind_of(content['schema'])}"
            for media_type, content in response.get("content", {}).items()
        )
        leads = [
            f' <a href="#{text(link["operationId"])}">{prose(link["description"])}</a>'
            for link in response.get("links", {}).values()
        ]
        rows.append((text(status), prose(response["description"]) + "".join(leads), kinds))
    return f"<details><summary>Answers</summary>{_table(('Status', 'Meaning', 'Body'), rows)}</details>"


def _schema(name: str, schema: Fields) -> str:
    title = f'<h3 id="schema-{text(name)}">{text(name)}</h3>'
    lead = f"<p>{prose(schema['description'])}</p>" if "description" in schema else ""
    if "properties" not in schema:
        return f"{title}{lead}<p>{kind_of(schema)}</p>"
    required = schema.get("required", ())
    rows = [
        (
            f"<code>{text(field)}</code>" + (" <span class=dim>required</span>" if field in required else ""),
            kind_of(described),
            prose(described.get("description", "")),
        )
        for field, described in schema["properties"].items()
    ]
    return title + lead + _table(("Field", "Type", "Meaning"), rows)


# ------------------------------------------------------------ pieces of the page


def curl(path: str, body: object, needs_key: bool) -> str:
    """Returns a command that sends a body. Long strings, such as media, are cut."""
    words = ["curl", f'"$URL"{path}']
    words += ['-H "Authorization: Bearer $KEY"'] if needs_key else []
    if body is not None:
        shown = json.dumps(shortened(body), indent=1, ensure_ascii=False)
        words += ["-H 'Content-Type: application/json'", "-d " + shlex.quote(shown)]
    return " ".join(words)


def shortened(value: object) -> object:
    """Returns a JSON value with its long strings cut."""
    if isinstance(value, Mapping):
        return {key: shortened(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shortened(each) for each in value]
    if isinstance(value, str) and len(value) > MAX_SHOWN_CHARS:
        return value[:MAX_SHOWN_CHARS] + "..."
    return value


def kind_of(schema: Fields) -> str:
    """Returns the type of a schema as HTML, with links to the schemas that it names."""
    if "$ref" in schema:
        name = text(schema["$ref"].rpartition("/")[2])
        return f'<a href="#schema-{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind_of(each) for each in schema["anyOf"]))
    data = schema.get("properties", {}).get("data", {}).get("anyOf", [{}])[-1]
    if "contentSchema" in data:
        return f"events of {kind_of(data['contentSchema'])}"
    if "const" in schema or "enum" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return " or ".join(f"<code>{text(json.dumps(value))}</code>" for value in values)
    kinds = schema.get("type", "any value")
    if kinds == "array":
        return f"array of {kind_of(schema.get('items', {}))}"
    listed = text(kinds if isinstance(kinds, str) else " or ".join(kinds))
    bounds = ", ".join(f"{words}{text(schema[key])}" for key, words in BOUND_TO_WORDS.items() if key in schema)
    return f"{listed} ({bounds})" if bounds else listed


BOUND_TO_WORDS = {
    "minimum": "at least ",
    "exclusiveMinimum": "more than ",
    "maximum": "at most ",
    "exclusiveMaximum": "less than ",
    "maxLength": "at most this long: ",
    "pattern": "matches ",
}


def text(value: object) -> str:
    """Returns a value as escaped text."""
    return html.escape(str(value), quote=True)


def prose(words: str) -> str:
    """Returns a description as escaped text, with names in backquotes as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text(words))


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    head = "".join(f"<th>{title}</th>" for title in titles)
    return f"<table><tr>{head}</tr>{body}</table>" if body else ""


def _html(title: str, parts: Iterable[str]) -> str:
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'
