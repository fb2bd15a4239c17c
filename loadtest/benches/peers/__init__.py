"""Drives the alternatives to Weft that a user might choose. Each runs as a process of its own, reads rounds from
standard input, and answers with the seconds that a round took. A process may run under another Python than Weft's
(`--vllm-python`).
"""
