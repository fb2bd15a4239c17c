"""Tests the blocks of the documents without running them: each is run by a test or says why not, its commands and
options exist, its programs compile, and its configs are valid. `tests/e2e/test_docs_commands.py` runs the commands.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from doc_blocks import (
    REASON_TO_SIGN,
    ROOT,
    DocBlock,
    all_blocks,
    blocks_in,
    commands_in,
    documents,
    flaw_of,
    stray_marks,
)

from deploy.commands import build_parser
from deploy.config import ClusterConfig
from deploy.config_file import check_config

BLOCKS = all_blocks()
COMMANDS = [block for block in BLOCKS if block.is_command]
PROMETHEUS = {"scrape_configs", "rule_files"}
"""Lists the first keys of Prometheus' own files, which `promtool` checks in other tests."""


def place(block: DocBlock) -> str:
    return block.place


def test_the_documents_have_blocks_of_commands_that_run() -> None:
    assert len([block for block in COMMANDS if block.is_run]) > 50
    assert {"README.md", "docs/install.md", "docs/runbooks/weft-kv-full.md"} <= set(documents())


@pytest.mark.parametrize("document", documents())
def test_every_mark_stands_in_front_of_a_block(document: str) -> None:
    assert stray_marks((ROOT / document).read_text()) == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.not_run], ids=place)
def test_the_reason_why_a_block_is_not_run_holds(block: DocBlock) -> None:
    assert flaw_of(block) is None


def test_every_reason_is_used() -> None:
    given = {block.not_run for block in COMMANDS}
    assert set(REASON_TO_SIGN) - given == set()


@pytest.mark.parametrize("block", COMMANDS, ids=place)
def test_commands_are_of_the_shell_and_name_what_exists(block: DocBlock) -> None:
    """Holds also for commands that no test runs: their options, files and targets of make exist."""
    checked = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    for words in commands_in(block.text):
        program = Path(words[0]).name
        if program == "weft":
            read_command(words[1:])
        elif program == "make":
            assert set(words[1:]) <= targets(), words
        files = [word for word in words if re.match(r"(deploy|docs|examples|helm|loadtest|tests)/", word)]
        assert [file for file in files if not (ROOT / file).exists()] == []


def read_command(words: list[str]) -> None:
    """Parses the words of a `weft` command as the command does. Raises AssertionError for a word that it refuses."""
    if words == ["--help"] or words[-1:] == ["--help"]:
        return
    try:
        build_parser().read(words)
    except SystemExit as end:
        raise AssertionError(f"weft {' '.join(words)}: the command line is refused") from end


def targets() -> set[str]:
    return set(re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split())


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=place)
def test_programs_compile(block: DocBlock) -> None:
    compile(block.text, block.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "json"], ids=place)
def test_json_can_be_read(block: DocBlock) -> None:
    """A block may show one field of an object."""
    text = block.text if block.text.lstrip().startswith(("{", "[")) else "{" + block.text + "}"
    json.loads(text)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=place)
def test_configs_are_valid(block: DocBlock) -> None:
    """A config is read as `weft check` reads it, and values of the chart are checked against its schema."""
    kind = kind_of(block)
    if kind == "config":
        config, problems = check_config(block.text)
        assert config is not None, "\n".join(map(str, problems))
    elif kind == "values":
        jsonschema.validate(yaml.safe_load(block.text), values_schema())
    else:
        assert kind == "prometheus", f"{block.place} is neither a config, nor values of the chart, nor of Prometheus"


def kind_of(block: DocBlock) -> str:
    """Says by its first keys what a block of YAML is."""
    keys = set(yaml.safe_load(block.text))
    if keys <= set(ClusterConfig.model_fields):
        return "config"
    if keys <= set(values_schema()["properties"]):
        return "values"
    return "prometheus" if keys <= PROMETHEUS else f"unknown: {', '.join(sorted(keys))}"


def values_schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((ROOT / "helm" / "weft" / "values.schema.json").read_text())
    return schema


# ---------------------------------------------------------------- the check itself


def block_of(text: str) -> DocBlock:
    (block,) = blocks_in(text, "page.md")
    return block


def test_a_mark_belongs_to_the_block_behind_it() -> None:
    text = "a\n\n<!-- not run: needs Docker -->\n<!-- file: x.sh -->\n```sh\ndocker ps\n```\n\n```sh\nls\n```\n"
    first, second = blocks_in(text, "page.md")
    assert (first.not_run, first.file, first.line, first.is_run) == ("needs Docker", "x.sh", 5, False)
    assert (second.not_run, second.text, second.is_run) == (None, "ls\n", True)
    assert stray_marks(text) == []
    assert stray_marks("<!-- not run: needs Docker -->\nprose\n\n```sh\nls\n```\n") == [
        "<!-- not run: needs Docker -->"
    ]


def test_an_indented_block_loses_its_indentation() -> None:
    block = block_of("1. x\n\n    <!-- file: a.py -->\n    ```python\n    if x:\n        y\n    ```\n")
    assert (block.text, block.file) == ("if x:\n    y\n", "a.py")


@pytest.mark.parametrize(
    ("reason", "command", "flaw"),
    [
        ("needs Kubernetes", "kubectl get pods", None),
        ("needs Kubernetes", "curl localhost", "so it can run"),
        ("needs patience", "sleep 9", "is none of"),
        ("targets of make", "make serve", None),
        ("targets of make", "make serve\ncurl localhost", "so it can run"),
        ("tests/no_such_file.py runs it", "aiperf", "there is no"),
        ("tests/rigs/doc_blocks.py runs it", "aiperf", "does not speak of aiperf"),
    ],
)
def test_a_reason_that_does_not_hold_is_found(reason: str, command: str, flaw: str | None) -> None:
    found = flaw_of(block_of(f"<!-- not run: {reason} -->\n```sh\n{command}\n```\n"))
    assert found is None if flaw is None else flaw in (found or "")


def test_commands_are_found_in_pipes_and_substitutions() -> None:
    text = "x=1 weft check a > b\nkubectl exec $(kubectl get pod -o name) -- weft status | grep y && \\\n"
    text += "  make docs  # z\n"
    assert commands_in(text) == [
        ["weft", "check", "a"],
        ["kubectl", "exec"],
        ["kubectl", "get", "pod", "-o", "name"],
        ["--", "weft", "status"],
        ["grep", "y"],
        ["make", "docs"],
    ]


def test_an_unknown_option_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    read_command(["check", "file.yaml"])
    with pytest.raises(AssertionError, match="refused"):
        read_command(["check", "--no-such-option", "file.yaml"])
    assert "unknown argument" in capsys.readouterr().err
