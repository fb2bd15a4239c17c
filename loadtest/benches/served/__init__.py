"""Runs the benches of a whole cluster, as its clients see it.

`overlap_bench` measures how much sooner the first token comes because encoding and prefill overlap, `prediction_bench`
how well the router predicts it, `isolation_bench` by how much requests with media delay texts, and `serve_bench` how
many requests of mixed kinds it answers, and when. `vllm_bench` does the first, and counts tokens per second, on a
worker with vLLM. `speech_bench` measures spoken answers with and without chunks, on clusters of `spoken_clusters`,
whose answers `spoken_chats` reads; `given_code2wav` is a stage that takes a given time. `timed_cluster` serves a
cluster whose stages take given times and measures what they cost alone, `timed_chats` sends requests and says how long
they took, and `ideal_times` computes how fast they could have been. The folder knows nothing of how a request is
planned, encoded or computed.
"""

from __future__ import annotations

from loadtest.benches.served.isolation_bench import run as run_isolation
from loadtest.benches.served.overlap_bench import run as run_overlap
from loadtest.benches.served.prediction_bench import run as run_prediction
from loadtest.benches.served.serve_bench import run as run_serve
from loadtest.benches.served.speech_bench import run as run_speech

__all__ = ["run_isolation", "run_overlap", "run_prediction", "run_serve", "run_speech"]
