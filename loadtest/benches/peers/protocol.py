"""The loop of a peer process. Standard library only: it runs in environments that are not ours."""

import json
import sys
import time
from collections.abc import Callable

Prompts = list[list[int]]


def serve_rounds(generate: Callable[[Prompts, int], int]) -> None:
    """Reads `{"prompts": [[id, ...], ...], "output_tokens": n}` lines; `generate(prompts, n)` returns how many
    tokens came out; answers `{"seconds": s, "tokens": t}`. Ends with standard input."""
    print("ready", flush=True)
    for line in sys.stdin:
        round_ = json.loads(line)
        begun = time.monotonic()
        tokens = generate(round_["prompts"], round_["output_tokens"])
        print(json.dumps({"seconds": time.monotonic() - begun, "tokens": tokens}), flush=True)
