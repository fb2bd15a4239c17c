"""Writes the documentation for programs that read text: `llms.txt`, `llms-full.txt`, and each page as Markdown.

`llms.txt` is in the form of https://llmstxt.org: a title, a summary, and sections of links with a sentence about each
page. `llms-full.txt` holds all pages of these sections in one file. The links lead to the Markdown of the pages, which
stands beside their HTML. Both files are made of the navigation and of the pages as the site shows them, with their
tables. The module knows nothing of what the pages say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

OPTIONAL = "Optional"
"""Names the section that a reader with little room may skip, as llms.txt defines it."""
SKIPPED_SECTIONS = ("Decisions", "Contribute")
"""Lists the sections of the navigation that become the optional one."""
COMMENT = re.compile(r"^[ ]*<!-- .*? -->\n", re.MULTILINE)
ANCHOR = re.compile(r'<a id="[^"]*"></a>')
LINK = re.compile(r"!?\[([^\[\]]*)\]\([^()\s]+\)")
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1[ ]*$", re.DOTALL | re.MULTILINE)


class LinkedPage(NamedTuple):
    """A `LinkedPage` is a page as the summary lists it."""

    title: str
    address: str
    """Holds the path of the page's Markdown from the root of the site."""
    text: str
    """Holds the page's Markdown."""

    @property
    def summary(self) -> str:
        return first_sentence(self.text)


class _SeenPages:
    """Holds what one build of the site has shown so far."""

    def __init__(self) -> None:
        self.nav: Navigation | None = None
        self.address_to_text: dict[str, str] = {}


_seen = _SeenPages()


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Remembers the navigation, and forgets the pages of an earlier build."""
    _seen.nav = nav
    _seen.address_to_text = {}
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Remembers the text of a page, which the hooks ahead of this one have completed."""
    _seen.address_to_text[page.file.src_uri] = plain(markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Writes the two files and the Markdown of the pages into the site."""
    site = Path(config.site_dir)
    for address, text in _seen.address_to_text.items():
        path = site / address
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    sections = sections_of(_seen.nav.items if _seen.nav is not None else (), _seen.address_to_text)
    index = llms_index(config.site_name, config.site_description or "", sections)
    (site / "llms.txt").write_text(index, encoding="utf-8")
    (site / "llms-full.txt").write_text(llms_full(sections), encoding="utf-8")


def sections_of(items: Sequence[object], address_to_text: dict[str, str]) -> list[tuple[str, list[LinkedPage]]]:
    """Returns the sections of the navigation with their pages, the optional one last. Pages at the top belong to the
    first section, `Start`."""
    sections: dict[str, list[LinkedPage]] = {"Start": []}

    def add(entries: Sequence[object], heading: str) -> None:
        for entry in entries:
            if isinstance(entry, Section):
                is_optional = entry.title in SKIPPED_SECTIONS or heading == OPTIONAL
                add(entry.children, OPTIONAL if is_optional else entry.title)
            elif isinstance(entry, Page):
                address = entry.file.src_uri
                text = address_to_text[address]
                title = entry.title or title_of(text)
                sections.setdefault(heading, []).append(LinkedPage(str(title), address, text))

    add(items, "Start")
    optional = sections.pop(OPTIONAL, [])
    found = [(heading, pages) for heading, pages in sections.items() if pages]
    return [*found, (OPTIONAL, optional)] if optional else found


def llms_index(name: str, summary: str, sections: Sequence[tuple[str, Sequence[LinkedPage]]]) -> str:
    """Returns the text of `llms.txt`."""
    parts = [f"# {name}", f"> {summary}"]
    for heading, pages in sections:
        lines = [f"- [{page.title}]({page.address})" for page in pages]
        if heading != OPTIONAL:  # A record begins with its date, and its title says what it decides.
            lines = [f"{line}: {page.summary}" for line, page in zip(lines, pages, strict=True)]
        parts += [f"## {heading}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def llms_full(sections: Sequence[tuple[str, Sequence[LinkedPage]]]) -> str:
    """Returns the text of `llms-full.txt`: every page but the optional ones, each behind a line with its address."""
    pages = [page for heading, below in sections if heading != OPTIONAL for page in below]
    return "\n".join(f"<!-- {page.address} -->\n\n{page.text.strip()}\n" for page in pages)


def plain(markdown: str) -> str:
    """Returns a page without what is meant for the site alone: comments and anchors of HTML."""
    pieces, end = [], 0
    for fence in FENCE.finditer(markdown):
        pieces += [ANCHOR.sub("", COMMENT.sub("", markdown[end : fence.start()])), fence[0]]
        end = fence.end()
    return "".join([*pieces, ANCHOR.sub("", COMMENT.sub("", markdown[end:]))])


def title_of(markdown: str) -> str:
    """Returns the first heading of a page, or an empty string."""
    found = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    return found[1].strip() if found else ""


def first_sentence(markdown: str) -> str:
    """Returns the first sentence of a page's first paragraph as plain text, or an empty string if it has none."""
    for paragraph in re.split(r"\n\s*\n", FENCE.sub("", markdown)):
        text = " ".join(paragraph.split())
        if text and not text.startswith(("#", "|", "<", "!", "-", "Status:")):
            words = LINK.sub(r"\1", text).replace("**", "")
            sentence = re.match(r".*?[.?!](?=\s|$)", words)
            return sentence[0] if sentence else words
    return ""
