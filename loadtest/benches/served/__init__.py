"""Benches of a whole cluster, as its clients see it: `weft bench overlap`, `prediction` and `isolation`.

Each module with the name of a bench runs it. `timed_cluster` serves a cluster whose stages take given times and
measures what they cost alone, `timed_chats` sends requests and says how long they took, and `ideal_times` computes how
fast they could have been. The folder knows nothing of how a request is planned, encoded or computed.
"""

from __future__ import annotations

from loadtest.benches.served.isolation_bench import run as run_isolation
from loadtest.benches.served.overlap_bench import run as run_overlap
from loadtest.benches.served.prediction_bench import run as run_prediction

__all__ = ["run_isolation", "run_overlap", "run_prediction"]
