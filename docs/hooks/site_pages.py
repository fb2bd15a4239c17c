"""Prepares the pages of the documentation site for MkDocs.

Pages stand where a forge shows them: most of them in `docs/`, three of them beside it. So that one link works in both
places, this hook brings the three into the site, rewrites the links between pages, and takes the links to source files
out unless the site knows where the source can be read. It also fills in the tables that are made from the code. A link
to nothing, an unknown table and a request to another host are warnings, which `mkdocs build --strict` turns into
errors. The module knows nothing of what the tables contain.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference_tables import NAME_TO_TABLE

ROOT = Path(__file__).resolve().parents[2]
REPO_TO_SITE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Maps documents that stand outside `docs/` to their pages. The README is not copied: the site has a first page of its
own."""
COPIED = {site: repo for repo, site in REPO_TO_SITE.items() if repo != "README.md"}
RECORDS = "adr/README.md"

TABLE = re.compile(r"<!-- table: ([a-z-]+) -->.*?<!-- end of table -->", re.DOTALL)
"""Matches the place of a table. What stands between the two comments is for readers of the file itself."""
FENCE = re.compile(r"^(```|~~~).*?^\1[ ]*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\(([^()\s]+)\)")
REQUEST = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b(?![^>]*\brel=[\"']?(?:canonical|prev|next)\b)[^>]*\bhref=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|(?:@import|url\()[^;)]*?((?:https?:)?//[^\"'\s;)]+)"
)
"""Matches what a browser would load from another host. A link that a reader may click is no request."""

log = logging.getLogger("mkdocs.hooks.site_pages")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists all decision records below the entry of their index, so that a new record needs no change elsewhere."""
    names = sorted(path.name for path in (ROOT / "docs" / "adr").glob("[0-9]*.md"))
    records = [RECORDS, *(f"adr/{name}" for name in names)]
    config.nav = _with_records(config.nav, records)
    return config


def _with_records(nav: Any, records: list[str]) -> Any:
    """Returns the navigation with the list of records in place of their index."""
    if isinstance(nav, list):
        return [_with_records(entry, records) for entry in nav]
    if isinstance(nav, dict):
        return {title: records if below == RECORDS else _with_records(below, records) for title, below in nav.items()}
    return nav


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the documents that stand beside `docs/`."""
    for site, repo in COPIED.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / repo)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the page with links that work in the site, and with its tables."""
    name, pages = page.file.src_uri, {file.src_uri for file in files}
    return with_tables(with_links(markdown, name, pages, config.extra.get("source_url") or ""), name)


def with_tables(markdown: str, page: str) -> str:
    """Returns the text of a page with its tables in their places."""

    def table(place: re.Match[str]) -> str:
        make = NAME_TO_TABLE.get(place[1])
        if make is None:
            log.warning("%s: there is no table %r", page, place[1])
            return ""
        return make()

    return TABLE.sub(table, markdown)


def with_links(markdown: str, page: str, pages: Set[str], source_url: str) -> str:
    """Returns the text of `page` with its links rewritten, except in fenced code. A link to a file that is no page
    leads to that file below `source_url`; if the address is empty, only the link's text remains."""
    folder = posixpath.dirname(COPIED.get(page, f"docs/{page}"))

    def link(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        path, hash_sign, anchor = target.partition("#")
        if not path or ":" in path:
            return found[0]
        repo = posixpath.normpath(posixpath.join(folder, path))
        site = _page_of(repo, pages)
        if site is not None:
            return f"[{text}]({posixpath.relpath(site, posixpath.dirname(page) or '.')}{hash_sign}{anchor})"
        if not (ROOT / repo).exists():
            log.warning("%s: the link to %r leads to nothing", page, target)
        return f"[{text}]({source_url}/{repo})" if source_url else text

    pieces, end = [], 0
    for fence in FENCE.finditer(markdown):
        pieces += [LINK.sub(link, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, LINK.sub(link, markdown[end:])])


def _page_of(repo: str, pages: Set[str]) -> str | None:
    """Returns the page of the site that shows a file or folder of the repository, or None if none does."""
    for name in (repo, f"{repo}/README.md"):
        site = REPO_TO_SITE.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else None)
        if site in pages:
            return site
    return None


def on_post_build(config: MkDocsConfig) -> None:
    """Warns of everything in the pages and style sheets that a browser would load from another host."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix not in (".html", ".css"):
            continue
        for found in REQUEST.finditer(path.read_text(encoding="utf-8")):
            address = next(group for group in found.groups() if group)
            log.warning("%s loads %s", os.path.relpath(path, config.site_dir), address)
