"""Holds the threads in which a router reads requests: those for each kind of work are apart, so that none waits for
another. The module knows nothing of what the work is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 2
"""Each kind of work has this many threads. They share the interpreter's lock: with more threads, the event loop would
wait for more of them."""


class Work(Enum):
    """`Work` lists the kinds of reading; each kind has threads of its own."""

    BODY = "body"
    """Parses JSON."""
    LARGE_BODY = "large body"
    """Parses JSON that has media in it."""
    MEDIA = "media"
    """Decodes base64, reads the first bytes of files, and computes digests."""
    PROMPT = "prompt"
    """Renders templates, and makes tokens and block hashes."""
    MEDIA_PROMPT = "prompt with media"
    """Does the same for prompts with media, and plans these."""
    GRAMMAR = "grammar"


class RequestThreads:
    """Holds `NUM_THREADS` threads for each kind of work, so that no kind of work waits for another. It lives as long as
    its router, until `close`, and knows nothing of what the work is."""

    def __init__(self) -> None:
        self._pools = {work: ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=work.value) for work in Work}

    async def run(self, work: Work, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `function` in a thread for `work`, and returns its result."""
        assert not kwargs, "positional arguments alone reach the thread"
        return await asyncio.get_running_loop().run_in_executor(self._pools[work], function, *args)

    def close(self) -> None:
        """Closes without waiting: running work ends by itself, and waiting work is dropped."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
