"""Asks a running cluster for an answer in JSON that follows a schema, and checks it with pydantic.

Start the demo cluster with `make serve`, then run:

    .venv/bin/python examples/structured_output.py
    .venv/bin/python examples/structured_output.py http://127.0.0.1:9000   # another address

The worker masks every token that would leave the schema, so an answer that ends with the reason `stop` always follows
it, whatever the model is. What the answer says is up to the model: the demo model has never seen JSON. Besides schemas,
the cluster takes regular expressions and lists of choices, in the form of vLLM's `structured_outputs`.
"""

import argparse
import base64
import io
import json
from typing import Literal

from openai import OpenAI
from PIL import Image, ImageDraw
from pydantic import BaseModel, ConfigDict


class Seen(BaseModel):
    """Describes what a picture shows."""

    model_config = ConfigDict(extra="forbid")

    shape: Literal["circle", "square", "triangle", "star"]
    colour: Literal["red", "green", "blue", "yellow"]


def blue_square() -> str:
    """Draws a blue square on a white ground and returns it as a `data:` URL of a PNG file."""
    picture = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(picture).rectangle((24, 24, 72, 72), fill=(35, 65, 215))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks a Weft cluster for answers of a given form.")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="is the URL of the cluster")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    picture = {"type": "image_url", "image_url": {"url": blue_square()}}

    answer = client.chat.completions.create(
        model=model,
        temperature=0,
        max_tokens=100,
        messages=[{"role": "user", "content": [picture, {"type": "text", "text": "What do you see?"}]}],
        response_format={"type": "json_schema", "json_schema": {"name": "seen", "schema": Seen.model_json_schema()}},
    )
    text = answer.choices[0].message.content or ""
    print(f"answer: {json.dumps(text)}")
    print(f"checked: {Seen.model_validate_json(text)!r}")

    answer = client.chat.completions.create(
        model=model,
        temperature=0,
        messages=[{"role": "user", "content": [picture, {"type": "text", "text": "What shape is it?"}]}],
        extra_body={"structured_outputs": {"choice": ["circle", "square", "triangle"]}},
    )
    print(f"choice: {answer.choices[0].message.content}")


if __name__ == "__main__":
    main()
