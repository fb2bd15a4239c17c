"""Holds FIXME."""

from router.edge.app import create_app

__all__ = [
    "create_app",
]
