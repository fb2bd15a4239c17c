"""Is what locust runs to put load on a cluster.

For example, with two processes and requests that arrive at random, ten per second in all:

    locust -f loadtest/locustfile.py --headless --host http://127.0.0.1:8000 --processes 2 --users 2 \
        --scenario mixed --rate 10 --run-time 60s --load-report build/load

`docs/load-tests.md` has more examples. Locust takes every user of this module; there is one.
"""

from __future__ import annotations

from loadtest.load.locust_chats import ChatUser, listen

__all__ = ["ChatUser"]

listen()
