"""Reads the cluster's configuration from a YAML file: `load_config` and `check_config` refuse unknown and duplicate
keys, and list every problem with its line. For that the module parses YAML together with the place of every key. It
knows nothing of what a key means, which is `config.py`'s matter.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from deploy.config import ClusterConfig
from deploy.config_values import Section
from fabric.contracts import ConfigError
from router.api import describe_flaw, shown

KeyPath = tuple[str | int, ...]


class Mark(NamedTuple):
    """A `Mark` is a place in a file; line and column count from 1."""

    line: int
    column: int


class Problem(Section):
    """A `Problem` is one thing that is wrong with a config file, and where it is."""

    mark: Mark | None
    key: str
    message: str

    def __str__(self) -> str:
        where = f"line {self.mark.line}, column {self.mark.column}: " if self.mark else ""
        return f"{where}{self.key or '(file)'}: {self.message}"


def load_config(path: Path | None) -> ClusterConfig:
    """Loads the config from a file, or the laptop default if `path` is None. Raises ConfigError that lists every
    problem."""
    path = path or Path(__file__).parent / "configs" / "laptop.yaml"
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"the config file {path} can't be read: {error.strerror}") from error
    config, problems = check_config(text)
    if config is None:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return config


def check_config(text: str) -> tuple[ClusterConfig | None, list[Problem]]:
    """Parses and validates the text of a config file. Returns the config, or every problem that was found with its line
    and key."""
    try:
        data, marks = parse_with_marks(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = Mark(line=mark.line + 1, column=mark.column + 1) if mark else None
        return None, [Problem(mark=at, key="", message=f"the file is not valid YAML: {error.problem or error}")]
    if data is None:
        data = {}
    if not isinstance(data, dict):
        return None, [
            Problem(
                mark=Mark(line=1, column=1), key="", message=f"the file must be a mapping of keys, not {shown(data)}"
            )
        ]
    try:
        return ClusterConfig.model_validate(data), []
    except ValidationError as error:
        return None, [_problem(item, marks) for item in error.errors()]


def flaws_of(error: ValidationError) -> list[str]:
    """Returns what is wrong with a config that is in no file: each flaw with its key."""
    return [str(_problem(item, {})) for item in error.errors()]


def _problem(item: ErrorDetails, marks: dict[tuple[str | int, ...], Mark]) -> Problem:
    location = item["loc"]
    message = _unknown_key(location) if item["type"] == "extra_forbidden" else describe_flaw(item, "the value")
    return Problem(mark=locate(location, marks), key=".".join(map(str, location)), message=message)


def _unknown_key(location: tuple[str | int, ...]) -> str:
    fields = keys_of(ClusterConfig)
    for step in location[:-1]:
        # A tenant's name is a key that the file's author has chosen, and the place in a list is a number.
        if step in fields:
            section = section_in(fields[str(step)].annotation)
            assert section is not None
            fields = keys_of(section)
    near = difflib.get_close_matches(str(location[-1]), fields, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known keys are {', '.join(fields)}"
    return f"the key is unknown{hint}"


def keys_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Maps the keys of a section, as a file writes them, to its fields."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the section that a key holds, alone or in a list, or None if it holds none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (section_in(each) for each in get_args(annotation))
    return next((section for section in inner if section is not None), None)


def parse_with_marks(text: str) -> tuple[object, dict[KeyPath, Mark]]:
    """Returns the data, and the mark of every key and list element by its path. Raises yaml.MarkedYAMLError if the text
    is not valid YAML or has a duplicate key."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        marks: dict[KeyPath, Mark] = {}
        _collect(node, (), marks)
        return loader.construct_document(node), marks
    finally:
        loader.dispose()


def _collect(node: yaml.Node, path: KeyPath, marks: dict[KeyPath, Mark]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            if inner in marks:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} occurs twice", key.start_mark
                )
            marks[inner] = _mark(key)
            _collect(value, inner, marks)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            marks[(*path, index)] = _mark(value)
            _collect(value, (*path, index), marks)


def _mark(node: yaml.Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)


def locate(path: KeyPath, marks: dict[KeyPath, Mark]) -> Mark | None:
    """Returns the mark of a path, or that of the nearest mapping or list around it. Returns None if there is none."""
    while path:
        if path in marks:
            return marks[path]
        path = path[:-1]
    return None
