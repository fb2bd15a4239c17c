"""Tests that every message survives the wire exactly, types included, and that garbage raises a ProtocolError."""

from __future__ import annotations

import contextlib
import pickle
import types
import typing
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fabric.contracts.calls as calls
import fabric.contracts.messages as messages
from fabric.contracts import EngineStats, FeatureStats, MmHash, ProtocolError, UnitKey, WorkerReport

PLANE = typing.get_args(messages.PlaneMessage)
CALLS = (calls.EncodeRequest, calls.EncodeResult, calls.GenerateRequest, calls.GenerateResult)
PLAIN = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    type(None): st.none(),
    typing.Any: st.none() | st.integers(0, 9) | st.text(max_size=3),
}


def values(kind: typing.Any) -> st.SearchStrategy:
    """Returns a strategy for values of a field's type, given its annotation."""
    if hasattr(kind, "__supertype__"):
        return values(kind.__supertype__)
    if kind in PLAIN:
        return PLAIN[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([values(argument) for argument in arguments])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*[values(argument) for argument in arguments])
    fields = {name: values(hint) for name, hint in typing.get_type_hints(kind).items() if name in fields_of(kind)}
    return st.builds(lambda **given_fields: kind(**given_fields), **fields)


def fields_of(kind: typing.Any) -> tuple[str, ...]:
    return kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else kind._fields


@pytest.mark.parametrize("kind", PLANE, ids=lambda kind: kind.__name__)
def test_plane_messages_round_trip(kind: type[msgspec.Struct]) -> None:
    @given(values(kind))
    @settings(deadline=None, max_examples=15)
    def check(message: messages.PlaneMessage) -> None:
        back = messages.decode_message(messages.encode_message(message))
        assert type(back) is kind
        assert back == message

    check()


@given(st.lists(st.one_of([values(kind) for kind in PLANE]), min_size=1, max_size=4))
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_messages_that_travel_together_come_back_in_order(sent: list[messages.PlaneMessage]) -> None:
    data = messages.encode_bundle([messages.encode_message(message) for message in sent])
    back = messages.decode_bundle(data)
    assert back == tuple(sent)
    assert [type(message) for message in back] == [type(message) for message in sent]
    with pytest.raises(ProtocolError):
        messages.decode_bundle(data[:-1])


def test_a_message_that_travels_alone_is_its_own_bundle() -> None:
    data = messages.encode_message(messages.AbortAttempt("r", 1))
    assert messages.encode_bundle([data]) == data
    assert messages.decode_bundle(data) == (messages.AbortAttempt("r", 1),)


@pytest.mark.parametrize("kind", CALLS, ids=lambda kind: kind.__name__)
def test_calls_round_trip(kind: type[msgspec.Struct]) -> None:
    @given(values(kind))
    @settings(deadline=None, max_examples=10)
    def check(call: msgspec.Struct) -> None:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=kind) == call

    check()


@given(st.binary(max_size=40))
@settings(deadline=None)
def test_garbage_is_a_protocol_error_or_a_message(data: bytes) -> None:
    try:
        message = messages.decode_message(data)
    except ProtocolError:
        return
    assert isinstance(message, PLANE)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xff",
        msgspec.msgpack.encode(["NoSuchMessage", 1]),
        msgspec.msgpack.encode(["AbortAttempt", "r", "not a number"]),
        msgspec.msgpack.encode(["AbortAttempt", "r"]),
    ],
)
def test_what_the_contract_forbids_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        messages.decode_message(data)


def test_messages_are_immutable() -> None:
    message = messages.AbortAttempt("r", 1)
    with pytest.raises(AttributeError):
        message.attempt = 2


def test_nested_ids_come_back_as_their_types() -> None:
    needed = messages.FeatureNeeded("w", "r", 1, (UnitKey(MmHash("aa"), 3),), "preempted")
    back = messages.decode_message(messages.encode_message(needed))
    assert isinstance(back, messages.FeatureNeeded)
    assert back.units[0].mm_hash == "aa"
    assert back.units[0].unit == 3


def test_a_field_appended_later_does_not_break_an_older_reader() -> None:
    data = msgspec.msgpack.encode(["AbortAttempt", "r", 1, [0], "a field of a later version"])
    assert messages.decode_message(data) == messages.AbortAttempt("r", 1, (0,))


def test_a_part_of_a_report_may_have_fewer_or_more_fields_than_the_reader_knows() -> None:
    engine = [5, 3, *[9] * len(EngineStats.__struct_fields__)]
    report = messages.decode_message(msgspec.msgpack.encode(["WorkerReport", "w", 1, 2, [], engine, []]))
    assert isinstance(report, WorkerReport)
    assert (report.engine.num_running, report.engine.num_waiting, report.engine.drafts_accepted) == (5, 3, 9)
    assert (report.features, report.is_lost) == (FeatureStats(), False)


def test_an_item_counts_its_rows_and_names_its_units() -> None:
    item = calls.MediaItem(0, "video", MmHash("aa"), (2, 4, 4), (8, 6), 32, "messages.0.content.1")
    assert item.num_tokens == 14
    assert item.unit_keys() == [UnitKey(MmHash("aa"), 0), UnitKey(MmHash("aa"), 1)]
    assert calls.PlaceholderRange(5, 8, 0, 0, 0).end == 13


def test_scores_of_a_prompt_are_read_row_by_row() -> None:
    packed = calls.PromptLogprobs(
        1,
        np.array([[5, 9], [6, 6]], "<i4").tobytes(),
        np.array([[-1.5, -0.5], [-0.25, -0.25]], "<f4").tobytes(),
        np.array([2, 1], "<i4").tobytes(),
    )
    assert list(packed.tokens()) == [
        calls.PromptToken(5, 2, calls.TokenLogprobs(-1.5, ((9, -0.5),))),
        calls.PromptToken(6, 1, calls.TokenLogprobs(-0.25, ((6, -0.25),))),
    ]
    assert list(calls.PromptLogprobs(3, b"", b"", b"").tokens()) == []


def test_a_request_of_a_router_without_outputs_wants_none() -> None:
    """Fields are appended, so a shorter array of an older sender is a request that wants nothing of its prompt."""
    fields = ["r", 0, "router", "local://r", [1, 2], [], [], [], [5], [0.0, "r"]]
    request = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=calls.GenerateRequest)
    assert request.prompt_outputs == calls.PromptOutputs()
    assert not request.prompt_outputs.needs_all_positions


class Runs:
    """Is run by who reads its pickle."""

    num_runs = 0

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return run_by_pickle, ()


def run_by_pickle() -> None:
    Runs.num_runs += 1


def test_a_pickle_runs_nothing() -> None:
    """Servers that read pickles from sockets run the code of whoever reaches these (CVE-2025-32444)."""
    written = pickle.dumps(Runs())
    for decode in (messages.decode_message, messages.decode_bundle):
        with contextlib.suppress(ProtocolError):
            decode(written)
    assert Runs.num_runs == 0
    pickle.loads(written)
    assert Runs.num_runs == 1
