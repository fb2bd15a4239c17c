"""Runs `weft bench http`, which measures what the HTTP front end of a router costs.

`http_bench` has the parts and the bars, `simulated_router` runs the router in a process of its own, over members that
answer without computing, `cpu_sampler` says where its process spends its time, `stream_clients` sends requests from
another process, and `blank_collector` takes the spans of requests. The folder knows nothing of how a request is parsed,
planned or answered.
"""

from __future__ import annotations

from loadtest.benches.front_end.http_bench import run

__all__ = ["run"]
