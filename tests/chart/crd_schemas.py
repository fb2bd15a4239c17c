"""Makes strict JSON schemas of custom kinds out of their CustomResourceDefinitions:

    .venv/bin/python tests/chart/crd_schemas.py FOLDER-WITH-crd_*.yaml

A definition lets unknown fields pass, and an API server drops them without a word; here they are errors. The schemas in
`crds/` are those of KubeRay and Prometheus' operator 0.93, without descriptions, as of November 2026.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import yaml

CRDS = Path(__file__).parent / "crds"


def strict(node: Any) -> Any:
    """Returns a schema of OpenAPI 3.0, as definitions have it, as a strict JSON schema."""
    if isinstance(node, list):
        return [strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {key: strict(value) for key, value in node.items() if not _is_dropped(key, value)}
    properties = node.get("properties")
    if isinstance(properties, dict):
        found["properties"] = {name: strict(each) for name, each in properties.items()}
        if not node.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in node:
            found["additionalProperties"] = False
        # The API server fills fields that have a default.
        required = [name for name in node.get("required", ()) if "default" not in properties.get(name, {})]
        found.pop("required", None)
        if required:
            found["required"] = required
    if node.get("x-kubernetes-int-or-string"):
        found.pop("anyOf", None)
        found["type"] = ["integer", "string"]
    if node.get("nullable") and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    return found


def _is_dropped(key: str, value: Any) -> bool:
    is_text = key in ("description", "format") and isinstance(value, str)
    return is_text or key in ("nullable", "properties") or key.startswith("x-kubernetes")


def schema_of(text: str) -> tuple[str, bytes]:
    """Returns the kind that a definition defines, and its packed schema."""
    definition = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = (each for each in definition["spec"]["versions"] if each["storage"])
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    schema["properties"]["apiVersion"] = {"const": f"{definition['spec']['group']}/{version['name']}"}
    packed = gzip.compress(json.dumps(schema, sort_keys=True, separators=(",", ":")).encode(), mtime=0)
    return definition["spec"]["names"]["kind"], packed


def write(folder: Path) -> None:
    CRDS.mkdir(exist_ok=True)
    for path in sorted(folder.glob("crd_*.yaml")):
        kind, packed = schema_of(path.read_text())
        (CRDS / f"{kind.lower()}.json.gz").write_bytes(packed)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
