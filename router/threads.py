"""The threads in which a router reads requests: a few for each kind of work, so that no kind of work waits for another.

The event loop's own executor is used for nothing that a client sends: a few large media would fill it, and with it the
reading of every other request. What may take long for one file (a parser's work on it) belongs into a helper process
(`modalities.probing`), not here. Knows nothing of what the work is.
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
"""Of each kind. They share the interpreter's lock: with more of them, the event loop would wait for more of them."""


class Work(Enum):
    """What is read; each has threads of its own."""

    BODY = "body"
    """JSON."""
    MEDIA = "media"
    """Base64, the first bytes of files, digests."""
    PROMPT = "prompt"
    """Templates, tokens, plans, block hashes."""
    GRAMMAR = "grammar"


class RequestThreads:
    """Lives as long as its router, until `close`."""

    def __init__(self) -> None:
        self._pools = {work: ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=work.value) for work in Work}

    async def run(self, work: Work, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `function`, which is run in a thread for `work`."""
        assert not kwargs, "positional arguments alone reach the thread"
        return await asyncio.get_running_loop().run_in_executor(self._pools[work], function, *args)

    def close(self) -> None:
        """Waits for nothing: what is being read ends by itself, and what waits is dropped."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
