"""Runs the programs in `examples/` as a user does, and checks what they print."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from cluster_process import ClusterProcess, start_cluster

from fabric.contracts import ConfigError, InvalidMedia
from modalities.media import MediaLimits

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SEEN = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["circle", "square", "triangle", "star"]},
        "colour": {"enum": ["red", "green", "blue", "yellow"]},
    },
    "required": ["shape", "colour"],
    "additionalProperties": False,
}


def run(program: str, *arguments: object) -> dict[str, str]:
    """Runs a program and returns the lines that it prints: the text after `: ` by the text before it."""
    command = [sys.executable, str(EXAMPLES / program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: text.strip() for name, _, text in (line.partition(": ") for line in done.stdout.splitlines())}


@contextmanager
def with_package(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Installs the package of an example into `folder`, and lets the processes that are started meanwhile find it.
    Yields a path for a model directory."""
    source, site = folder / "source", folder / "site"
    shutil.copytree(EXAMPLES / name, source)  # pip builds inside the source.
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=300)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(site)]))
        yield folder / "model"


@pytest.mark.ray
def test_openai_client(cluster: ClusterProcess) -> None:
    lines = run("openai_client.py", cluster.url)
    assert (lines["text"], lines["picture"]) == ("eight", "red")
    pieces = lines["stream"].split("|")
    assert "".join(pieces) == "It is a circle."
    # Tokens that are made while the router is busy come in one piece.
    assert len([piece for piece in pieces if piece]) > 1


@pytest.mark.ray
def test_video_question(cluster: ClusterProcess) -> None:
    assert run("video_question.py", cluster.url) == {"video": "right", "sound": "two"}


@pytest.mark.ray
def test_structured_output(cluster: ClusterProcess) -> None:
    lines = run("structured_output.py", cluster.url)
    seen = json.loads(json.loads(lines["answer"]))
    jsonschema.validate(seen, SEEN)
    assert lines["checked"] == f"Seen(shape={seen['shape']!r}, colour={seen['colour']!r})"
    assert lines["choice"] == "square"


@pytest.mark.torch
def test_own_modality(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks also that the processes that decode know the modality, although they are spawned."""
    with with_package("own_modality", tmp_path, monkeypatch) as model:
        run("own_modality/write_model.py", model)
        sections: dict[str, Any] = {"encoders": {"decode_processes": 1}, "workers": {"replicas": 1}}
        with start_cluster(in_process=True, model={"path": str(model)}, **sections) as cluster:
            command = [sys.executable, str(EXAMPLES / "own_modality" / "ask.py"), cluster.url]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *answers, tokens, refused = done.stdout.splitlines()
    assert answers == [
        "What colour is the shape? red",
        "What shape is it? circle",
        "What colour is the shape? blue",
        "What shape is it? square",
    ]
    assert re.fullmatch(r"tokens of a drawing: [1-9]\d*", tokens)
    assert refused.startswith("refused with 400: messages.0.content.0: a drawing has a width, a height and shapes;")


@pytest.mark.parametrize(
    "drawing",
    [
        None,
        {"width": 9, "height": 9},
        {"width": "9", "height": 9, "shapes": []},
        {"width": float("inf"), "height": 9, "shapes": []},
        {"width": 9, "height": 9, "shapes": [["circle"]]},
        {"width": 9, "height": 9, "shapes": [["circle", 1, 1, -1, "red"]]},
        {"width": 9, "height": 9, "shapes": [["circle", float("nan"), 1, 1, "red"]]},
        {"width": 9, "height": 9, "shapes": [["circle", 1, float("nan"), 1, "red"]]},
        {"width": 9, "height": 9, "shapes": [["circle", 1, 1, 1, "mauve"]]},
    ],
)
def test_own_modality_refuses_what_is_no_drawing(drawing: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "own_modality")
    from weft_drawings import DrawingPlugin

    plugin = DrawingPlugin()
    data = plugin.parse({"drawing": drawing}, "p", MediaLimits())
    with pytest.raises(InvalidMedia, match="p: a drawing has"):
        plugin.probe(data, "p")


def test_own_family_refuses_a_sliding_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers gives a config that does not mention it a window of 4,096 tokens."""
    monkeypatch.syspath_prepend(EXAMPLES / "own_family")
    from weft_mistral import MistralFamily

    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["MistralForCausalLM"], "sliding_window": null}')
    assert MistralFamily(tmp_path).shape.num_kv_heads == 8
    config.write_text('{"architectures": ["MistralForCausalLM"]}')
    with pytest.raises(ConfigError, match="sliding-window"):
        MistralFamily(tmp_path)


@pytest.mark.torch
def test_own_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with with_package("own_family", tmp_path, monkeypatch) as model:
        run("own_family/write_model.py", model)
        sections = yaml.safe_load((EXAMPLES / "own_family" / "cluster.yaml").read_text())
        with start_cluster(in_process=True, model={"path": str(model)}, **sections) as cluster:
            lines = run("own_family/ask.py", model, cluster.url)
    assert lines["Weft"] == lines["transformers"]
    assert len(json.loads(lines["Weft"])) == 16
    assert "The tokens are equal." in lines


def test_a_model_without_its_package_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["DrawingDemoForConditionalGeneration"]}')
    command = [sys.executable, "-m", "deploy.cli", "serve", "--in-process", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "the architecture DrawingDemoForConditionalGeneration of" in done.stderr
    assert "is not supported; Weft supports" in done.stderr
