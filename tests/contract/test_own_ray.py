"""Tests how a cluster starts a Ray of its own: what would let others run code on it is off."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.config import ClusterConfig


def test_a_ray_of_its_own_has_no_dashboard_and_listens_on_the_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dashboard takes jobs, which are code, from everybody who reaches it (CVE-2023-48022)."""
    ray = pytest.importorskip("ray")
    from deploy.ray import runtime

    started: list[dict[str, object]] = []
    monkeypatch.setattr(ray, "init", lambda **options: started.append(options))
    monkeypatch.setattr(ray, "shutdown", lambda **_: None)
    with runtime._ray(ClusterConfig(), tmp_path):
        (options,) = started
    assert options["include_dashboard"] is False
    assert (options["address"], options["_node_ip_address"]) == ("local", "127.0.0.1")
