"""Asks a server with LlamaIndex's client for servers that are like OpenAI's: whole, streamed, about a picture, and for
a call of a tool.

The only argument is a file with the questions, which `tests/clients/run_clients.py` writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import openai
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field


class Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


def weather(city: str, days: int) -> str:
    """Asks the weather."""
    return f"sunny in {city} for {days} days"


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    llm = OpenAILike(
        model=asked["model"],
        api_base=asked["url"],
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        max_tokens=400,
        max_retries=0,
        temperature=0,
    )
    hello = [ChatMessage(role="user", content="Hello")]
    assert llm.chat(hello).message.content == asked["hello"]
    assert "".join(part.delta or "" for part in llm.stream_chat(hello)) == asked["hello"]
    blocks = [ImageBlock(url=asked["picture"]), TextBlock(text=asked["question"])]
    assert llm.chat([ChatMessage(role="user", blocks=blocks)]).message.content == asked["answer"]
    tool = FunctionTool.from_defaults(weather, fn_schema=Asked)
    called = llm.chat_with_tools([tool], user_msg="How is the weather in Rome?", tool_required=True)
    calls = llm.get_tool_calls_from_response(called)
    assert calls
    for call in calls:
        assert "sunny" in tool(**call.tool_kwargs).content
    try:
        OpenAILike(model="other", api_base=asked["url"], api_key="none", is_chat_model=True, max_retries=0).chat(hello)
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("LlamaIndex raised no NotFoundError for an unknown model")
    *_, last = llm.stream_chat_with_tools([tool], user_msg="How is the weather in Rome?", tool_required=True)
    (streamed,) = llm.get_tool_calls_from_response(last)
    assert "sunny" in tool(**streamed.tool_kwargs).content
    print("requests without an error: 6")


if __name__ == "__main__":
    main()
