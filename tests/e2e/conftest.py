"""Starts one Ray cluster for all tests that need only the laptop's defaults, and orders the modules.

`make e2e` runs the tests of this folder in two processes. Each takes the next module when it has nearly finished one,
so the modules that take longest come first. All modules that use the shared cluster run in one process, one after the
other, so that the cluster starts once. Modules that drive clients share another one.
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
import ray
from client_questions import pages
from cluster_process import ClusterProcess, start_cluster
from media_web import MediaWeb, media_web
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

LONGEST = (
    "test_two_hosts.py",
    "test_stopping.py",
    "test_autoscaling.py",
    "test_joined_ray.py",
    "test_lost_node.py",
    "test_logs.py",
    "test_two_routers.py",
    "test_pinning.py",
    "test_console.py",
)
SHARING = (
    "test_load_test.py",
    "test_docs_commands.py",
    "test_cluster_answers.py",
    "test_front_end.py",
    "test_examples.py",
    "test_terminal_commands.py",
)
CLIENTS = ("test_openai_python.py", "test_openai_media.py", "test_openai_javascript.py")
"""These modules share a cluster in one process, because their subject is the HTTP API."""


@pytest.fixture(scope="module", autouse=True)
def no_ray_is_left() -> Iterator[None]:
    """Checks that no module leaves this process connected to a Ray. Many of Ray's functions start one unasked."""
    yield
    assert not ray.is_initialized(), "this process is connected to a Ray"


@pytest.fixture(scope="session")
def cluster() -> Iterator[ClusterProcess]:
    with start_cluster() as running:
        yield running


@pytest.fixture(scope="session")
def web() -> Iterator[MediaWeb]:
    """Serves the pictures, videos and sounds that clients name by URL."""
    with media_web(pages()) as running:
        yield running


@pytest.fixture(scope="session")
def served(web: MediaWeb) -> Iterator[ClusterProcess]:
    media = {"fetch": web.fetch_settings()}
    with start_cluster(in_process=True, model={"embeddings": "mean"}, media=media) as running:
        yield running


@pytest.fixture(scope="session")
def has_embeddings() -> bool:
    """Says that `served` serves embeddings, which a cluster whose workers run vLLM does not."""
    return True


@pytest.fixture(scope="session")
def client(served: ClusterProcess) -> Iterator[openai.OpenAI]:
    """Yields OpenAI's own client, which does not try again."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the modules. The tests of a module keep their order."""
    order = {name: place for place, name in enumerate(LONGEST + SHARING + CLIENTS)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


class ClusterScheduling(LoadScopeScheduling):
    """Gives each module to one process, and modules that share a cluster to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        if module.endswith(CLIENTS):
            return "cluster of clients"
        return "shared cluster" if module.endswith(SHARING) else module


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ClusterScheduling:
    return ClusterScheduling(config, log)
