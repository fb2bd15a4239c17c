"""`transformers serve` over HTTP, all requests of a round at once. Prompts are text made of the demo vocabulary's
words, as many tokens as asked for; the served model has the tokenizer beside it."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from protocol import Prompts, serve_rounds


def main(model_dir: str, dtype: str, port: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    command = [str(Path(sys.executable).parent / "transformers"), "serve", "--port", port, "--dtype", dtype]
    server = subprocess.Popen([*command, "--force-model", model_dir], stdout=sys.stderr, stderr=sys.stderr)
    try:
        _wait(port)

        def one(ids: list[int], output_tokens: int) -> int:
            body = {
                "model": model_dir,
                "messages": [{"role": "user", "content": tokenizer.decode(ids)}],
                "max_tokens": output_tokens,
                "stream": False,
                "generation_config": json.dumps({"min_new_tokens": output_tokens, "do_sample": False}),
            }
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            answer = json.load(urllib.request.urlopen(request, timeout=1800))
            return int(answer["usage"]["completion_tokens"])

        def generate(prompts: Prompts, output_tokens: int) -> int:
            with ThreadPoolExecutor(len(prompts)) as pool:
                return sum(pool.map(lambda ids: one(ids, output_tokens), prompts))

        serve_rounds(generate)
    finally:
        server.terminate()
        server.wait()


def _wait(port: str) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit("transformers serve did not start")


if __name__ == "__main__":
    main(*sys.argv[1:4])
