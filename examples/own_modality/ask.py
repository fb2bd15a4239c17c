"""Asks a cluster that runs with `weft_drawings` about two drawings, and about something that is no drawing.

`weft_drawings.py` says how to start such a cluster. Then run:

    .venv/bin/python examples/own_modality/ask.py
    .venv/bin/python examples/own_modality/ask.py http://127.0.0.1:9000   # another address
"""

import argparse

import httpx

RED_CIRCLE = {"width": 96, "height": 96, "shapes": [["circle", 48, 48, 28, "red"]]}
BLUE_SQUARE = {"width": 96, "height": 96, "shapes": [["square", 48, 48, 24, "blue"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks about drawings.")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="is the URL of the cluster")
    client = httpx.Client(base_url=parser.parse_args().url, timeout=120)
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def ask(drawing: object, question: str) -> httpx.Response:
        content = [{"type": "drawing", "drawing": drawing}, {"type": "text", "text": question}]
        body = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": content}]}
        return client.post("/v1/chat/completions", json=body)

    for drawing in (RED_CIRCLE, BLUE_SQUARE):
        for question in ("What colour is the shape?", "What shape is it?"):
            answer = ask(drawing, question).raise_for_status().json()
            print(f"{question} {answer['choices'][0]['message']['content']}")
    tokens = answer["usage"]["prompt_tokens_details"]["drawing_tokens"]
    print(f"tokens of a drawing: {tokens}")

    refused = ask({"width": 96}, "What is it?")
    print(f"refused with {refused.status_code}: {refused.json()['error']['message']}")


if __name__ == "__main__":
    main()
