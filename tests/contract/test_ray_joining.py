"""Tests the errors of joining a Ray, and what is told of a deployment that can't start."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("ray")

from ray.exceptions import AuthenticationError

from deploy.ray import joining
from fabric.contracts import ConfigError, Unavailable


def test_an_address_where_nothing_listens_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        joining.check_answers(address)
    with pytest.raises(Unavailable, match=rf"no Ray answers at {address} .*refused.*weft node start --head"):
        joining.check_answers(address)
    joining.check_answers("auto")
    joining.check_answers("ray://127.0.0.1:1")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AuthenticationError("no token"), "need the same token"),
        (ConnectionError("Failed to connect"), "ray.token_file"),
        (RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.9"), "other versions"),
    ],
)
def test_what_ray_raises_becomes_advice(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr(joining.ray, "init", refuse)
    with pytest.raises(ConfigError, match=said):
        joining.join_ray("auto", "weft", log_to_driver=False)


def test_the_error_of_a_replica_is_cut_out_of_its_traceback() -> None:
    message = (
        'The deployment failed to start 3 times in a row. Error:\n  File "x.py", line 1, in __init__\n'
        "fabric.contracts.errors.ConfigError: node b: it has Weft 0.2, but the server has Weft 0.1\n"
    )
    assert joining.told(message).endswith("ConfigError: node b: it has Weft 0.2, but the server has Weft 0.1")
    assert "File" not in joining.told(message)
    assert joining.told("waiting for resources") == "waiting for resources"
