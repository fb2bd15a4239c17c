"""Composes a router from a config, over no members."""

from __future__ import annotations

from pathlib import Path

from deploy.compose import build_router, load_model
from deploy.config import ClusterConfig
from deploy.testing import FakePools
from fabric.contracts import MemberId
from fabric.transport import LocalPlane
from router.run import Pools
from router.service import RouterService


def composed_router(config: ClusterConfig, model_dir: Path, plane: LocalPlane) -> RouterService:
    pools = Pools(FakePools(), FakePools())
    return build_router(config, load_model(config, model_dir), MemberId("router-0"), plane, pools)
