"""Keeps, for the lines of the log, the member from which a line comes and the request that it is about. The
running code can read both without passing them on as arguments.

Both follow tasks and `asyncio.to_thread`. A separate thread knows only the member of its process, and must name the
request itself (`extra={"request_id": ...}`). This module knows nothing of how lines are written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
_MEMBER_ID: ContextVar[str] = ContextVar("member_id", default="")


def request_id() -> str:
    """Returns the id of the request for which the running code works, or an empty string if there is none."""
    return _REQUEST_ID.get()


def member_id() -> str:
    """Returns the id of the member to which the running code belongs. It is empty where the process has only one
    member."""
    return _MEMBER_ID.get()


def enter_request(name: str) -> None:
    """Sets the request for the rest of the running task, and for the tasks that it starts."""
    _REQUEST_ID.set(name)


@contextlib.contextmanager
def as_member(name: str) -> Iterator[None]:
    """Sets the member for the block, and for the tasks that are started in it."""
    token = _MEMBER_ID.set(name)
    try:
        yield
    finally:
        _MEMBER_ID.reset(token)
