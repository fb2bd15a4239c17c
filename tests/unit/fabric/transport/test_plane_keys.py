"""Tests the keys of the message plane as values; `tests/contract/test_fabric_plane_access.py` tests what they keep
out."""

from __future__ import annotations

import pytest
import zmq
from zmq.utils import z85

from fabric.transport import PlaneKeys


@pytest.fixture
def keys() -> PlaneKeys:
    return PlaneKeys.make()


def zap_question(public: bytes, domain: bytes = b"weft", mechanism: bytes = b"CURVE") -> list[bytes]:
    """Returns a question as libzmq asks it: version, number, domain, address, identity, mechanism, credentials."""
    return [b"1.0", b"17", domain, b"127.0.0.1", b"", mechanism, z85.decode(public)]


def test_each_public_key_belongs_to_the_secret_one_beside_it(keys: PlaneKeys) -> None:
    assert zmq.curve_public(keys.receiver_secret) == keys.receiver_public
    assert zmq.curve_public(keys.sender_secret) == keys.sender_public
    fields = ("receiver_public", "receiver_secret", "sender_public", "sender_secret")
    assert len({getattr(each, name) for each in (keys, PlaneKeys.make()) for name in fields}) == 8, "none is used twice"


def test_secret_halves_are_in_no_representation(keys: PlaneKeys) -> None:
    shown = repr(keys)
    assert keys.receiver_public.decode() in shown
    assert keys.receiver_secret.decode() not in shown
    assert keys.sender_secret.decode() not in shown


def test_only_the_senders_key_comes_in(keys: PlaneKeys) -> None:
    assert keys.zap_reply(zap_question(keys.sender_public)) == [b"1.0", b"17", b"200", b"OK", b"", b""]
    refusal = [b"1.0", b"17", b"400", b"no member of this cluster", b"", b""]
    for question in (
        zap_question(keys.receiver_public),
        zap_question(PlaneKeys.make().sender_public),
        zap_question(keys.sender_public, domain=b"other"),
        zap_question(keys.sender_public, mechanism=b"PLAIN"),
        zap_question(keys.sender_public)[:-1],
    ):
        assert keys.zap_reply(question) == refusal
