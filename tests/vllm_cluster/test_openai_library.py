"""Drives a cluster whose worker runs vLLM with OpenAI's Python library: the tests of `tests/e2e/test_openai_python.py`
that need no right answers, with a model of random weights in the place of the demo model."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import openai
import pytest
from cluster_process import ClusterProcess, start_cluster
from contract_model import contract_model

PYTHON = Path(f"{sys.prefix}-vllm") / "bin" / "python"
pytestmark = [
    pytest.mark.ray,
    pytest.mark.torch,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make install-vllm` was not run"),
]


@pytest.fixture(scope="module")
def served() -> Iterator[ClusterProcess]:
    workers = {"engine": "vllm", "block_size": 32, "vllm": {"enforce_eager": True, "max_model_len": 2048}}
    model = {"path": str(contract_model("qwen2_5_vl").directory), "name": "weft-demo", "dtype": "float32"}
    with start_cluster(model=model, workers=workers, encoders={"replicas": 1}) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: ClusterProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def library_tests() -> ModuleType:
    """Returns the module of the tests, which pytest does not see as a package."""
    path = Path(__file__).parents[1] / "e2e" / "test_openai_python.py"
    spec = importlib.util.spec_from_file_location("openai_library_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic looks the names of its classes up there.
    spec.loader.exec_module(module)
    return module


TESTS = library_tests()
test_parse = TESTS.test_parse_returns_an_object_of_the_callers_class
test_demanded_calls = TESTS.test_demanded_calls_fit_their_schemas
test_named_tool = TESTS.test_a_named_tool_is_the_one_that_is_called
test_words_or_calls = TESTS.test_the_model_may_choose_to_answer_in_words
test_no_tool = TESTS.test_no_tool_is_called_where_none_may_be
test_streamed_calls = TESTS.test_the_library_joins_streamed_calls
test_parsed_response = TESTS.test_a_response_is_parsed_into_the_callers_class
test_choices = TESTS.test_choices_and_log_probabilities
test_errors = TESTS.test_the_class_of_the_status_is_raised_whole_and_streamed
