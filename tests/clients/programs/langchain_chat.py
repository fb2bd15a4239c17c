"""Asks a server with `langchain-openai`: whole, streamed, about media, for an object, and for a call of a tool.

The only argument is a file with the questions, which `tests/clients/run_clients.py` writes.
"""

from __future__ import annotations

import json
import sys
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import openai
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field


class Weather(BaseModel):
    """Asks the weather."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    for api in (False, True):
        chat = ChatOpenAI(
            model=asked["model"],
            base_url=asked["url"],
            api_key="none",
            temperature=0,
            max_tokens=400,
            max_retries=0,
            use_responses_api=api,
        )
        assert chat.invoke("Hello").text == asked["hello"]
        assert "".join(chunk.text for chunk in chat.stream("Hello")) == asked["hello"]
        picture = {"type": "image_url", "image_url": {"url": asked["picture"]}}
        content = [picture, {"type": "text", "text": asked["question"]}]
        assert chat.invoke([{"role": "user", "content": content}]).text == asked["answer"]
        called = chat.bind_tools([Weather], tool_choice="required").invoke("How is the weather in Rome?")
        assert called.tool_calls
        for call in called.tool_calls:
            Weather.model_validate(call["args"])
        named = chat.bind_tools([Weather], tool_choice="Weather").stream("How is the weather in Rome?")
        (joined,) = reduce(add, named).tool_calls
        Weather.model_validate(joined["args"])
        assert isinstance(chat.with_structured_output(Weather).invoke("Hello"), Weather)
    assert chat_about_sound(asked) == asked["heard"]
    other_model = ChatOpenAI(model="other", base_url=asked["url"], api_key="none", max_retries=0)
    try:
        other_model.invoke("Hello")
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("langchain raised no NotFoundError for an unknown model")
    embeddings = OpenAIEmbeddings(
        model=asked["model"], base_url=asked["url"], api_key="none", check_embedding_ctx_length=False
    )
    one, other = embeddings.embed_documents(["A red circle", "A blue square"])
    assert len(one) == len(other) > 0
    assert one != other
    print("requests without an error: 17")


def chat_about_sound(asked: dict[str, Any]) -> str:
    chat = ChatOpenAI(model=asked["model"], base_url=asked["url"], api_key="none", temperature=0, max_retries=0)
    return chat.invoke(asked["loads"]["audio"]).text


if __name__ == "__main__":
    main()
