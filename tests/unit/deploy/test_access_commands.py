"""Tests the commands that an operator uses for access: `weft key new` makes keys that the router knows, and
`weft check` prints every limit and reads the files of keys and certificates."""

from __future__ import annotations

import ast
import dataclasses
import re
from operator import attrgetter
from pathlib import Path

import pytest
from tls_files import expire, make_certificate

import router.api
from deploy.cli import main
from deploy.compose import http_limits
from deploy.config import ClusterConfig
from deploy.http_limits import HttpLimits
from deploy.limit_table import HTTP_LIMITS, SECTION_TO_KEYS, limit_lines, limit_rows
from fabric.contracts import ManualClock
from router.router_config import Tenant
from router.run import KeyBook

Captured = pytest.CaptureFixture[str]


def test_a_new_key_is_shown_once_and_its_line_makes_it_known(capsys: Captured, tmp_path: Path) -> None:
    assert main(["key", "new", "shop", "--name", "web"]) == 0
    made = capsys.readouterr()
    key = made.err.splitlines()[-1]
    assert key.startswith("sk-weft-")
    assert len(key) >= 50
    assert key not in made.out
    assert made.out.split()[1:] == ["shop", "web"]
    assert main(["key", "new", "--operator"]) == 0
    operator = capsys.readouterr()
    path = tmp_path / "keys"
    path.write_text(made.out + operator.out)
    path.chmod(0o600)
    book = KeyBook([Tenant("shop")], ManualClock(), path)
    assert (book.find(key).tenant.name, book.find(key).key_name) == ("shop", "web")
    assert book.find(operator.err.splitlines()[-1]).is_operator
    assert main(["key", "new", "shop"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] != key


@pytest.mark.parametrize(
    ("arguments", "status", "flaw"),
    [
        ([], 2, "name the tenant of the key"),
        (["a b"], 1, "'a b' is no name"),
        (["shop", "--name", "x y"], 1, "'x y' is no name"),
    ],
)
def test_a_key_that_no_line_can_have_is_refused(capsys: Captured, arguments: list[str], status: int, flaw: str) -> None:
    assert main(["key", "new", *arguments]) == status
    refused = capsys.readouterr()
    assert flaw in refused.err
    assert refused.out == ""


def test_every_limit_is_listed_with_its_effective_value() -> None:
    config = ClusterConfig.model_validate(
        {
            "server": {"max_body_bytes": "1MiB"},
            "limits": {"max_messages": 7},
            "media": {"limit_mm_per_prompt": {"image": 3}},
            "tenants": {"shop": {"requests_per_minute": 90}},
        }
    )
    rows = dict(limit_rows(config))
    assert (rows["media.fetch.max_concurrent"], rows["media.fetch.max_waiting"]) == ("64", "256")
    assert rows["server.max_body_bytes"] == "1,048,576 (1 MiB)"
    assert rows["limits.max_messages"] == "7"
    assert rows["media.max_image_pixels"] == "178,956,970"
    assert rows["media.max_decoded_bytes"].startswith("715,827,880 (")
    assert rows["media.max_audio_bytes"] == "26,214,400 (25 MiB)"
    assert rows["media.max_audio_seconds"] == "600"
    assert rows["media.limit_mm_per_prompt"] == "image: 3"
    assert rows["media.image_embeds"] == "refused"
    with_features = ClusterConfig.model_validate({"media": {"image_embeds": True}})
    assert dict(limit_rows(with_features))["media.image_embeds"] == "taken"
    assert rows["router.max_num_choices"] == "8"
    assert rows["tenants.shop.requests_per_minute"] == "90"
    assert {f"limits.{key}" for key in type(config.limits).model_fields} < set(rows)
    named = {f"{name}.{key}" for name in ("server", "media") for key in type(getattr(config, name)).model_fields}
    assert {key for key in named if key.rpartition(".")[2].startswith("max_")} <= set(rows)
    lines = limit_lines(config)
    assert len(lines) == len(rows) + 1
    assert len({line.index(rows[line.split()[0]], 30) for line in lines[1:] if line.split()[0] in rows}) == 1


SECTION_TO_OTHER_KEYS = {
    # These say where the server is, and how it stops.
    "server": {"host", "port", "drain_s", "tls_cert_file", "tls_key_file", "tls_client_ca_file"},
    # These are about the cluster's members and the router's own books.
    "router": {
        "replicas",
        "ray_resources",
        "cpus_per_replica",
        "max_index_blocks",
        "max_index_items",
        "heartbeat_s",
        "lease_s",
        "batch_wait_s",
        "tokens_per_encoder_second",
        "costs_file",
        "links",
    },
    # These say how media are read, and what happens to those that are refused.
    "media": {
        "sampling",
        "fps",
        "num_pooled_frames",
        "keep_fraction",
        "probe_processes",
        "fetch",
        "on_encode_failure",
    },
    # These say what is fetched, and `cache_bytes` is about what is kept afterwards.
    "media.fetch": {
        "enabled",
        "schemes",
        "allowed_hosts",
        "denied_hosts",
        "allowed_networks",
        "denied_networks",
        "allowed_ports",
        "cache_bytes",
        "file_root",
        "ca_file",
    },
}


@pytest.mark.parametrize("name", SECTION_TO_OTHER_KEYS)
def test_each_key_of_what_clients_meet_is_listed_or_is_no_limit(name: str) -> None:
    """A new key has to be put on one side."""
    keys = set(type(attrgetter(name)(ClusterConfig())).model_fields)
    assert keys == set(SECTION_TO_KEYS[name]) | SECTION_TO_OTHER_KEYS[name]
    assert not set(SECTION_TO_KEYS[name]) & SECTION_TO_OTHER_KEYS[name]


def test_each_limit_of_the_http_server_is_listed_or_has_a_key() -> None:
    fields = {field.name for field in dataclasses.fields(HttpLimits)}
    assert fields - set(HTTP_LIMITS) <= set(SECTION_TO_KEYS["server"])
    assert set(HTTP_LIMITS) < fields
    rows = dict(limit_rows(ClusterConfig()))
    assert rows["(headers of a request)"] == "256"
    assert rows["(bytes of a path and its query)"] == "16,384"
    changed = ClusterConfig.model_validate({"server": {"max_connections": 7}})
    fixed = {name: getattr(http_limits(changed), name) for name in HTTP_LIMITS}
    assert fixed == {name: getattr(HttpLimits(), name) for name in HTTP_LIMITS}, "no key sets them"


def test_times_that_depend_on_the_modality_are_those_that_hold() -> None:
    section = {"media": {"encode_timeout_ms": {"video": 90_000}}, "encoders": {"decode_cpu_s": {"image": 3}}}
    rows = dict(limit_rows(ClusterConfig.model_validate(section)))
    assert rows["media.encode_timeout_ms"] == "image: 10,000, audio: 20,000, video: 90,000, other: 60,000"
    assert rows["encoders.decode_cpu_s"] == "image: 3, audio: 16, video: 48, other: 48"
    assert rows["encoders.decode_timeout_s"] == "image: 9, audio: 18, video: 54, other: 54"
    assert rows["media.probe_cpu_s"] == "image: 1, other: 5"
    assert rows["media.named_media_bytes"].endswith(" MiB)")


def test_lengths_that_the_formats_of_requests_limit_are_constants_of_the_list() -> None:
    """A number in the model of a request would be a limit that the list does not know."""
    folder = Path(router.api.__file__).parent
    calls = [
        (file.name, call)
        for file in folder.glob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.keyword) and call.arg == "max_length"
    ]
    assert [(name, ast.unparse(each)) for name, each in calls if not isinstance(each.value, ast.Name)] == []
    rows = dict(limit_rows(ClusterConfig()))
    assert (rows["(characters of cache_salt)"], rows["(characters of the name of a tool)"]) == ("256", "64")


def test_limits_that_no_key_sets_are_listed_too() -> None:
    rows = dict(limit_rows(ClusterConfig()))
    assert rows["(frames that a request asks for)"] == "16,384"
    assert rows["(characters of a URL)"] == "8,192"
    folder = Path(router.api.__file__).parent
    listed = folder.joinpath("fixed_limits.py").read_text()
    constants = {
        name for file in folder.glob("*.py") for name in re.findall(r"^(MAX_\w+) =", file.read_text(), re.MULTILINE)
    }
    others = {"MAX_SHOWN_CHARS", "MAX_RETRY_AFTER_S"}  # These two limit messages and headers of answers.
    assert constants >= others
    assert {name for name in constants - others if f": {name},\n" not in listed} == set()


def test_check_reads_the_files_that_the_config_names(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "deploy.commands.config_checks.check_budget", lambda config, device_bytes: (None, "no model in this test")
    )
    files = make_certificate(tmp_path)
    keys, config = tmp_path / "keys", tmp_path / "config.yaml"
    keys.write_text(f"{'ab' * 32} shop web\n{'cd' * 32} - grafana role=operator\n")
    keys.chmod(0o600)
    text = "tenants: {shop: {}}\naccess: {keys_file: KEYS}\nserver: {tls_cert_file: CERT, tls_key_file: KEY}\n"

    def checked(cert: Path) -> tuple[int, str, str]:
        written = text.replace("KEYS", str(keys)).replace("CERT", str(cert)).replace("KEY", str(files.key_file))
        config.write_text(written)
        status = main(["check", str(config)])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    status, out, err = checked(files.cert_file)
    assert (status, err) == (0, "")
    assert "the file of keys has 2 keys, 1 of them of operators" in out
    assert "the certificate is valid until" in out
    assert "limits.max_schema_depth" in out
    keys.write_text(f"{'ab' * 32} bank web\n")
    status, out, err = checked(expire(tmp_path, files).cert_file)
    assert status == 1
    assert "line 1: the config has no tenant 'bank'" in err
    assert "certificate has expired" in err
