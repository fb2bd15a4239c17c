"""Asks a running cluster with the `openai` package: a text, a picture, and an answer that arrives piece by piece.

Start the demo cluster with `make serve`, then run:

    .venv/bin/python examples/openai_client.py
    .venv/bin/python examples/openai_client.py http://127.0.0.1:9000   # another address

A picture is a part of a message's content. The cluster fetches nothing from the network, so the picture travels inside
the request, as a `data:` URL.
"""

import argparse
import base64
import io

from openai import OpenAI
from PIL import Image, ImageDraw


def red_circle() -> str:
    """Draws a red circle on a white ground and returns it as a `data:` URL of a PNG file."""
    picture = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(picture).ellipse((20, 20, 76, 76), fill=(215, 25, 30))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks a Weft cluster with the openai package.")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="is the URL of the cluster")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")  # The cluster asks for no key.
    model = client.models.list().data[0].id

    answer = client.chat.completions.create(
        model=model, temperature=0, messages=[{"role": "user", "content": "Which number comes after seven?"}]
    )
    print(f"text: {answer.choices[0].message.content}")

    picture = {"type": "image_url", "image_url": {"url": red_circle()}}
    question = {"type": "text", "text": "What colour is the circle?"}
    answer = client.chat.completions.create(
        model=model, temperature=0, messages=[{"role": "user", "content": [picture, question]}]
    )
    print(f"picture: {answer.choices[0].message.content}")

    manner = {"role": "system", "content": "Answer in a sentence."}
    question = {"type": "text", "text": "What do you see?"}
    stream = client.chat.completions.create(
        model=model,
        temperature=0,
        messages=[manner, {"role": "user", "content": [picture, question]}],
        stream=True,
    )
    print("stream: ", end="")
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="|", flush=True)
    print()


if __name__ == "__main__":
    main()
