"""Tests the error tree: every leaf has a wire name of its own, survives pickling, and is restored from the wire."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from fabric.contracts import ErrorInfo, InvalidMedia, RequestRefused, WeftError
from fabric.contracts.errors import CODE_TO_ERROR, leaves

LEAVES = leaves()


def test_every_leaf_is_mapped_by_a_code_of_its_own() -> None:
    assert set(CODE_TO_ERROR.values()) == set(LEAVES)
    assert len({leaf.code for leaf in LEAVES}) == len(LEAVES)
    assert WeftError.code not in CODE_TO_ERROR


def test_the_tree_in_the_docstring_names_every_class() -> None:
    import fabric.contracts.errors

    assert fabric.contracts.errors.__doc__ is not None
    tree = [kind.__name__ for leaf in LEAVES for kind in leaf.__mro__ if issubclass(kind, WeftError)]
    missing = [name for name in tree if name not in fabric.contracts.errors.__doc__]
    assert missing == []


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_a_leaf_pickles_with_its_details(leaf: type[WeftError]) -> None:
    copy = pickle.loads(pickle.dumps(leaf("what", param="messages.0", retry_after_s=1.5)))
    assert type(copy) is leaf
    assert (str(copy), copy.message, copy.param, copy.retry_after_s) == ("what", "what", "messages.0", 1.5)


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_a_leaf_goes_over_the_wire(leaf: type[WeftError]) -> None:
    data = msgspec.msgpack.encode(ErrorInfo.of(leaf("what", param="p", retry_after_s=2.0)))
    back = msgspec.msgpack.decode(data, type=ErrorInfo).to_error()
    assert type(back) is leaf
    assert (back.message, back.param, back.retry_after_s) == ("what", "p", 2.0)
    assert (back.code, back.retryable) == (leaf.code, leaf.retryable)


def test_a_foreign_exception_crosses_without_its_text() -> None:
    info = ErrorInfo.of(RuntimeError("password=hunter2"))
    assert info.code == "internal_error"
    assert "hunter2" not in info.message
    assert "RuntimeError" in info.message
    assert type(info.to_error()) is WeftError


def test_an_unknown_code_becomes_the_root() -> None:
    assert type(ErrorInfo("from_the_future", "x").to_error()) is WeftError


def test_refusals_are_caught_as_a_class_and_never_retryable() -> None:
    refused = [leaf for leaf in LEAVES if issubclass(leaf, RequestRefused)]
    assert InvalidMedia in refused
    assert not any(leaf.retryable for leaf in refused)
