"""Drives a served demo model with OpenAI's JavaScript library and the Vercel AI SDK.

`tests/clients/node/drive.mjs` sends the requests and prints the answers. The packages have the versions of its lock
file, and are installed into `build/` once. Without npm or its registry, these tests are skipped.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from client_questions import WORDS, media_question, spoken
from cluster_process import ClusterProcess
from media_web import MediaWeb

from deploy.demo.tasks.words import HELLO

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "clients" / "node"
INSTALLED = ROOT / "build" / "clients" / "node"
INSTALL = ("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=1", "--fetch-timeout=20000")
CALL = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
SEEN = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square"]}, "count": {"enum": [1, 2, 3]}},
    "required": ["shape", "count"],
    "additionalProperties": False,
}
PICTURE_QUESTION, RIGHT = media_question("image")


def install() -> None:
    """Installs the packages, unless those of the same lock file are there. Skips the test if that is not possible."""
    lock = (SOURCES / "package-lock.json").read_bytes()
    stamp = INSTALLED / "installed-lock.json"
    if stamp.exists() and stamp.read_bytes() == lock:
        return
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    INSTALLED.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(SOURCES / name, INSTALLED)
    done = subprocess.run(INSTALL, cwd=INSTALLED, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"npm can't install the packages: {done.stderr[-500:]}")
    stamp.write_bytes(lock)


@pytest.fixture(scope="module")
def answers(served: ClusterProcess, web: MediaWeb, has_embeddings: bool) -> dict[str, Any]:
    install()
    shutil.copy(SOURCES / "drive.mjs", INSTALLED)
    parts = PICTURE_QUESTION[-1]["content"]
    image = next(part["image_url"]["url"] for part in parts if part["type"] == "image_url")
    question = next(part["text"] for part in parts if part["type"] == "text")
    sounds = {word: base64.b64encode(spoken(word)).decode() for word in WORDS}
    asked = {"image": image, "question": question, "imageUrl": web.url("/picture.png"), "sounds": sounds}
    asked["hasEmbeddings"] = has_embeddings
    done = subprocess.run(
        ["node", "drive.mjs", served.url],
        cwd=INSTALLED,
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def test_the_library_reads_chats_whole_and_streamed(answers: dict[str, Any]) -> None:
    chats = answers["chats"]
    assert [chats[name] for name in ("whole", "streamed", "helper")] == [HELLO] * 3
    assert [chats[name] for name in ("seen", "fetched", "file")] == [RIGHT] * 3
    assert chats["usage"]["completion_tokens"] > 0


def test_the_library_joins_calls_and_runs_tools(answers: dict[str, Any]) -> None:
    tools = answers["tools"]
    assert tools["whole"] == tools["streamed"]
    for arguments in (*map(json.loads, tools["whole"]), *tools["given"]):
        jsonschema.validate(arguments, CALL)
    assert len(tools["given"]) >= 1
    assert tools["results"] == ["sunny"] * len(tools["given"])


def test_the_library_reads_a_streamed_call_of_a_named_tool(answers: dict[str, Any]) -> None:
    assert answers["namedTool"]["name"] == "weather"
    jsonschema.validate(json.loads(answers["namedTool"]["given"]), CALL)


def test_the_library_reads_calls_of_responses(answers: dict[str, Any]) -> None:
    found = answers["responses"]
    assert found["whole"] == found["given"] == found["final"]
    jsonschema.validate(json.loads(found["whole"]), CALL)
    assert found["types"][:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert found["types"][3:] == [
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_the_library_reads_transcripts_in_every_format(answers: dict[str, Any]) -> None:
    assert set(answers["transcripts"]) == set(WORDS)
    for word, found in answers["transcripts"].items():
        assert [found[name] for name in ("whole", "deltas", "done")] == [word] * 3
        assert found["text"] == f"{word}\n"
        assert found["sameUsage"]


def test_the_library_reads_the_other_endpoints(answers: dict[str, Any]) -> None:
    others = answers["others"]
    first, second = others["completions"]
    assert first.startswith("The red")
    assert second.startswith("A blue")
    assert [others[name] for name in ("response", "responseDeltas", "responseFinal")] == [HELLO] * 3
    assert others["models"] == ["weft-demo"]


def test_both_libraries_read_embeddings(answers: dict[str, Any]) -> None:
    for name in ("embeddingSizes", "vercelSizes"):
        assert len(answers[name]) == 2
        assert len(set(answers[name])) == 1
        assert answers[name][0] > 0


def test_the_library_throws_the_class_of_the_status(answers: dict[str, Any]) -> None:
    refused = {"name": "BadRequestError", "status": 400, "code": "invalid_request", "param": "temperature"}
    assert answers["errors"]["badRequest"] == refused
    assert answers["errors"]["badStream"] == refused
    assert answers["errors"]["notFound"]["name"] == "NotFoundError"
    sound = {"name": "BadRequestError", "status": 400, "code": "invalid_media", "param": "file"}
    assert answers["errors"]["badSound"] == sound
    assert answers["errors"]["unreachable"]["name"] == "UnprocessableEntityError"


@pytest.mark.parametrize("provider", ["vercelResponses", "vercelChat", "vercelCompatible"])
def test_the_vercel_sdk_reads_texts_objects_and_calls(answers: dict[str, Any], provider: str) -> None:
    found = answers[provider]
    assert (found["text"], found["streamed"]) == (HELLO, HELLO)
    assert found["usage"] > 0
    assert found["seen"] == RIGHT
    jsonschema.validate(found["object"], SEEN)
    assert len(found["given"]) >= 1
    for arguments in found["given"]:
        jsonschema.validate(arguments, CALL)
    assert found["results"] == ["sunny"] * len(found["given"])


def test_the_vercel_sdk_reads_transcripts(answers: dict[str, Any]) -> None:
    found = answers["vercelTranscript"]
    assert found["heard"] == found["word"]
