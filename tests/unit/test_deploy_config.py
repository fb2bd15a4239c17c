"""The cluster config: what is wrong is named with its place."""

from __future__ import annotations

import pytest

from deploy.config import ClusterConfig, check_config, load_config, parse_bytes
from fabric.errors import ConfigError


def problems(text: str) -> list[str]:
    config, found = check_config(text)
    assert (config is None) == bool(found)
    return [str(problem) for problem in found]


def test_empty_file_is_the_default() -> None:
    config, found = check_config("")
    assert config == ClusterConfig()
    assert found == []


def test_laptop_default_has_one_router_one_encoder_two_workers_and_no_gpu() -> None:
    config = load_config(None)
    assert (config.router.replicas, config.encoders.replicas, config.workers.replicas) == (1, 1, 2)
    assert config.encoders.device == config.workers.device == "cpu"
    assert config.server.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("router:\n  replicas: 0\n", "line 2, column 3: router.replicas: Input should be greater than or equal to 1"),
        ("wrokers: {}\n", "line 1, column 1: wrokers: unknown key; did you mean workers?"),
        ("encoders:\n  device: tpu\n", "line 2, column 3: encoders.device: Input should be 'cpu' or 'cuda'"),
        ("model: {}\nmodel: {}\n", "line 2, column 1: (file): duplicate key 'model'"),
        ("- 1\n", "line 1, column 1: (file): the file must be a mapping"),
        ("workers:\n  device: cuda\n", "(file): workers: device is cuda but gpus_per_replica is 0"),
        (
            "workers: {device: cuda, gpus_per_replica: 0.5}\n",
            "(file): workers: gpus_per_replica 0.5 shares a GPU; set allow_shared_gpu: true to mean it",
        ),
    ],
)
def test_problem_is_named_with_line_and_key(text: str, expected: str) -> None:
    assert problems(text) == [expected]


def test_all_problems_are_reported_at_once() -> None:
    assert len(problems("router: {replicas: 0}\nserver: {port: 99999}\n")) == 2


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("2KiB", 2048), ("1.5 GiB", 3 * 2**29), ("3MB", 3_000_000)])
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_a_missing_file_is_a_config_error(tmp_path: object) -> None:
    from pathlib import Path

    with pytest.raises(ConfigError, match="cannot read"):
        load_config(Path(str(tmp_path)) / "none.yaml")
