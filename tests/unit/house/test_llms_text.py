"""Builds a small site with the hook that writes `llms.txt`, and checks what programs that read text get."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs" / "hooks"))

from llms_text import first_sentence, plain

ROOT = Path(__file__).resolve().parents[3]
PAGES = {
    "index.md": "# Home\n\nThe **first** page. It says more.\n",
    "use.md": "# Use\n\n<!-- not run: needs Docker -->\n```sh\ndocker ps\n```\n\n"
    '| a |\n|---|\n| <a id="k"></a>`k` |\n\n'
    "See [the other](why.md), which\nis there.\n",
    "why.md": "# Why\n\nStatus: accepted\n\n## Context\n\nIt was so.\n",
}
NAV = [{"Home": "index.md"}, {"Use": [{"How to use it": "use.md"}]}, {"Decisions": ["why.md"]}]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "docs").mkdir()
    for name, text in PAGES.items():
        (folder / "docs" / name).write_text(text)
    settings = {"site_name": "Small", "site_description": "A small site.", "nav": NAV, "use_directory_urls": False}
    settings |= {"hooks": [str(ROOT / "docs" / "hooks" / "llms_text.py")], "plugins": [], "theme": {"name": "mkdocs"}}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    build(load_config(str(folder / "mkdocs.yml"), site_dir=str(folder / "out")))
    return folder / "out"


def test_the_summary_has_the_form_of_llms_txt(site: Path) -> None:
    assert (site / "llms.txt").read_text() == (
        "# Small\n\n> A small site.\n\n"
        "## Start\n\n- [Home](index.md): The first page.\n\n"
        "## Use\n\n- [How to use it](use.md): See the other, which is there.\n\n"
        "## Optional\n\n- [Why](why.md)\n"
    )


def test_every_linked_page_is_there_as_markdown(site: Path) -> None:
    for address in re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text()):
        assert (site / address).read_text().startswith("# ")
    assert "<!--" not in (site / "use.md").read_text()
    assert "```sh\ndocker ps\n```" in (site / "use.md").read_text()


def test_the_full_text_has_every_page_but_the_optional_ones(site: Path) -> None:
    text = (site / "llms-full.txt").read_text()
    assert re.findall(r"^<!-- (\S+) -->$", text, re.MULTILINE) == ["index.md", "use.md"]
    assert "docker ps" in text
    assert "It was so." not in text


def test_the_site_of_the_project_uses_the_hook_behind_the_one_that_fills_in_tables() -> None:
    hooks = re.search(r"^hooks: \[(.+)\]$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert hooks is not None
    assert hooks[1].split(", ") == ["docs/hooks/site_pages.py", "docs/hooks/llms_text.py"]


@pytest.mark.parametrize(
    ("markdown", "sentence"),
    [
        ("# A\n\nOne. Two.", "One."),
        ("# A\n\n> quoted\n\nStill: it runs 2.5 times. More.", "> quoted"),
        (
            "# A\n\n![picture](x.svg)\n\n- a list\n\nText: with `code.py` and\na break",
            "Text: with `code.py` and a break",
        ),
        ("# A\n\n```sh\nls.\n```\n", ""),
    ],
)
def test_the_first_sentence_of_a_page(markdown: str, sentence: str) -> None:
    assert first_sentence(markdown) == sentence


def test_comments_in_fenced_blocks_stay() -> None:
    text = "<!-- file: a.html -->\n```html\n<!-- kept -->\n```\n"
    assert plain(text) == "```html\n<!-- kept -->\n```\n"
