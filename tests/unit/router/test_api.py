"""Tests OpenAI's formats: what is accepted, what is refused and how it is named, and the one table of statuses."""

from __future__ import annotations

import json

import pytest

from fabric.contracts import InvalidRequest, errors
from fabric.contracts.errors import leaves
from modalities.family import MediaOptions
from router.api import (
    ChatMessage,
    ChatRequest,
    ChoiceText,
    ChunkWriter,
    Head,
    MediaPart,
    TextPart,
    Usage,
    completion,
    http_error,
    parse_chat,
    parts_of,
    status_of,
    video_options,
)
from router.api.chat_request import MediaKwargs, check_media_kwargs
from router.api.generation_fields import PARAM_TO_NEUTRAL
from router.api.http_errors import ERROR_TO_STATUS, error_object

HEAD = Head("chatcmpl-req-1", 1700000000, "tiny")
MINIMAL = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def parse(**fields: object) -> ChatRequest:
    return parse_chat(json.dumps(MINIMAL | fields).encode())


# ---------------------------------------------------------------- These tests cover errors.


@pytest.mark.parametrize("leaf", leaves())
def test_every_leaf_has_a_status_and_its_own_code_in_the_envelope(leaf: type[errors.WeftError]) -> None:
    assert leaf in ERROR_TO_STATUS
    answer = http_error(leaf("what", param="messages.0"))
    assert answer.status == ERROR_TO_STATUS[leaf]
    detail = json.loads(answer.body)["error"]
    assert set(detail) == {"message", "type", "param", "code"}
    assert (detail["message"], detail["param"], detail["code"]) == ("what", "messages.0", leaf.code)


def test_the_table_has_no_row_too_many() -> None:
    assert set(ERROR_TO_STATUS) == set(leaves())


@pytest.mark.parametrize("leaf", leaves())
def test_retry_headers_follow_status_and_class(leaf: type[errors.WeftError]) -> None:
    answer = http_error(leaf("what"))
    assert ("retry-after" in answer.headers) == (answer.status in (429, 503))
    refuses_retry = answer.headers.get("x-should-retry") == "false"
    is_final = answer.status >= 500 and answer.status != 503 and not leaf.retryable
    assert refuses_retry == (is_final or leaf is errors.DeadlineOutOfReach)


@pytest.mark.parametrize(("wait_s", "header"), [(None, "2"), (0.2, "1"), (7.1, "8"), (9999.0, "60")])
def test_retry_after_is_whole_seconds_within_what_clients_honour(wait_s: float | None, header: str) -> None:
    answer = http_error(errors.Overloaded("full", retry_after_s=wait_s), default_retry_after_s=2.0)
    assert answer.headers["retry-after"] == header


def test_the_time_after_which_a_quota_has_room_is_exact() -> None:
    """It is no prediction, so it is not cut: a client that came earlier would be refused again."""
    answer = http_error(errors.RateLimited("used up", retry_after_s=90.0402))
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("91", "90041")
    answer = http_error(errors.RateLimited("used up", retry_after_s=0.0201))
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("1", "21")


def test_unknown_error_is_a_500_without_its_text_being_trusted() -> None:
    assert status_of(errors.WeftError("what")) == 500
    assert error_object(errors.WeftError("what"))["code"] == "internal_error"


# ---------------------------------------------------------------- These tests cover requests.


def test_unknown_fields_are_tolerated_and_listed() -> None:
    chat = parse(session_id="x", continuous_usage_stats=True, functions=[])
    assert chat.ignored_fields == ["continuous_usage_stats", "functions", "session_id"]


def test_few_of_very_many_ignored_fields_are_listed() -> None:
    """The trace keeps the listed fields with the request for a long time."""
    listed = parse(**{f"field\n{number:05}" + "x" * 500: 1 for number in range(5_000)}).ignored_fields
    assert len(listed) == 65
    assert listed[0].startswith(r"'field\n00000xxx")
    assert listed[-1] == "and 4936 more"
    assert max(map(len, listed)) < 80


def test_newer_name_of_the_token_limit_wins() -> None:
    assert parse(max_tokens=5).token_limit == 5
    assert parse(max_tokens=5, max_completion_tokens=7).token_limit == 7
    assert parse().token_limit is None


def test_stop_is_a_string_or_a_list() -> None:
    assert parse(stop="a").stop == ["a"]
    assert parse(stop=["a", "b"]).stop == ["a", "b"]
    assert parse(stop=None).stop is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}]}, "messages.1.role"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stop": [1]}, "stop.0"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"frequency_penalty": "high"}, "frequency_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"5": "a"}}, "logit_bias.5"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"priority": 1.5}, "priority"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"model": None}, "model"),
        ({"on_encode_failure": "retry"}, "on_encode_failure"),
        ({"mm_processor_kwargs": [2]}, "mm_processor_kwargs"),
        ({"mm_processor_kwargs": {"fps": 0}}, "mm_processor_kwargs.fps"),
        ({"mm_processor_kwargs": {"fps": float("inf")}}, "mm_processor_kwargs.fps"),
        ({"mm_processor_kwargs": {"num_frames": 1.5}}, "mm_processor_kwargs.num_frames"),
        ({"mm_processor_kwargs": {"num_frames": 8, "fps": 2}}, "mm_processor_kwargs.num_frames"),
        ({"mm_processor_kwargs": {"num_frames": 8, "max_frames": 2}}, "mm_processor_kwargs.num_frames"),
        ({"mm_processor_kwargs": {"max_frames": 10**9}}, "mm_processor_kwargs.max_frames"),
        ({"mm_processor_kwargs": {"sampling": "random"}}, "mm_processor_kwargs.sampling"),
        ({"mm_processor_kwargs": {"use_audio_in_video": "yes"}}, "mm_processor_kwargs.use_audio_in_video"),
        ({"mm_processor_kwargs": {"fps": 2, "size": 100}}, "mm_processor_kwargs.size"),
        ({"mm_processor_kwargs": {"min_pixels": 0}}, "mm_processor_kwargs.min_pixels"),
        ({"mm_processor_kwargs": {"min_pixels": 1.5}}, "mm_processor_kwargs.min_pixels"),
        ({"mm_processor_kwargs": {"min_pixels": 101, "max_pixels": 100}}, "mm_processor_kwargs.min_pixels"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param


def test_an_unknown_processing_option_would_change_the_answer() -> None:
    with pytest.raises(InvalidRequest, match=r"^`mm_processor_kwargs.size` is not supported"):
        parse(mm_processor_kwargs={"size": 100})
    assert parse(mm_processor_kwargs={}).ignored_fields == []


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_frames": 4, "fps": 2}, "`num_frames` and `fps` exclude each other"),
        ({"num_frames": 4, "max_frames": 2}, "`num_frames` and `max_frames` exclude each other"),
        ({"fps": 2, "sampling": "uniform"}, "`fps` has no effect on `uniform` sampling"),
        ({"fps": 2, "sampling": "keyframe"}, "`fps` has no effect on `keyframe` sampling"),
    ],
)
def test_wishes_that_contradict_each_other_are_refused(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_media_kwargs(MediaKwargs.model_validate(kwargs))


@pytest.mark.parametrize(
    ("kwargs", "sampling", "fps", "max_frames"),
    [
        (None, "keyframe", 1.0, 10),
        ({}, "keyframe", 1.0, 10),
        ({"fps": 4}, "fps", 4.0, 10),
        ({"num_frames": 40}, "uniform", 1.0, 40),
        ({"max_frames": 4}, "keyframe", 1.0, 4),
        ({"sampling": "uniform", "max_frames": 5}, "uniform", 1.0, 5),
    ],
)
def test_wishes_are_laid_over_the_deployments_defaults(
    kwargs: dict[str, object] | None, sampling: str, fps: float, max_frames: int
) -> None:
    defaults = MediaOptions(sampling="keyframe", fps=1.0, max_frames=10, max_tokens=100, keep_fraction=0.5)
    options = video_options(defaults, parse(mm_processor_kwargs=kwargs).mm_processor_kwargs)
    assert options == MediaOptions(sampling, fps, max_frames, max_tokens=100, keep_fraction=0.5)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nul", b'{"model": "\\ud800"}', b"\xff", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_chat(body)


def test_missing_model_says_so() -> None:
    with pytest.raises(InvalidRequest, match=r"^`model` is required$"):
        parse_chat(b'{"messages": [{"role": "user", "content": "hi"}]}')


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("chat_template", "{{ x }}"),
        ("skip_special_tokens", False),
    ],
)
def test_parameters_that_would_change_the_output_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^`{name}` is not supported") as caught:
        parse(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", []),
        ("function_call", "auto"),
        ("skip_special_tokens", True),
    ],
)
def test_asking_for_what_happens_anyway_is_accepted(name: str, value: object) -> None:
    assert name in parse(**{name: value}).ignored_fields


def test_a_hint_of_verbosity_is_tolerated() -> None:
    for word in ("low", "medium", "high", None):
        assert parse(verbosity=word).verbosity == word
    with pytest.raises(InvalidRequest, match=r"^`verbosity` must be 'low', 'medium' or 'high', not "):
        parse(verbosity="bogus")


@pytest.mark.parametrize("name", sorted(PARAM_TO_NEUTRAL.keys() - ChatRequest.model_fields.keys()))
def test_null_is_neutral_everywhere(name: str) -> None:
    assert name in parse(**{name: None}).ignored_fields


# ---------------------------------------------------------------- These tests cover content.


def message(**fields: object) -> ChatMessage:
    return ChatMessage.model_validate({"role": "user"} | fields)


def test_parts_keep_their_order_and_paths() -> None:
    url = {"type": "image_url", "image_url": {"url": "data:,"}}
    parts = parts_of(message(content=[{"type": "text", "text": "a"}, url]), 2)
    assert parts == [TextPart("a"), MediaPart("image_url", url, "messages.2.content.1")]


@pytest.mark.parametrize(
    ("detail", "found"),
    [("low", "low"), ("high", "high"), ("original", "high"), ("auto", "auto"), (None, "auto")],
)
def test_the_detail_of_a_picture_is_read(detail: object, found: str) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,", "detail": detail}}
    (parsed,) = parts_of(message(content=[part]), 0)
    assert isinstance(parsed, MediaPart)
    assert parsed.detail == found


@pytest.mark.parametrize("detail", ["lower", "LOW", "", 1, ["low"], True])
def test_an_unknown_detail_is_refused(detail: object) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,", "detail": detail}}
    with pytest.raises(InvalidRequest, match="`auto`, `low`, `high` or `original`") as caught:
        parts_of(message(content=[{"type": "text", "text": "a"}, part]), 1)
    assert caught.value.param == "messages.1.content.1.image_url.detail"


def test_only_pictures_have_a_low_detail() -> None:
    for word in ("auto", "high"):
        parts_of(message(content=[{"type": "video_url", "video_url": {"url": "data:,", "detail": word}}]), 0)
    with pytest.raises(InvalidRequest, match="only pictures"):
        parts_of(message(content=[{"type": "video_url", "video_url": {"url": "data:,", "detail": "low"}}]), 0)


def test_a_uuid_stands_beside_a_medium_or_alone() -> None:
    url = {"url": "data:,"}
    for part in ({"image_url": url, "uuid": "cat"}, {"image_url": {**url, "uuid": "cat"}}):
        (parsed,) = parts_of(message(content=[{"type": "image_url", **part}]), 0)
        assert isinstance(parsed, MediaPart)
        assert (parsed.uuid, parsed.has_content) == ("cat", True)
    for part in (
        {"image_url": None, "uuid": "cat"},
        {"uuid": "cat"},
        {"image_url": {"uuid": "cat"}},
        {"image_url": {"url": "", "detail": "low"}, "uuid": "cat"},
        {"image_url": "", "uuid": "cat"},
    ):
        (parsed,) = parts_of(message(content=[{"type": "image_url", **part}]), 0)
        assert isinstance(parsed, MediaPart)
        assert (parsed.uuid, parsed.has_content) == ("cat", False)
    for uuid in ("", "x" * 257, 5, ["cat"]):
        with pytest.raises(InvalidRequest, match="a `uuid` must be a string of 1 to 256 characters, not ") as caught:
            parts_of(message(content=[{"type": "image_url", "image_url": url, "uuid": uuid}]), 0)
        assert caught.value.param == "messages.0.content.0.uuid"


def test_a_uuid_stands_for_a_file_too() -> None:
    for part in (
        {"uuid": "f9"},
        {"file": None, "uuid": "f9"},
        {"file": {"filename": "a.png"}, "uuid": "f9"},
        {"file": {"file_data": "", "uuid": "f9"}},
    ):
        (parsed,) = parts_of(message(content=[{"type": "file", **part}]), 0)
        assert isinstance(parsed, MediaPart)
        assert (parsed.part_type, parsed.uuid, parsed.has_content) == ("file", "f9", False)
    file = {"file_data": "data:image/png;base64,AAAA"}
    for part in ({"file": file, "uuid": "f9"}, {"file": {**file, "uuid": "f9"}}):
        (parsed,) = parts_of(message(content=[{"type": "file", **part}]), 0)
        assert isinstance(parsed, MediaPart)
        assert (parsed.part_type, parsed.uuid, parsed.has_content) == ("image_url", "f9", True)


def test_part_types_that_somebody_registered_are_media() -> None:
    points = {"type": "point_cloud", "points": []}
    parts = parts_of(message(content=[points]), 0, lambda kind: kind == "point_cloud")
    assert parts == [MediaPart("point_cloud", points, "messages.0.content.0")]


def test_assistant_may_have_no_content_and_may_have_refused() -> None:
    assert parts_of(message(role="assistant", content=None), 0) == ""
    assert parts_of(message(role="assistant", content=[{"type": "refusal", "refusal": "no"}]), 0) == [TextPart("no")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"content": None}, "messages.0.content"),
        ({"content": []}, "messages.0.content"),
        ({"content": 5}, "messages.0.content"),
        ({"content": {"type": "text", "text": "a"}}, "messages.0.content"),
        ({"content": ["a"]}, "messages.0.content.0"),
        ({"content": [{"type": "text"}]}, "messages.0.content.0"),
        ({"content": [{"text": "a"}]}, "messages.0.content.0"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "hologram"}]}, "messages.0.content.1"),
    ],
)
def test_wrong_content_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parts_of(message(**fields), 0)
    assert caught.value.param == param


# ---------------------------------------------------------------- These tests cover responses.


def test_completion_has_openais_shape() -> None:
    usage = Usage(20, 5, 16, {"image": 9})
    body = json.loads(completion(HEAD, [ChoiceText(0, "hi", "stop")], usage))
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "hi"
    assert body["usage"]["total_tokens"] == 25
    details = body["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 16, "text_tokens": 11, "image_tokens": 9, "audio_tokens": 0}


def test_what_was_taken_away_is_told_in_weft_and_nothing_else_is() -> None:
    usage, writer = Usage(1, 2, 0, {}), ChunkWriter(HEAD, has_usage_chunk=True)
    told = [{"part": "messages.0.content.0", "action": "removed"}]
    for body in (
        completion(HEAD, [ChoiceText(0, "hi", "stop")], usage, degraded=told),
        writer.finish(0, "stop", degraded=told).removeprefix(b"data: "),
        writer.last(usage, told).removeprefix(b"data: "),
    ):
        assert json.loads(body)["weft"] == {"degraded": told}
    assert "weft" not in json.loads(completion(HEAD, [ChoiceText(0, "hi", "stop")], usage))
    assert "weft" not in json.loads(writer.finish(0, "stop").removeprefix(b"data: "))


def test_usage_chunk_has_no_choices_and_others_say_null() -> None:
    writer = ChunkWriter(HEAD, has_usage_chunk=True)
    last = json.loads(writer.last(Usage(1, 2, 0, {})).removeprefix(b"data: "))
    assert last["choices"] == []
    assert json.loads(writer.text(0, "x").removeprefix(b"data: "))["usage"] is None
    assert "usage" not in json.loads(ChunkWriter(HEAD, False).text(0, "x").removeprefix(b"data: "))
