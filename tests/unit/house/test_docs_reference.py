"""Tests the reference tables of the documentation: no key, metric or error is missing on its page, and none lacks a
meaning. The last tests check how pages are brought from a forge's form into the site."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from router_chats import chat, image, read

from deploy.testing import fake_cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs" / "hooks"))

import reference_tables
import site_pages
import write_tables
from reference_tables import config_keys, error_rows, metric_rows
from site_pages import with_links, with_tables

from deploy.config import ClusterConfig
from deploy.stages_config import StageLinkSection, StageSection
from fabric.contracts.errors import leaves

ROOT = site_pages.ROOT


def paths(values: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yields the path of every key of a config. The sections that have no keys of their own to name (mappings that a
    user fills) are empty by default, so they count as keys."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from paths(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


CONFIG_KEYS = list(config_keys())


def test_every_key_of_the_config_is_listed_once() -> None:
    listed = [key.path for key in CONFIG_KEYS]
    whole = ClusterConfig.model_validate({"tenants": {"NAME": {}}, "stages": {}})
    assert [path for path in listed if "[]" not in path] == list(paths(whole.model_dump()))
    ends = [f"router.links[].{end}.{key}" for end in ("from", "to") for key in ("member", "host", "kind", "labels")]
    of_lists = [path for path in listed if "[]" in path]
    assert [path for path in of_lists if path.startswith("router.")] == [*ends, "router.links[].class"]
    stages = [f"stages.stage_args[].{key}" for key in StageSection.model_fields]
    links = [f"stages.connectors[].{key}" for key in StageLinkSection.model_fields]
    assert [path for path in of_lists if path.startswith("stages.")] == [*stages, *links]
    table = reference_tables.configuration()
    assert [path for path in listed if table.count(f'<a id="{path}"></a>') != 1] == []


@pytest.mark.parametrize("key", CONFIG_KEYS, ids=lambda key: key.path)
def test_every_key_of_the_config_has_a_meaning(key: reference_tables.ConfigKey) -> None:
    assert key.meaning.endswith("."), "write a docstring below the field in deploy/config.py"
    assert key.type
    assert key.default


@pytest.mark.parametrize(
    ("path", "described"),
    [
        ("workers.num_blocks", ("integer ≥ 2 or `auto`", "`1024`", "KV blocks")),
        ("server.max_body_bytes", ("size", "`32MiB`", "bytes")),
        ("encoders.arena_bytes", ("size", "none", "bytes")),
        ("media.encode_timeout_ms", ("mapping of names to integer ≥ 1", "`{}`", "milliseconds")),
        ("workers.cuda_graphs", ("`off` or `auto`", "`off`", "")),
        ("workers.speculation.max_tokens", ("integer ≥ 0, ≤ 64", "`0`", "tokens")),
    ],
)
def test_types_defaults_and_units_are_those_of_the_schema(path: str, described: tuple[str, str, str]) -> None:
    (key,) = (key for key in CONFIG_KEYS if key.path == path)
    assert (key.type, key.default, key.unit) == described


def test_a_key_without_a_docstring_has_the_meaning_of_the_field_that_uses_it() -> None:
    (key,) = (key for key in CONFIG_KEYS if key.path == "workers.block_size")
    assert key.meaning == "Sets the number of tokens per KV block."


def test_all_example_configs_are_shown() -> None:
    shown = reference_tables.config_examples()
    names = [path.name for path in (ROOT / "deploy" / "configs").glob("*.yaml")]
    assert names
    assert [name for name in names if f"`{name}`" not in shown] == []


async def test_every_metric_of_a_serving_router_is_listed_with_its_labels() -> None:
    """The router of a cluster of fakes has served a picture, and all members have reported."""
    rows = {row.name: row for row in metric_rows()}
    page = reference_tables.metrics()
    async with fake_cluster() as cluster:
        await read(await cluster.service.open(chat([image()])))
        for member in (*cluster.workers, *cluster.encoders):
            cluster.service.reports.put(member.report(1))
        families = list(cluster.service.metrics.registry.collect())
    assert len(families) > 80
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        assert f"| `{name}` | {family.type} |" in page, name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels <= set(rows[name].labels), name
    assert rows.keys() - {each.name + ("_total" if each.type == "counter" else "") for each in families} == {
        "weft_member_up"
    }


def test_the_committed_table_of_metrics_is_that_of_the_code() -> None:
    page = write_tables.PAGE.read_text()
    assert write_tables.written(page) == page, "run `make tables`"
    listed = re.findall(r"^\| `(weft_\w+)` \| (\w+) \|", page, re.MULTILINE)
    assert sorted(listed) == sorted((row.name, row.type) for row in metric_rows())


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("weft_process_cpu_seconds_total", "seconds"),
        ("weft_encoder_arena_used_bytes", "bytes"),
        ("weft_encoder_busy_ratio", "ratio"),
        ("weft_worker_prefill_seconds_per_token", "seconds per token"),
        ("weft_router_prompt_tokens_total", "tokens"),
        ("weft_router_requests_total", "number"),
    ],
)
def test_the_name_of_a_metric_tells_its_unit(name: str, unit: str) -> None:
    assert next(row.unit for row in metric_rows() if row.name == name) == unit


def test_only_counters_are_totals_and_no_unit_is_scaled() -> None:
    for row in metric_rows():
        assert row.name.endswith("_total") == (row.type == "counter"), row.name
        assert not re.search(r"_(ms|milliseconds|kb|mb|kib|mib|percent|fraction|minutes)(_|$)", row.name), row.name


@pytest.mark.parametrize("row", metric_rows(), ids=lambda row: row.name)
def test_every_metric_has_a_meaning_and_a_group(row: reference_tables.MetricRow) -> None:
    assert row.meaning.endswith("."), "write a help text"
    assert any(row.name.startswith(prefix) for prefix in reference_tables.METRIC_GROUPS)
    assert set(re.findall(r"`(weft_\w+)`", row.meaning)) <= {other.name for other in metric_rows()}


OLD_METRICS = (Path(__file__).parent / "metrics_of_0_1_0.txt").read_text().splitlines()
"""Holds the metrics of version 0.1.0, each as its name, its kind and its labels. A name behind an arrow has replaced
the first one, and what stands behind that name the kind and the labels."""


@pytest.mark.parametrize("line", OLD_METRICS, ids=lambda line: line.split()[0])
def test_a_metric_keeps_its_name_kind_and_labels_unless_the_changelog_names_it(line: str) -> None:
    old, _, new = line.partition(" -> ")
    name, kind, labels = old.split()
    new, *changed = new.split() or [""]
    (row,) = (row for row in metric_rows() if row.name == (new or name))
    assert [row.type, ",".join(row.labels) or "-"] == (changed or [kind, labels])
    if new:
        changelog = (ROOT / "CHANGELOG.md").read_text()
        assert f"`{name}` is now `{new}`" in changelog


def test_every_error_is_listed_once() -> None:
    tables = reference_tables.client_errors() + reference_tables.internal_errors()
    for leaf in leaves():
        assert len(re.findall(rf"^\| `{leaf.code}` \|", tables, re.MULTILINE)) == 1, leaf


@pytest.mark.parametrize("row", error_rows(), ids=lambda row: row.code)
def test_every_error_says_what_happened_and_what_to_do(row: reference_tables.ErrorRow) -> None:
    assert row.meaning.endswith(".")
    assert row.advice.endswith("."), "the second paragraph of the class's docstring says what to do"
    assert 400 <= row.status < 600


def test_every_command_and_option_is_listed_with_a_meaning() -> None:
    page = reference_tables.commands()
    parsers = reference_tables.command_parsers()
    assert {"weft serve", "weft key new", "weft simulate run", "weft top"} <= set(parsers)
    for name, parser in parsers.items():
        section = page.partition(f"### {name}\n")[2].partition("\n### ")[0]
        assert re.match(r"\n[A-Z`].*\.\n?", section), name
        for action in parser._actions:
            if action.help == "==SUPPRESS==" or "-h" in action.option_strings:
                continue
            assert action.help, f"{name} does not say what {action.dest} is for"
            assert max(action.option_strings, key=len, default="") in section


COMMAND_LINE = re.compile(r"(?:^|`|\| |&& )(?:\.venv/bin/)?weft ([a-z][^`|<>\n&]*)", re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))])
def test_every_command_line_of_a_page_is_one_that_weft_takes(page: str) -> None:
    parsers = reference_tables.command_parsers()
    for line in COMMAND_LINE.findall((ROOT / page).read_text()):
        words = line.split()
        name = max((each for each in parsers if f"weft {line} ".startswith(f"{each} ")), key=len, default="")
        if not name:
            assert any(each.startswith(f"weft {words[0]} ") for each in parsers), f"{page}: weft {line}"
            continue
        if name != "weft bench":  # Each bench has options of its own.
            known = {option for action in parsers[name]._actions for option in action.option_strings}
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert given - known == set(), f"{page}: weft {line}"


def test_pages_name_the_tables_that_there_are() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert sorted(site_pages.TABLE.findall(pages)) == sorted(reference_tables.NAME_TO_TABLE)


def test_the_glossary_stays_short() -> None:
    terms = re.findall(r"^\| \*\*", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert 10 < len(terms) <= 25


# ---------------------------------------------------------------- links and requests


PAGES = {"index.md", "media.md", "glossary.md", "adr/README.md", "adr/0008-doorstep.md", *site_pages.COPIED}
SOURCE = "https://forge.example/blob/main"


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("media.md", "glossary.md", "glossary.md"),
        ("media.md", "../ARCHITECTURE.md#layers", "architecture.md#layers"),
        ("architecture.md", "docs/adr/0008-doorstep.md", "adr/0008-doorstep.md"),
        ("adr/0008-doorstep.md", "../../ARCHITECTURE.md", "../architecture.md"),
        ("adr/README.md", "0008-doorstep.md", "0008-doorstep.md"),
        ("index.md", "adr/", "adr/README.md"),
        ("media.md", "../README.md", "index.md"),
        ("media.md", "https://example.org/x", "https://example.org/x"),
        ("media.md", "#parts", "#parts"),
        ("architecture.md", "deploy/configs/", "https://forge.example/blob/main/deploy/configs"),
    ],
)
def test_a_link_of_a_forge_becomes_one_of_the_site(page: str, link: str, expected: str) -> None:
    assert with_links(f"See [it\nhere]({link}).", page, PAGES, SOURCE) == f"See [it\nhere]({expected})."


def test_without_an_address_of_the_source_a_link_to_it_is_text() -> None:
    text = "[`deploy/`](deploy/) holds\n\n```\n[x](y)\n```\n"
    assert with_links(text, "architecture.md", PAGES, "") == "`deploy/` holds\n\n```\n[x](y)\n```\n"


def test_a_link_to_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with_links("[x](../no/such/file.py)", "media.md", PAGES, "")
    with_tables("<!-- table: none -->x<!-- end of table -->", "media.md")
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example/x.js"></script>',
        "<img alt=x src=//img.example/x.png>",
        '<link href="https://fonts.example/css" rel="stylesheet">',
        "@import url(https://fonts.example/css);",
    ],
)
def test_what_a_browser_would_load_from_another_host_is_found(text: str) -> None:
    assert site_pages.REQUEST.search(text)


@pytest.mark.parametrize(
    "text",
    [
        '<a href="https://example.org/">read on</a>',
        '<script src="assets/x.js"></script>',
        '<svg xmlns="http://www.w3.org/2000/svg">',
        "background: url(data:image/svg+xml;charset=utf-8,%3Csvg%3E)",
    ],
)
def test_what_it_would_not_load_is_not(text: str) -> None:
    assert not site_pages.REQUEST.search(text)
