from datetime import datetime

import pytest

from fabric.contracts import ConfigError, InvalidRequest
from modalities.text.codec import ChatTemplate


def render(source: str, **variables: object) -> str:
    template = ChatTemplate(source, {"eos_token": "</s>"}, now=lambda: datetime(2025, 7, 9))
    return template.render([{"role": "user", "content": "hi", "reasoning": "why", "name": None}], True, variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}{{ eos_token }}", "hi</s>"),
        ("{{ ['<é>', {'b': 1, 'a': None}] | tojson }}", '["<é>", {"b": 1, "a": null}]'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ strftime_now('%d %B %Y') }}", "09 July 2025"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{% set ns = namespace(n=1) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "4"),
        ("{{ dict(a=1).a }}{{ dict.fromkeys(['k'], 2).k }}", "12"),
        ("{{ messages[0].thinking }}{{ messages[0].reasoning_content }}", "whywhy"),
        ("{{ 'name' in messages[0] }}{{ tools is none }}{{ documents is none }}", "FalseTrueTrue"),
        ("{{ missing }}|{{ missing is defined }}", "|False"),
    ],
)
def test_renders_as_transformers_would(source: str, expected: str) -> None:
    assert render(source) == expected


def test_variables_of_the_request_reach_the_template() -> None:
    assert render("{{ 'on' if enable_thinking else 'off' }}", enable_thinking=True) == "on"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "chat_template", "eos_token"])
def test_a_request_can_not_set_what_is_ours(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        render("x", **{name: "mine"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only users') }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ missing.field.deeper }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_what_the_template_refuses_or_breaks_on_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_the_reason_that_a_template_gives_reaches_the_client() -> None:
    with pytest.raises(InvalidRequest, match="only users"):
        render("{{ raise_exception('only users') }}")


def test_a_source_that_is_no_template_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="can't be compiled"):
        render("{% if %}")


def test_literal_text_is_what_the_template_can_write_by_itself() -> None:
    template = ChatTemplate("<think>{{ '<tool>' ~ messages }}{# <no> #}", {}, now=datetime.now)
    assert "<think>" in template.literal_text
    assert "<tool>" in template.literal_text
    assert "<no>" not in template.literal_text


@pytest.mark.parametrize(
    ("source", "takes_parts"),
    [
        ("{{ messages[0].content }}", False),
        ("{{ messages[0]['content'].strip() }}", False),
        ("{{ 'user: ' + messages[0].content }}", False),
        ("{{ messages[0].content | tojson }}", True),
        ("{{ messages[0].content[0].text }}", True),
        ("{% for part in messages[0].content %}{{ part.text }}{% endfor %}", True),
        (
            "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}"
            "{% for part in messages[0].content %}{{ part.text }}{% endfor %}{% endif %}",
            True,
        ),
        ("{{ raise_exception('never') }}", True),
        ("nothing", True),
    ],
)
def test_whether_a_template_takes_parts_is_found_out(source: str, takes_parts: bool) -> None:
    """A template that shows neither form is left alone."""
    assert ChatTemplate(source, {}, now=lambda: datetime(2025, 7, 9)).takes_parts is takes_parts
