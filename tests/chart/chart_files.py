"""Writes the files of the chart that are made from others: its list of live keys, the schema of its values, its README,
and its copies of dashboards and alerts, because a chart reads only what lies in its folder.

    .venv/bin/python tests/chart/chart_files.py

A test fails as long as one of them is out of date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from values_schema import values_schema

from deploy.live_config import live_keys_yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "weft"
COPIES = {"grafana": ("deploy/grafana", "*.json"), "prometheus": ("deploy/prometheus", "*.yaml")}

README = """# The chart `weft`

It installs Weft as a RayService of [KubeRay](https://github.com/ray-project/kuberay), whose operator (1.5 or later)
must be there. [docs/kubernetes.md](../../docs/kubernetes.md) says how to install, upgrade and operate it. This page
lists its values; it is made from `values.schema.json` and `values.yaml` by `tests/chart/chart_files.py`.

<!-- not run: needs Kubernetes -->
```sh
helm install weft helm/weft -f my-values.yaml
```

`ci/` has complete examples: a laptop without a GPU, one machine with eight GPUs, several machines with InfiniBand,
slices of GPUs (MIG), and two pools of workers with an engine each.

## Values

"""


def generated() -> dict[Path, str]:
    """Maps each file that is made to its text."""
    schema = values_schema()
    found = {
        CHART / "files" / "live-keys.yaml": live_keys_yaml(),
        CHART / "values.schema.json": json.dumps(schema, indent=1) + "\n",
        CHART / "README.md": README + values_table(schema),
    }
    for folder, (source, pattern) in COPIES.items():
        for path in sorted((ROOT / source).glob(pattern)):
            found[CHART / "files" / folder / path.name] = path.read_text()
    return found


def present_copies() -> set[Path]:
    return {path for folder, (_, pattern) in COPIES.items() for path in (CHART / "files" / folder).glob(pattern)}


def values_table(schema: dict[str, Any]) -> str:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = "".join(f"| `{key}` | {text} | {default} |\n" for key, text, default in _rows(schema, values, ""))
    return f"| value | what it is | default |\n|---|---|---|\n{rows}"


def _rows(schema: dict[str, Any], values: Any, prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, inner in schema["properties"].items():
        key = f"{prefix}{name}"
        if key == "global":
            continue
        text = inner.get("description", "")
        if "enum" in inner:
            text += " One of " + ", ".join(f"`{each}`" for each in inner["enum"]) + "."
        default = values.get(name) if isinstance(values, dict) else None
        is_mapping = bool(inner.get("properties")) and name not in ("config", "requests", "limits", "resources")
        is_mapping = is_mapping and inner.get("additionalProperties") is False
        yield key, text.replace("|", "\\|"), "" if is_mapping else f"`{json.dumps(default)}`"
        if is_mapping:
            yield from _rows(inner, default, f"{key}.")


def write() -> None:
    found = generated()
    for stale in present_copies() - found.keys():
        stale.unlink()
    for path, text in found.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    write()
