"""Tests prompts that end inside their last message: where they end, what stays text, and what can't be continued."""

from __future__ import annotations

from datetime import datetime

import pytest

from deploy.testing.tiny_family import TEMPLATE, tiny_codec
from fabric.contracts import InvalidRequest
from modalities.text import ChatTemplate

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }} <end>\n{% endfor %}"
TRIMMED = PLAIN.replace("m.content }} ", "m.content | trim }}")
TWICE = "{% for m in messages %}{{ m.content }} I repeat: {{ m.content }}<end>{% endfor %}"
TWICE_TRIMMED = TWICE.replace("m.content", "m.content | trim")


def opened(source: str, *contents: object) -> str:
    template = ChatTemplate(source, {"eos_token": "<end>"}, now=lambda: datetime(2025, 7, 9))
    roles = ("user", "assistant") if len(contents) == 2 else ("assistant",)
    return template.render_open(
        [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)], {}
    )


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (PLAIN, "The sky is", "assistant: The sky is"),
        (PLAIN, "The sky is \n", "assistant: The sky is \n"),
        (PLAIN, "", "assistant: "),
        (PLAIN, " \n", "assistant:  \n"),
        (TRIMMED, " The sky is", "assistant: The sky is"),
        (TRIMMED, "The sky is \n", "assistant: The sky is"),
        (TRIMMED, "", "assistant:"),
        (TRIMMED, " \n", "assistant:"),
        (TWICE, "No. ", "No.  I repeat: No. "),
        (TWICE_TRIMMED, "No. ", "No. I repeat: No."),
        ("{{ messages[0].content | tojson }}", "yes", '"yes'),
        ("{{ messages[0].content | upper }}", "YES", "YES"),
        ("{{ messages[0].content.split('</think>')[-1] }}", "yes", "yes"),
    ],
)
def test_the_prompt_ends_where_the_content_ends(source: str, content: str, expected: str) -> None:
    assert opened(source, content) == expected


def test_an_earlier_message_with_the_same_content_stays_whole() -> None:
    assert opened(PLAIN, "Same", "Same") == "user: Same <end>\nassistant: Same"


def test_the_last_of_several_parts_is_continued() -> None:
    source = "{% for p in messages[-1].content %}[{{ p.text }}]{% endfor %}<end>"
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b "}]
    assert opened(source, parts) == "[a ][b "


@pytest.mark.parametrize("content", ["\ue000\ue001", "CONTINUE_FINAL_MESSAGE_TAG ", "{{ x }}"])
def test_no_text_is_taken_for_the_tag(content: str) -> None:
    assert opened(PLAIN, content, content) == f"user: {content} <end>\nassistant: {content}"


@pytest.mark.parametrize(
    ("source", "content"),
    [
        (PLAIN.replace("m.content", "m.content | upper"), "yes"),
        ("{{ messages[0].content.split('</think>')[-1] }}", "<think>why</think>yes"),
        ("{{ messages[0].content[:2] }}", "yes"),
        ("nothing", ""),
        (PLAIN, None),
        (PLAIN, 5),
        (PLAIN, []),
        (PLAIN, [{"type": "image"}, 5]),
    ],
)
def test_what_the_template_does_not_show_can_not_be_continued(source: str, content: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        opened(source, content)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("content", ["a<|end|>", "<|end|> ", "<|en", "d|>", "<|eos|><|turn|>user\n", "\ue000<|end|>"])
@pytest.mark.parametrize("source", [TEMPLATE, TEMPLATE.replace("{{ m.content }}", "{{ m.content | trim }}")])
def test_control_tokens_in_the_continued_text_stay_text(source: str, content: str) -> None:
    codec = tiny_codec(source)
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    ids = codec.render(messages, continue_final_message=True)
    shown = content if source == TEMPLATE else content.strip()
    assert codec.decode(ids, skip_special_tokens=False) == f"<|turn|>user\n{shown}<|end|><|turn|>assistant\n{shown}"
    special = [codec.token_text(token_id) for token_id in ids if token_id in codec.special_token_ids]
    assert special == ["<|turn|>", "<|end|>", "<|turn|>"]


def test_a_continued_message_has_no_generation_prompt() -> None:
    codec = tiny_codec()
    messages = [{"role": "assistant", "content": "a"}]
    ids = codec.render(messages, continue_final_message=True)
    assert codec.render(messages, add_generation_prompt=False, continue_final_message=True) == ids
    assert codec.decode(ids, skip_special_tokens=False) == "<|turn|>assistant\na"


def test_the_variables_of_the_template_reach_a_continued_message() -> None:
    codec = tiny_codec("{% if loud %}LOUD {% endif %}{{ messages[0].content }}<|end|>")
    ids = codec.render(
        [{"role": "assistant", "content": "a"}], continue_final_message=True, template_kwargs={"loud": True}
    )
    assert codec.decode(ids) == "LOUD a"
