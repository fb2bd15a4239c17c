"""Tests what `weft node start` makes of a node: its command, its variables, its token and its ports."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from deploy.commands.command_line import build_parser
from deploy.commands.ray_node import ensure_token, node_command
from deploy.config import NetworkSection
from deploy.process_setup import SWITCHES, show_token
from fabric.contracts import ConfigError

TOKEN = Path("/token")


def parsed(*words: str) -> argparse.Namespace:
    return build_parser().read(["node", "start", "--node-address", "10.0.0.7", *words])


def test_a_head_has_the_first_port_and_every_other_port_follows() -> None:
    command = node_command(parsed("--head", "--first-port", "7000"), NetworkSection(), TOKEN, {})
    assert {"--head", "--port=7000", "--node-manager-port=7001", "--metrics-export-port=7006"} <= set(command.words)
    assert {"--node-ip-address=10.0.0.7", "--block", "--ray-client-server-port=7009"} <= set(command.words)
    assert command.variables["DASHBOARD_METRIC_PORT"] == "7008"
    assert command.variables["RAY_AUTH_TOKEN_PATH"] == "/token"


def test_a_node_joins_with_the_options_that_follow_the_dashes() -> None:
    given = ("--num-gpus", "8", "--resources", '{"weft_worker": 8}', "--labels", "rack=r1")
    arguments = parsed("--address", "10.0.0.1:6379", *given, "--", "--num-cpus", "4")
    command = node_command(arguments, NetworkSection(), TOKEN, {})
    assert command.words[-5:-2] == ("--num-gpus=8", '--resources={"weft_worker": 8}', "--labels=rack=r1")
    assert command.words[-2:] == ("--num-cpus", "4")
    assert "--address=10.0.0.1:6379" in command.words
    assert not {"--head", "--port=6379"} & set(command.words)
    assert "'--resources={\"weft_worker\": 8}'" in str(command), "what --print shows can be pasted into a shell"


def test_the_environment_of_a_node_wins_over_the_switches() -> None:
    environment = {"OMP_NUM_THREADS": "4", "RAY_AUTH_TOKEN": "secret"}
    command = node_command(parsed("--head"), NetworkSection(), TOKEN, environment)
    assert SWITCHES.keys() <= command.variables.keys()
    assert command.variables["OMP_NUM_THREADS"] == "4"
    assert "secret" not in str(command)
    assert "RAY_AUTH_TOKEN_PATH" not in command.variables


@pytest.mark.parametrize("ports", ["6000-6380", "15000-15999"])
def test_ports_that_ray_takes_are_refused(ports: str) -> None:
    with pytest.raises(ConfigError, match="Ray itself takes the ports"):
        node_command(parsed("--head"), NetworkSection(ports=ports), TOKEN, {})
    node_command(parsed("--head"), NetworkSection(ports="21000-21999"), TOKEN, {})


def test_a_head_makes_the_token_that_another_node_must_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "token"
    with pytest.raises(ConfigError, match="copy it from the head"):
        ensure_token(path, False, {})
    ensure_token(path, False, {"RAY_AUTH_TOKEN": "x"})
    assert not path.exists()
    ensure_token(path, True, {})
    token = path.read_text()
    assert (len(token), path.stat().st_mode & 0o777) == (64, 0o600)
    assert token not in capsys.readouterr().out
    ensure_token(path, True, {})
    ensure_token(path, False, {})
    assert path.read_text() == token


def test_a_server_shows_the_token_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "x")  # So that what the test sets is put back.
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))

    show_token(None)
    assert "RAY_AUTH_MODE" not in os.environ
    show_token(tmp_path / "token")
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"]) == ("token", str(tmp_path / "token"))
