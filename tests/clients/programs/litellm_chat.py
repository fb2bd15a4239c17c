"""Asks a server with `litellm`: whole, streamed, about a picture, for a call of a tool, for embeddings,
and for a transcript.

The only argument is a file with the questions, which `tests/clients/run_clients.py` writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import litellm

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": PARAMETERS}}


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    server = {"model": f"openai/{asked['model']}", "api_base": asked["url"], "api_key": "none", "num_retries": 0}
    hello = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    assert litellm.completion(**server, **hello).choices[0].message.content == asked["hello"]
    chunks = litellm.completion(**server, **hello, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == asked["hello"]
    picture = {"type": "image_url", "image_url": {"url": asked["picture"]}}
    content = [picture, {"type": "text", "text": asked["question"]}]
    seen = litellm.completion(**server, messages=[{"role": "user", "content": content}], temperature=0)
    assert seen.choices[0].message.content == asked["answer"]
    called = litellm.completion(**server, **hello, tools=[WEATHER], tool_choice="required", max_tokens=400)
    calls = called.choices[0].message.tool_calls
    assert calls
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert len(arguments["city"]) <= 12
        assert 1 <= arguments["days"] <= 9
    named = {"type": "function", "function": {"name": "weather"}}
    chunks = list(
        litellm.completion(**server, **hello, tools=[WEATHER], tool_choice=named, max_tokens=400, stream=True)
    )
    (joined,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert json.loads(joined.function.arguments).keys() == {"city", "days"}
    with Path(asked["spoken"]).open("rb") as sound:
        assert litellm.transcription(**server, file=sound).text == asked["word"]
    assert litellm.responses(**server, input="Hello", temperature=0).output[0].content[0].text == asked["hello"]
    found = litellm.embedding(**server, input=["A red circle", "A blue square"], encoding_format="float")
    assert len(found.data) == 2
    try:
        litellm.completion(**(server | {"model": "openai/other"}), **hello)
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("litellm raised no NotFoundError for an unknown model")
    print("requests without an error: 9")


if __name__ == "__main__":
    main()
