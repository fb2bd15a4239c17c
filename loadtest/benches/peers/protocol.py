"""Implements the loop of a peer process. It uses the standard library only, because it runs in other environments than
Weft's.
"""

import json
import sys
import time
from collections.abc import Callable

Prompts = list[list[int]]


def serve_rounds(generate: Callable[[Prompts, int], int]) -> None:
    """Reads lines of `{"prompts": [[id, ...], ...], "output_tokens": n}` and answers each with `{"seconds": s,
    "tokens": t}`. `generate(prompts, n)` returns the number of tokens that it made. Ends with standard input."""
    print("ready", flush=True)
    for line in sys.stdin:
        round_ = json.loads(line)
        begun = time.monotonic()
        tokens = generate(round_["prompts"], round_["output_tokens"])
        print(json.dumps({"seconds": time.monotonic() - begun, "tokens": tokens}), flush=True)
