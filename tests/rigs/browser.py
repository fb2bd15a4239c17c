"""Opens pages in a real, headless Chromium, driven by Playwright. Playwright brings no browser of its own here: it is
the one that is installed, the one that `WEFT_CHROMIUM` names, or the one that `make chromium` has unpacked."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

UNPACKED = Path(__file__).parents[2] / "build" / "chromium"
NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",  # Chromium refuses to run as root with its sandbox, and the pages are our own.
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
)
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1380, "height": 900}
TIMEOUT_MS = 60_000
expect.set_options(timeout=TIMEOUT_MS)


class Chromium(NamedTuple):
    path: str
    environment: Mapping[str, str]


def find_chromium() -> Chromium | None:
    """Returns a Chromium that can run here, or None if there is none."""
    named = os.environ.get("WEFT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if named:
        return Chromium(named, {})
    own = UNPACKED / "usr/lib/chromium/chromium"
    if not own.exists():
        return None
    libraries = [str(each) for each in sorted(UNPACKED.glob("**/lib/*-linux-gnu")) if each.is_dir()]
    libraries += [f"{each}/pulseaudio" for each in libraries]
    fonts = {} if Path("/etc/fonts/fonts.conf").exists() else {"FONTCONFIG_SYSROOT": str(UNPACKED)}
    return Chromium(str(own), {"LD_LIBRARY_PATH": ":".join(libraries)} | fonts)


@contextmanager
def browser() -> Iterator[Browser]:
    """Starts a browser, or skips the test if there is none."""
    found = find_chromium()
    if found is None:
        pytest.skip("there is no Chromium; `make chromium` fetches one from Debian")
    # Chromium sometimes leaves a folder behind, so it has a temporary folder of its own.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, sync_playwright() as playwright:
        environment: dict[str, str | float | bool] = {**os.environ, **found.environment, "TMPDIR": folder}
        running = playwright.chromium.launch(executable_path=found.path, args=[*ARGUMENTS], env=environment)
        try:
            yield running
        finally:
            running.close()


class OpenPage(NamedTuple):
    """An `OpenPage` is a page with what went wrong in it."""

    page: Page
    problems: list[str]
    """Lists errors of scripts, warnings of the console, and requests to other hosts."""


@contextmanager
def opened(running: Browser, url: str, **options: Any) -> Iterator[OpenPage]:
    """Opens a page in a context of its own, and asserts at the end that nothing went wrong in it."""
    context = running.new_context(**({"viewport": DESKTOP} | options))
    context.set_default_timeout(TIMEOUT_MS)
    page, problems = context.new_page(), list[str]()
    host = url.split("/")[2]
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
    page.on("request", lambda asked: problems.append(asked.url) if not _is_own(asked.url, host) else None)
    try:
        page.goto(url)
        yield OpenPage(page, problems)
        assert problems == []
    finally:
        context.close()


def _is_own(url: str, host: str) -> bool:
    return url.startswith(("data:", "blob:")) or url.split("/")[2] == host


def barriers(page: Page) -> list[str]:
    """Returns what keeps people from using a page: the rules of axe (WCAG A and AA) that it breaks, with the places."""
    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {node['target']}" for each in found for node in each["nodes"]]


def overflow_px(page: Page) -> int:
    """Returns by how much a page is wider than its window."""
    wider: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return wider
