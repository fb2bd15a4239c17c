"""Parses YAML together with the place of every key, so that a message about a wrong value can name its line. It refuses
duplicate keys and knows nothing of what the keys mean."""

from __future__ import annotations

from typing import NamedTuple

import yaml


class Mark(NamedTuple):
    """A `Mark` is a place in a file; line and column count from 1."""

    line: int
    column: int


Path = tuple[str | int, ...]


def parse_with_marks(text: str) -> tuple[object, dict[Path, Mark]]:
    """Returns the data, and the mark of every key and list element by its path. Raises yaml.MarkedYAMLError if the text
    is not valid YAML or has a duplicate key."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        marks: dict[Path, Mark] = {}
        _collect(node, (), marks)
        return loader.construct_document(node), marks
    finally:
        loader.dispose()


def _collect(node: yaml.Node, path: Path, marks: dict[Path, Mark]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            if inner in marks:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            marks[inner] = _mark(key)
            _collect(value, inner, marks)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            marks[(*path, index)] = _mark(value)
            _collect(value, (*path, index), marks)


def _mark(node: yaml.Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)


def locate(path: Path, marks: dict[Path, Mark]) -> Mark | None:
    """Returns the mark of a path, or that of the nearest mapping or list around it. Returns None if there is none."""
    while path:
        if path in marks:
            return marks[path]
        path = path[:-1]
    return None
