"""Drives the alternatives to Weft that a user might choose. Each runs as a process of its own, reads rounds from
standard input, and answers with the seconds that a round took; `protocol` is this loop. A process may run under another
Python than Weft's (`--vllm-python`).

`vllm_engine` runs vLLM's engine, `vllm_host` measures the host's share of its decode step, and `transformers_static`
runs one batch of transformers' `generate`. The folder knows nothing of Weft's engine.
"""
