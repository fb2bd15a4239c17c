"""The demo model's chat template writes tools in Hermes' form, and a conversation without them as it always did."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from deploy.demo.tokenizer import CHAT_TEMPLATE_FILE
from fabric.contracts import InvalidRequest
from modalities.answers import find_reasoning_format, find_tool_format, template_takes_tools
from modalities.text import ChatTemplate

SOURCE = CHAT_TEMPLATE_FILE.read_text(encoding="utf-8")
TEMPLATE = ChatTemplate(SOURCE, {}, datetime.now)
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": {"type": "object"}}}
SYSTEM = {"role": "developer", "content": "Be brief."}
USER = {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "What is it?"}]}
ANSWER = {"role": "assistant", "content": "A ring."}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}},
        {"id": "b", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}},
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "a", "content": "18"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "17"}]},
]
TOOLS_TEXT = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"type": "function", "function": {"name": "get_weather", "description": "", "parameters": {"type": "object"}}}\n'
    "</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
USER_TEXT = f"<|im_start|>user\n{PICTURE}What is it?<|im_end|>\n"


def test_the_checkpoint_has_the_same_template() -> None:
    assert (CHAT_TEMPLATE_FILE.parent / "checkpoint" / "chat_template.jinja").read_text(encoding="utf-8") == SOURCE


@pytest.mark.parametrize("variables", [{}, {"tools": []}, {"tools": None}])
def test_without_tools_a_conversation_is_written_as_before(variables: dict[str, Any]) -> None:
    messages = [SYSTEM, USER, ANSWER, {"role": "user", "content": [{"type": "video"}, {"type": "input_audio"}]}]
    assert TEMPLATE.render(messages, True, variables) == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n{USER_TEXT}<|im_start|>assistant\nA ring.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>"
        "<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert TEMPLATE.render([ANSWER], False, variables) == "<|im_start|>assistant\nA ring.<|im_end|>\n"
    with pytest.raises(InvalidRequest, match="unknown role: judge"):
        TEMPLATE.render([{"role": "judge", "content": ""}], False, variables)


def test_tools_stand_in_the_system_turn() -> None:
    end = f"<|im_end|>\n{USER_TEXT}<|im_start|>assistant\n"
    assert TEMPLATE.render([USER], True, {"tools": [TOOL]}) == f"<|im_start|>system\n{TOOLS_TEXT}{end}"
    with_system = TEMPLATE.render([SYSTEM, USER], True, {"tools": [TOOL]})
    assert with_system == f"<|im_start|>system\nBe brief.\n\n{TOOLS_TEXT}{end}"


def test_calls_and_their_results_are_written_in_hermes_form() -> None:
    written = TEMPLATE.render([USER, CALLS, *RESULTS], True, {})
    assert written == (
        USER_TEXT + '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n18\n</tool_response>\n<tool_response>\n17\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "A ring.\n<tool_call>" in TEMPLATE.render([{**CALLS, "content": "A ring."}], True, {})


def test_the_formats_are_found_in_the_template() -> None:
    assert template_takes_tools(SOURCE)
    assert find_tool_format("auto", SOURCE).name == "hermes"
    assert find_reasoning_format(SOURCE) is None
