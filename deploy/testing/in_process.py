"""Runs a real cluster inside the process of a test, with a plugin that need not be installed.

The services, the planner and the messages are those of a cluster on Ray (`deploy/local.py`). The model can be the demo
checkpoint under another architecture's name, so that a family has weights to load. This module imports torch only
while a cluster starts or a plugin is registered.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from deploy.config import ClusterConfig
from deploy.demo.build import demo_checkpoint
from modalities.registry import REGISTRY, Registry

if TYPE_CHECKING:
    from deploy.local import LocalCluster

_SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "workers": {"replicas": 1, "num_blocks": 256},
    "encoders": {"replicas": 1, "decode_processes": 0},
    "media": {"probe_processes": 0, "fetch": {"enabled": False}},
}
_PICTURES = "('image', 'image_url')"


def small_config(**sections: Mapping[str, Any]) -> ClusterConfig:
    """Returns the config of a cluster with one worker and one encoder and without helper processes: they would not know
    what a test has registered. `sections` add to this, and replace keys of it."""
    names = {*_SECTIONS, *sections}
    return ClusterConfig.model_validate({name: {**_SECTIONS.get(name, {}), **sections.get(name, {})} for name in names})


@asynccontextmanager
async def in_process_cluster(
    config: ClusterConfig, timeout_s: float = 120.0
) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    """Yields a started cluster, and a client of its HTTP API that needs no socket. `timeout_s` limits each request of
    the client."""
    from deploy.local import running

    async with running(config) as cluster:
        transport = httpx.ASGITransport(cluster.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=timeout_s) as client:
            yield cluster, client


@contextmanager
def registered(register: Callable[[Registry], None]) -> Iterator[None]:
    """Calls `register` as the entry point of an installed package would be called, and forgets at the end what it has
    registered: modalities, families and samples for the calibration."""
    from encoder_pool.calibration import MODALITY_TO_SAMPLES

    before = dict(MODALITY_TO_SAMPLES)
    with REGISTRY.restored():
        try:
            register(REGISTRY)
            yield
        finally:
            MODALITY_TO_SAMPLES.clear()
            MODALITY_TO_SAMPLES.update(before)


def write_demo_variant(model_dir: Path, architecture: str, *modalities: str) -> Path:
    """Writes a model directory that links to the demo's files, with two changes, and returns it. `config.json` names
    `architecture`, and the chat template writes a picture's placeholder for each item of `modalities` too.

    `model_dir` is made if it is absent. Raises FileExistsError if it already contains a model.
    """
    model_dir.mkdir(parents=True, exist_ok=True)
    changed = {"config.json", "chat_template.jinja"}
    for file in demo_checkpoint().iterdir():
        if file.name not in changed:
            (model_dir / file.name).symlink_to(file)
    config = json.loads((demo_checkpoint() / "config.json").read_text()) | {"architectures": [architecture]}
    (model_dir / "config.json").write_text(json.dumps(config))
    template = (demo_checkpoint() / "chat_template.jinja").read_text()
    assert _PICTURES in template
    kinds = ", ".join(repr(name) for name in ("image", "image_url", *modalities))
    (model_dir / "chat_template.jinja").write_text(template.replace(_PICTURES, f"({kinds})"))
    return model_dir
