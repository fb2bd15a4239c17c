"""Closes the objects of a JSON schema to properties that the schema does not name.

By JSON Schema, an object may have any property that its schema does not mention. A model that is held to such a schema
invents properties, and a small one does so up to its token limit. What a closed schema allows, the open one allows too,
so an answer that fits the one fits the other. The module knows nothing of grammars.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COMBINING = frozenset(
    {"$dynamicRef", "allOf", "dependentSchemas", "if", "not", "oneOf", "then", "unevaluatedProperties"}
)
"""Names the keywords under which two schemas hold for one object, or the fit of one excludes another. Closing an object
there could leave nothing that fits, or change which schema fits."""
_OPENING = frozenset({"additionalProperties", "minProperties", "patternProperties"})
"""Names the keywords by which an author says that there may be other properties."""
_VALUES = frozenset({"const", "default", "enum", "examples"})
"""Names the keywords whose values are no schemas."""
_NAMED = frozenset({"$defs", "definitions", "properties"})
"""Names the keywords whose values are schemas by names that an author chose."""


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema with `additionalProperties: false` in each object that names its properties and says nothing
    of others. A schema that combines schemas is returned as it is."""
    return dict(schema) if _combines(schema) else _closed(schema)


def _combines(schema: object) -> bool:
    """Returns whether a schema, or one within it, combines schemas for one object."""
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, Mapping):
        return False
    has_two = "properties" in schema and ("anyOf" in schema or "$ref" in schema)
    return has_two or not _COMBINING.isdisjoint(schema) or any(map(_combines, schema.values()))


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _closed_part(key, value) for key, value in schema.items()}
    if "properties" in found and _OPENING.isdisjoint(found) and _names_required(found):
        found["additionalProperties"] = False
    return found


def _closed_part(keyword: str, value: Any) -> Any:
    if keyword in _VALUES:
        return value
    if keyword in _NAMED and isinstance(value, Mapping):
        return {name: _closed(schema) for name, schema in value.items()}
    return _closed(value)


def _names_required(schema: Mapping[str, Any]) -> bool:
    properties, required = schema["properties"], schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    return all(isinstance(key, str) and key in properties for key in required)
