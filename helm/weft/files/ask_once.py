"""Asks a cluster whether it is ready, and then for one answer. It is the program of `helm test`."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

URL, KEY = os.environ["WEFT_URL"], os.environ.get("WEFT_API_KEY", "").strip()
# Within the cluster the certificate is for the name that clients use outside, so it is not checked.
CONTEXT = ssl._create_unverified_context()


def ask(path: str, body: object = None) -> dict:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {KEY}"} if KEY else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, headers)
    with urllib.request.urlopen(request, timeout=120, context=CONTEXT) as answer:
        return json.load(answer)


def wait_ready(limit_s: float = float(os.environ.get("WEFT_WAIT_S", "60"))) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            print("ready:", ask("/health/ready"))
            return
        except urllib.error.HTTPError as error:
            said = error.read().decode()
        except OSError as error:
            said = str(error)
        if time.monotonic() > deadline:
            sys.exit(f"the cluster at {URL} is not ready: {said}")
        time.sleep(1)


wait_ready()
try:
    model = ask("/v1/models")["data"][0]["id"]
    message = {"role": "user", "content": "Hello!"}
    answer = ask("/v1/chat/completions", {"model": model, "messages": [message], "max_tokens": 16})
except urllib.error.HTTPError as error:
    hint = "; name a secret with a key in tests.apiKeySecret" if error.code == 401 else ""
    sys.exit(f"the cluster answers {error.code}: {error.read().decode()}{hint}")
text = answer["choices"][0]["message"]["content"]
if not text:
    sys.exit(f"the answer is empty: {answer}")
print(f"{model} answers: {text}")
