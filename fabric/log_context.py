"""Which member a line of the log comes from, and which request it is about: known to the code that runs, not passed on.

Both follow tasks and `asyncio.to_thread`. A thread of its own knows its process's member alone, and names the request
itself (`extra={"request_id": ...}`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
_MEMBER_ID: ContextVar[str] = ContextVar("member_id", default="")


def request_id() -> str:
    """Of the request that the running code works for; empty if for none."""
    return _REQUEST_ID.get()


def member_id() -> str:
    """Of the member that the running code belongs to; empty where its process has but one."""
    return _MEMBER_ID.get()


def enter_request(name: str) -> None:
    """For the rest of the running task, and for the tasks that it starts."""
    _REQUEST_ID.set(name)


@contextlib.contextmanager
def as_member(name: str) -> Iterator[None]:
    """For the block, and for the tasks that are started in it."""
    token = _MEMBER_ID.set(name)
    try:
        yield
    finally:
        _MEMBER_ID.reset(token)
