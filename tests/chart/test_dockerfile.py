"""Tests deploy/Dockerfile as far as that goes without Docker. `image_steps.py` runs its steps by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml
from helm_tools import CHART
from image_steps import DOCKERFILE, ROOT, context_files, is_ignored, lineage, parse

BEFORE, STAGES = parse(DOCKERFILE.read_text())


def test_hadolint_finds_no_fault() -> None:
    done = subprocess.run([Path(sys.executable).parent / "hadolint", DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_base_images_are_pinned() -> None:
    (base,) = (step.text.partition("=")[2] for step in BEFORE)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", base)
    outside = {stage.parent for stage in STAGES.values()} - STAGES.keys()
    assert outside == {"${PYTHON_IMAGE}"}


def test_both_images_run_as_the_user_of_the_chart() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["podSecurityContext"]
    for target in ("cpu", "gpu"):
        steps = [step for stage in lineage(STAGES, target) for step in stage.steps]
        names = [step.name for step in steps]
        assert steps[-1].name == "USER", "no step after it runs as root"
        assert steps[-1].text == f"{values['runAsUser']}:{values['runAsGroup']}"
        (check,) = (step.text for step in steps if step.name == "HEALTHCHECK")
        assert "/health/ready" in json.loads(check.partition("CMD ")[2])[-1]
        assert names.count("CMD") == 1


def test_packages_are_those_of_the_project() -> None:
    makefile, steps = (ROOT / "Makefile").read_text(), DOCKERFILE.read_text()
    for package in re.findall(r"(?:torch|nixl)==[0-9.]+", makefile):
        num_places = 3 if package.startswith("torch") else 2
        assert steps.count(package) == num_places, f"{package} is installed for a CPU, for GPUs, and torch for vLLM"
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert any(each.startswith("ray[serve]==2.60.0") for each in dependencies)
    assert "rayVersion: 2.60.0" in (CHART / "templates" / "rayservice.yaml").read_text(), (
        "KubeRay must know the version"
    )


def test_the_build_sees_the_packages_and_nothing_else() -> None:
    files = {str(path) for path in context_files()}
    assert {"pyproject.toml", "constraints.txt", "deploy/cli.py", "deploy/demo/checkpoint/config.json"} <= files
    tops = {name.split("/")[0] for name in files}
    includes = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {each.removesuffix("*") for each in includes}
    assert tops == packages | {"pyproject.toml", "constraints.txt", "requirements", "LICENSE", "README.md"}
    assert [name for name in files if name.startswith("requirements/")] == ["requirements/vllm-gpu.txt"]
    assert is_ignored("deploy/__pycache__/cli.pyc", ["*", "!deploy", "**/__pycache__"])
    assert not is_ignored("deploy/cli.py", ["*", "!deploy", "**/__pycache__"])


def test_the_gpu_image_has_the_environment_of_workers_with_vllm() -> None:
    """Workers look for it beside Weft's own, under the same name with `-vllm` behind."""
    copied = {step.text for step in STAGES["gpu"].steps if step.name == "COPY"}
    assert copied == {"--from=build-gpu /opt/weft /opt/weft", "--from=build-vllm /opt/weft-vllm /opt/weft-vllm"}
    steps = [step.text for stage in lineage(STAGES, "build-vllm") for step in stage.steps]
    assert any("/opt/weft-vllm/bin/pip install --no-deps -r vllm-gpu.txt" in step for step in steps)
    assert "/opt/weft-vllm" not in " ".join(step.text for stage in lineage(STAGES, "cpu") for step in stage.steps)
