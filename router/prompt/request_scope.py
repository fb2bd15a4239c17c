"""Reads from a request whose caches it may share, and what it wants to happen if a medium can't be encoded. The module
knows nothing of tenants but their salt."""

from __future__ import annotations

from typing import TypeVar

from router.api import ChatRequest, GenerationFields
from router.router_config import Policy

R = TypeVar("R", bound=GenerationFields)


def wanted_policy(request: GenerationFields) -> Policy | None:
    """Returns what a request wants to happen if a medium can't be encoded, or None if it does not say."""
    return request.on_encode_failure if isinstance(request, ChatRequest) else None


def salted(request: R, salt: str) -> R:
    """Returns the request with its tenant's salt before its own, so that no tenant shares the caches of another. The
    length of the tenant's salt comes first, so that no salt that a client chooses reaches the caches of another."""
    own = request.cache_salt or ""
    return request.model_copy(update={"cache_salt": f"{len(salt)}:{salt}/{own}"}) if salt or own else request
