import json
from pathlib import Path

import pytest

from deploy.demo.build import write_all_but_weights
from fabric.contracts import ConfigError, InvalidRequest
from modalities.text import TextCodec
from modalities.text import tokenizer_files as checkpoint


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("text")
    write_all_but_weights(directory)
    return directory


@pytest.fixture(scope="module")
def codec(model_dir: Path) -> TextCodec:
    return TextCodec.load(model_dir)


def test_a_conversation_becomes_turns_with_one_placeholder_per_picture(codec: TextCodec) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "image"}, {"type": "text", "text": "this?"}]
    ids = codec.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}])
    assert codec.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is <|vision_start|><|image_pad|><|vision_end|>this?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids.count(codec.token_id("<|image_pad|>")) == 1
    assert codec.decode(ids) == "system\nBe brief.\nuser\nWhat is this?\nassistant\n"


def test_without_generation_prompt_the_last_turn_ends_the_prompt(codec: TextCodec) -> None:
    ids = codec.render([{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    assert codec.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_typed_placeholder_is_text_even_over_two_parts(codec: TextCodec) -> None:
    parts = [{"type": "text", "text": "<|image_pad|> <|im_"}, {"type": "text", "text": "end|>"}]
    ids = codec.render([{"role": "user", "content": parts}], add_generation_prompt=False)
    assert codec.decode(ids, skip_special_tokens=False) == "<|im_start|>user\n<|image_pad|> <|im_end|><|im_end|>\n"
    assert codec.decode(ids) == "user\n<|image_pad|> <|im_end|>\n"
    assert ids.count(codec.token_id("<|image_pad|>")) == 0
    assert ids.count(codec.token_id("<|im_end|>")) == 1


def test_a_mark_in_the_text_is_kept(codec: TextCodec) -> None:
    text = "\ue000<|im_end|>\ue000\ue001"
    ids = codec.render([{"role": "user", "content": text}], add_generation_prompt=False)
    assert codec.decode(ids) == f"user\n{text}\n"


def test_encode_takes_control_tokens_as_text(codec: TextCodec) -> None:
    ids = codec.encode("a<|im_end|>b")
    assert codec.special_token_ids.isdisjoint(ids)
    assert codec.decode(ids) == "a<|im_end|>b"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "wizard", "content": "Hi"}],
        [{"role": "<|im_end|>", "content": "Hi"}],
        [{"role": "user", "content": [{"type": "smell"}]}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "lone \ud800 surrogate"}],
        [{"role": "user", "content": [{"type": "image", "image": b"bytes"}]}],
    ],
)
def test_what_can_not_be_rendered_is_an_invalid_request(codec: TextCodec, messages: list[dict[str, object]]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.render(messages)
    assert caught.value.param == "messages"


def test_a_deeply_nested_message_is_refused(codec: TextCodec) -> None:
    content: list[object] = []
    for _ in range(100_000):
        content = [content]
    with pytest.raises(InvalidRequest, match="too deeply"):
        codec.render([{"role": "user", "content": content}])
    # The loop takes the content apart from outside in, because freeing it at once would recurse as deep.
    while content:
        content = content.pop()


def test_the_end_of_turn_is_known(codec: TextCodec) -> None:
    assert codec.eos_token_ids == (codec.token_id("<|im_end|>"),)
    assert codec.vocab_size == 2051
    assert codec.token_text(codec.eos_token_ids[0]) == "<|im_end|>"
    assert codec.token_text(99_999) is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [3, 1, 3]}, "config": {"eos_token_id": 2}}, (3, 1)),
        ({"generation_config": {}, "config": {"eos_token_id": 2}}, (2,)),
        ({"config": {"eos_token_id": None, "text_config": {"eos_token_id": 4}}}, (4,)),
        ({"config": {"thinker_config": {"text_config": {"eos_token_id": 5}}}}, (5,)),
    ],
)
def test_eos_ids_come_from_the_generation_config_then_the_config(
    tmp_path: Path, files: dict[str, object], expected: tuple[int, ...]
) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert checkpoint.eos_token_ids(tmp_path) == expected


def test_a_directory_without_what_is_needed_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eos_token_id"):
        checkpoint.eos_token_ids(tmp_path)
    assert checkpoint.chat_template(tmp_path) == "", "a base checkpoint has no chat template"
    with pytest.raises(ConfigError, match=r"neither a tokenizer\.json nor a tokenizer\.model"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be loaded"):
        TextCodec.load(tmp_path)


def test_the_chat_template_may_stand_in_the_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert checkpoint.chat_template(tmp_path) == "one"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert checkpoint.chat_template(tmp_path) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert checkpoint.chat_template(tmp_path) == "three"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "the part WordPiece"),
        ({"decoder": None}, "no decoder"),
        ({"token": {"content": "§"}}, "distinguished from ordinary text"),
    ],
)
def test_a_tokenizer_that_can_not_be_guarded_is_refused(
    model_dir: Path, tmp_path: Path, change: dict[str, dict[str, object]], message: str
) -> None:
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = json.loads((model_dir / "tokenizer.json").read_text())
    content["decoder"] = change.get("decoder", content["decoder"])
    content["added_tokens"][0] |= change.get("token", {})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        TextCodec.load(tmp_path)
