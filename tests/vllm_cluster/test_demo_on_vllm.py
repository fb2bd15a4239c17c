"""Serves the demo model by a real cluster whose worker runs vLLM. Its answers to questions about texts, pictures,
videos and sounds are right, and OpenAI's clients find what they find with Weft's own engine: the tests of `tests/e2e`
that drive them run here as they are, except for embeddings, which these workers do not give."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from adopted_tests import adopted
from client_questions import pages
from cluster_process import ClusterProcess, start_cluster
from media_web import MediaWeb, media_web

from deploy.demo.ask import run_demo

PYTHON = Path(f"{sys.prefix}-vllm") / "bin" / "python"
pytestmark = [
    pytest.mark.ray,
    pytest.mark.torch,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make install-vllm` was not run"),
]


@pytest.fixture(scope="module")
def web() -> Iterator[MediaWeb]:
    """Serves the pictures, videos and sounds that clients name by URL."""
    with media_web(pages()) as running:
        yield running


@pytest.fixture(scope="module")
def served(web: MediaWeb) -> Iterator[ClusterProcess]:
    workers = {"engine": "vllm", "block_size": 32, "vllm": {"enforce_eager": True, "max_model_len": 4096}}
    media = {"fetch": web.fetch_settings()}
    with start_cluster(workers=workers, encoders={"replicas": 1}, media=media) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: ClusterProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def has_embeddings() -> bool:
    return False


globals().update(adopted("test_openai_python", {"test_embeddings_are_the_same_in_both_encodings"}))
globals().update(adopted("test_openai_media"))
globals().update(adopted("test_openai_javascript", {"test_both_libraries_read_embeddings"}))


@pytest.mark.parametrize("seed", [0, 1])
def test_answers_of_the_demo_are_right(served: ClusterProcess, seed: int) -> None:
    """Two of the ten questions are about a video and a sound."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = run_demo(served.url, seed)
    assert status == 0, printed.getvalue()
    assert "does not take" not in printed.getvalue()


def test_the_user_hears_that_the_cluster_does_not_speak(served: ClusterProcess, client: openai.OpenAI) -> None:
    assert "the model can speak, but workers with vLLM answer in text alone" in served.log.read_text()
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.speech.create(model="weft-demo", voice="ethan", input="Hello")
    assert "no speech" in refused.value.message


def test_embeddings_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="serves no embeddings"):
        client.embeddings.create(model="weft-demo", input="A red circle")
