"""Tests that prompts equal those of transformers' `apply_chat_template`, id by id."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from deploy.demo.build import write_all_but_weights
from deploy.demo.tokenizer import sentences
from fabric.contracts import InvalidRequest
from modalities.text import IncrementalDetokenizer, TextCodec

pytestmark = pytest.mark.torch

ORDINARY = [
    "",
    "Hi",
    "> quoted\n> twice",
    "a < b | c > d, and <b>bold</b>",
    " white  space \n\n",
    "It's 12.5% — naïve café, 日本語, 😀👩‍👩‍👧, \u212b e\u0301",
    "<|not_a_token|> <|",
    "def f(x):\n    return {'a': x}\t# done\r\n",
]
MEDIA = [{"type": "image"}, {"type": "video"}, {"type": "audio"}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("text")
    write_all_but_weights(directory)
    return directory


def conversations(num: int, seed: int) -> list[list[dict[str, Any]]]:
    rng = random.Random(seed)
    texts = [*ORDINARY, *sentences(50, seed)]

    def content() -> str | list[dict[str, str]]:
        if rng.random() < 0.4:
            return rng.choice(texts)
        parts = [{"type": "text", "text": rng.choice(texts)} for _ in range(rng.randint(0, 3))]
        return rng.sample([*parts, *rng.choices(MEDIA, k=rng.randint(0, 3))], k=len(parts))

    def turns() -> list[dict[str, Any]]:
        system = [{"role": "system", "content": content()}] if rng.random() < 0.5 else []
        roles = ["user", "assistant"] * 3
        return [*system, *({"role": role, "content": content()} for role in roles[: rng.randint(1, 6)])]

    return [turns() for _ in range(num)]


def reference_ids(tokenizer: Any, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs)
    assert isinstance(ids, list)
    return ids


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_generated_conversations(model_dir: Path, add_generation_prompt: bool) -> None:
    codec, tokenizer = TextCodec.load(model_dir), AutoTokenizer.from_pretrained(model_dir)
    for messages in conversations(200, seed=7):
        expected = reference_ids(tokenizer, messages, add_generation_prompt=add_generation_prompt)
        assert codec.render(messages, add_generation_prompt=add_generation_prompt) == expected


def test_hostile_text_decodes_as_with_transformers_own_guard(model_dir: Path) -> None:
    codec, tokenizer = TextCodec.load(model_dir), AutoTokenizer.from_pretrained(model_dir)
    for token in codec.special_token_ids:
        text = f"before {codec.token_text(token)} after"
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": [{"type": "image"}]}]
        expected = reference_ids(tokenizer, messages, add_generation_prompt=True, sanitize_control_tokens=True)
        ids = codec.render(messages)
        assert codec.decode(ids, skip_special_tokens=False) == codec.decode(expected, skip_special_tokens=False)
        special = [[id for id in some if id in codec.special_token_ids] for some in (ids, expected)]
        assert special[0] == special[1]


# The templates below do what templates of other checkpoints do: they write tools as JSON, strip text, split off
# reasoning, and use namespaces and loop controls.
TEMPLATES = [
    "{% for m in messages %}{{ bos_token }}{{ m.role | upper }}: {{ m.content | trim }}{{ eos_token }}\n{% endfor %}",
    """{%- if tools %}
{{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{%- endif %}
{%- for message in messages %}
    {%- set text = message.content.split('</think>')[-1].lstrip('\\n') %}
    {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
    {%- if message.tool_calls %}{{ message.tool_calls | tojson(indent=2) }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if not enable_thinking %}<think>{% endif %}{% endif %}
""",
    """{% set ns = namespace(n=0, last='') %}
{% for m in messages[::-1] %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {% set ns.n = ns.n + 1 %}{% set ns.last = m.content %}
    {% generation %}{{ loop.index }}/{{ loop.length }} {{ m.content | replace('a', 'o') }}{% endgeneration %}
    {% if ns.n == 2 %}{% break %}{% endif %}
{% endfor %}
{{ ns.n }} {{ ns.last | title }} {{ dict(a=ns.n) | tojson(sort_keys=true) }} {{ strftime_now('%Y') | length }}
{{ messages[0].reasoning_content }} {{ messages | map(attribute='role') | join(',') }}
""",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_of_other_checkpoints(model_dir: Path, tmp_path: Path, template: str) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    codec, tokenizer = TextCodec.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    rng = random.Random(3)
    tools = [{"type": "function", "function": {"name": "look", "description": "<see> & 'say' é"}}]
    for text in ORDINARY * 3:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Think.", "thinking": "a reason", "name": None},
            {"role": "user", "content": f"{text}</think>\n\n{text}"},
            {"role": "assistant", "content": text, "tool_calls": [{"name": "look", "arguments": {"at": text}}]},
        ]
        variables = {"tools": rng.choice([None, tools]), "enable_thinking": rng.random() < 0.5}
        expected = reference_ids(tokenizer, messages, add_generation_prompt=True, **variables)
        assert codec.render(messages, template_kwargs=variables) == expected


CONTINUED = [
    "The sky is",
    "The sky is \n",
    " \n The sky",
    "twice",
    "",
    " ",
    "\n",
    "a</think>b",
    "naïve\u0301 日本 😀 ",
]
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CONTINUED_TEMPLATES = [
    *TEMPLATES,
    f"{{% for m in messages %}}{TURN}{{% endfor %}}",
    "{% for m in messages %}{{ m.role }}: {{ m.content.strip() }} {{ eos_token }}{% endfor %}",
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n\n{% endfor %}",
    "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
    "{% for m in messages %}{% if m.content %}{{ m.content.rstrip() + '  ' + eos_token }}{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% if not loop.last %}<|im_end|>{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}In short: {{ messages[-1].content | trim }}.",
]


@pytest.mark.parametrize("template", CONTINUED_TEMPLATES)
def test_continued_messages_of_several_templates(model_dir: Path, tmp_path: Path, template: str) -> None:
    """The last template shows the content twice: transformers leaves its own tag in the prompt then, and Weft does
    not."""
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    codec, tokenizer = TextCodec.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    num_refused = 0
    for text in (*CONTINUED, *ORDINARY):
        messages = [
            {"role": "system", "content": "Think.", "thinking": "a reason"},
            {"role": "user", "content": text},
            {"role": "assistant", "content": text},
        ]
        try:
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        except ValueError:
            num_refused += 1
            with pytest.raises(InvalidRequest):
                codec.render(messages, continue_final_message=True)
            continue
        prompt = prompt.replace("CONTINUE_FINAL_MESSAGE_TAG ", "")
        expected = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert codec.render(messages, continue_final_message=True) == expected, text
    assert num_refused < len(CONTINUED)


def test_continued_conversations_of_parts(model_dir: Path) -> None:
    codec, tokenizer = TextCodec.load(model_dir), AutoTokenizer.from_pretrained(model_dir)
    rng = random.Random(13)
    for messages in conversations(200, seed=13):
        texts = [{"type": "text", "text": rng.choice(ORDINARY)} for _ in range(rng.randint(1, 3))]
        final = {"role": "assistant", "content": rng.choice([texts, rng.choice(CONTINUED)])}
        expected = reference_ids(tokenizer, [*messages, final], continue_final_message=True)
        assert codec.render([*messages, final], continue_final_message=True) == expected


def test_hostile_continued_text_decodes_as_with_transformers_own_guard(model_dir: Path) -> None:
    codec, tokenizer = TextCodec.load(model_dir), AutoTokenizer.from_pretrained(model_dir)
    for token in codec.special_token_ids:
        for text in (f"before {codec.token_text(token)} after", f"at the end {codec.token_text(token)}"):
            messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
            options = {"continue_final_message": True, "sanitize_control_tokens": True}
            expected = reference_ids(tokenizer, messages, **options)
            ids = codec.render(messages, continue_final_message=True)
            assert codec.decode(ids, skip_special_tokens=False) == codec.decode(expected, skip_special_tokens=False)
            special = [[id for id in some if id in codec.special_token_ids] for some in (ids, expected)]
            assert special[0] == special[1]


def test_a_checkpoint_with_vocabulary_and_merges_instead_of_one_file(model_dir: Path, tmp_path: Path) -> None:
    """The checkpoint has the same files as the published Qwen3-Omni checkpoints."""
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(content["model"]["vocab"]), encoding="utf-8")
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {str(token.pop("id")): token for token in content["added_tokens"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    codec, tokenizer = TextCodec.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    whole = TextCodec.load(model_dir)
    assert codec.vocab_size == whole.vocab_size
    for messages in conversations(30, seed=11):
        ids = codec.render(messages)
        assert ids == whole.render(messages)
        assert ids == reference_ids(tokenizer, messages, add_generation_prompt=True)


def test_decoded_and_streamed_text(model_dir: Path) -> None:
    codec, tokenizer = TextCodec.load(model_dir), AutoTokenizer.from_pretrained(model_dir)
    rng = random.Random(5)
    for _ in range(200):
        ids = rng.choices(range(codec.vocab_size), k=rng.randint(0, 30))
        expected = tokenizer.decode(ids, skip_special_tokens=True)
        stream = IncrementalDetokenizer(codec)
        assert codec.decode(ids) == expected
        assert "".join([*(stream.push([id]) for id in ids), stream.flush()]) == expected
        assert codec.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids, skip_special_tokens=False)
