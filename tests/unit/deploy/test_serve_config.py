"""Tests what `weft check` reads out of a Serve config, and out of a manifest with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import deploy.cli
from deploy.commands.serve_cluster import apply_overrides
from deploy.config import ClusterConfig
from deploy.serve_config import IMPORT_PATH, check_submitted


def serve_config(live: object = None, name: str = "weft", **config: Any) -> dict[str, Any]:
    application: dict[str, Any] = {"name": name, "import_path": IMPORT_PATH, "args": {"config": config}}
    if live is not None:
        application["deployments"] = [{"name": each, "user_config": live} for each in ("worker", "router")]
    return {"proxy_location": "Disabled", "applications": [application]}


def problems(text: str) -> str:
    found = check_submitted(text)
    assert found.config is None
    return "\n".join(str(each) for each in found.problems)


def test_a_serve_config_holds_a_config_with_its_live_values() -> None:
    text = yaml.safe_dump(serve_config({"router": {"max_in_flight": 7}}, workers={"replicas": 3}))
    config, none, is_remote = check_submitted(text)
    assert config is not None
    assert (config.workers.replicas, config.router.max_in_flight, none, is_remote) == (3, 7, [], True)
    assert config.ray.address == "auto", "its replicas join the Ray on which they run"


def test_the_serve_config_of_a_manifest_is_read() -> None:
    manifests = [
        {"apiVersion": "v1", "kind": "Service"},
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayService",
            "spec": {"serveConfigV2": yaml.safe_dump(serve_config(workers={"replicas": 2}))},
        },
    ]
    config, _, _ = check_submitted(yaml.safe_dump_all(manifests))
    assert config is not None
    assert config.workers.replicas == 2
    assert "2 RayServices" in problems(yaml.safe_dump_all([manifests[1], manifests[1]]))
    assert "no RayService among them" in problems(yaml.safe_dump_all(manifests[:1]))


def test_an_ordinary_config_is_read_as_before() -> None:
    config, _, is_remote = check_submitted("workers: {replicas: 2}")
    assert config is not None
    assert not is_remote
    assert (config.workers.replicas, config.ray.address) == (2, None)
    assert "did you mean replicas?" in problems("workers: {replica: 2}")
    assert "not valid YAML" in problems("workers: {")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (serve_config(workers={"replica": 2}), "workers.replica: the key is unknown"),
        (serve_config({"workers": {"num_blocks": 9}}), "workers.num_blocks: the key can't change while the cluster"),
        (serve_config({"router": {"max_in_flight": 0}}), "router.max_in_flight: the value must be greater"),
        (serve_config(name="other"), "ray.cluster_name is weft, but the application's name is other"),
        ({"applications": []}, f"one application with import_path {IMPORT_PATH}, not 0"),
        ({"applications": [{"import_path": IMPORT_PATH, "args": {"model": 1}}]}, "no argument model"),
    ],
)
def test_a_flaw_is_named(data: dict[str, Any], message: str) -> None:
    assert message in problems(yaml.safe_dump(data))
    manifest = {"apiVersion": "ray.io/v1", "kind": "RayService", "spec": {"serveConfigV2": yaml.safe_dump(data)}}
    said = problems(yaml.safe_dump(manifest))
    assert message in said
    assert "serveConfigV2: " in said


def test_a_flaw_has_the_line_of_its_part() -> None:
    text = yaml.safe_dump(serve_config({"router": {"max_in_flight": 0}}), sort_keys=False)
    line = next(number for number, each in enumerate(text.splitlines(), 1) if each.endswith("- name: worker"))
    assert problems(text).startswith(f"line {line}, ")


def test_the_command_checks_a_serve_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(serve_config({"limits": {"max_messages": 77}})))
    assert deploy.cli.main(["check", str(file)]) == 0
    said = capsys.readouterr().out
    assert "the config is valid (1 router, 1 encoder, 1 worker replicas)" in said
    assert any(line.split()[:2] == ["limits.max_messages", "77"] for line in said.splitlines())


def test_a_config_with_links_survives_the_options_of_the_command_line() -> None:
    links = [{"from": {"host": "a*"}, "class": "tcp"}]
    config = ClusterConfig.model_validate({"router": {"links": links}})
    assert apply_overrides(config, {("server", "port"): 0}).router == config.router
