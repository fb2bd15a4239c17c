"""Reads the files of the console's page. The module knows nothing of how they are served."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import NamedTuple

import msgspec

from router.console.span_colours import OTHER_COLOUR, SPAN_TO_COLOUR
from router.observe import NAME_TO_WORDS

ENDING_TO_TYPE = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
WORDS_FILE = "record_words.js"
"""This file is made of the words and colours that Python has, so that all pages and commands show the same."""


class ConsoleFile(NamedTuple):
    """A `ConsoleFile` is a file of the page, as a browser gets it."""

    content: bytes
    media_type: str
    tag: str
    """Is the file's entity tag, with quotation marks; it changes with the content."""


def read_console() -> Mapping[str, ConsoleFile]:
    """Reads all files of the page. Maps the name of each to the file; the page itself is `index.html`."""
    name_to_content = {each.name: each.read_bytes() for each in files(__package__).joinpath("page").iterdir()}
    name_to_content[WORDS_FILE] = _words()
    return {name: _file(name, content) for name, content in name_to_content.items()}


def _file(name: str, content: bytes) -> ConsoleFile:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return ConsoleFile(content, ENDING_TO_TYPE[name.rpartition(".")[2]], tag)


def _words() -> bytes:
    """Returns a module of JavaScript with the words for fields and the colours of spans."""
    values = {"nameToWords": NAME_TO_WORDS, "spanToColour": SPAN_TO_COLOUR, "otherColour": OTHER_COLOUR}
    return b"".join(b"export const %s = %s;\n" % (name.encode(), msgspec.json.encode(v)) for name, v in values.items())
