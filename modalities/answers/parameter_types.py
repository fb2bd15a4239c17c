"""Says which JSON types the parameters of a tool may have, by the schema of the tool.

It resolves local references and unions as far as a format needs them that writes strings without quotes. What it can't
resolve may have any type.
"""

from __future__ import annotations

from collections.abc import Mapping

VALUE_END = "</parameter>"
ANY_TYPE = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
MAX_SCHEMAS = 64
"""Limits the references and unions of one parameter that are followed; beyond it, the parameter may have any type. A
few references to each other can stand for millions of alternatives."""


class ParameterTypes:
    """A `ParameterTypes` knows the types of one tool's parameters."""

    def __init__(self, root: Mapping[str, object]) -> None:
        self._root = root
        properties = root.get("properties")
        self.properties: Mapping[str, object] = properties if isinstance(properties, Mapping) else {}
        self._key_to_types = {key: self._types(schema) for key, schema in self.properties.items()}

    def is_text(self, key: str) -> bool:
        """Says whether the parameter is a string, or a string or null."""
        types = self._key_to_types.get(key, ANY_TYPE)
        return "string" in types and types <= {"string", "null"}

    def can_be_null(self, key: str) -> bool:
        return "null" in self._key_to_types.get(key, ANY_TYPE)

    def takes_boolean(self, key: str) -> bool:
        """Says whether the parameter may be a boolean and may not be a string."""
        types = self._key_to_types.get(key, ANY_TYPE)
        return "boolean" in types and "string" not in types

    def alternatives(self, schema: object) -> list[Mapping[str, object]]:
        """Returns the schemas, without references and unions, of which a value fits one. An empty one stands for what
        can't be resolved."""
        found: list[Mapping[str, object]] = []
        pending = [schema]
        for _ in range(MAX_SCHEMAS):
            if not pending:
                return found
            one = pending.pop()
            if not isinstance(one, Mapping):
                found.append({})
            elif "$ref" in one:
                pending.append(self._referred(one["$ref"]))
            elif union := one.get("anyOf", one.get("oneOf")):
                pending += union if isinstance(union, list) else [None]
            else:
                found.append({} if "allOf" in one else one)
        return [{}]

    def _types(self, schema: object) -> frozenset[str]:
        return frozenset().union(*(_types_of_one(one) for one in self.alternatives(schema)))

    def _referred(self, reference: object) -> object:
        """Returns what a local reference such as `#/$defs/Colour` names, or None."""
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        found: object = self._root
        for step in reference.removeprefix("#/").split("/"):
            if not isinstance(found, Mapping):
                return None
            found = found.get(step.replace("~1", "/").replace("~0", "~"))
        return found


def _types_of_one(schema: Mapping[str, object]) -> frozenset[str]:
    types = schema.get("type")
    if isinstance(types, str):
        return frozenset({types})
    if isinstance(types, list) and types:
        return frozenset(one for one in types if isinstance(one, str))
    if "const" in schema:
        return _types_of_values([schema["const"]])
    values = schema.get("enum")
    return _types_of_values(values) if isinstance(values, list) and values else ANY_TYPE


def _types_of_values(values: list[object]) -> frozenset[str]:
    kinds = {str: "string", bool: "boolean", type(None): "null", int: "integer", float: "number", list: "array"}
    return frozenset(kinds.get(type(value), "object") for value in values)
