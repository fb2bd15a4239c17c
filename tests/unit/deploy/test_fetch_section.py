"""Tests the keys of `media.fetch`, and what they become."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.compose import build_fetcher, fetch_settings
from deploy.config import ClusterConfig
from deploy.config_file import check_config
from fabric.contracts import ConfigError
from modalities.media import MediaLimits
from router.fetch import FetchProcess, FetchSettings


def config_of(text: str) -> ClusterConfig:
    config, problems = check_config(f"media:\n  max_bytes_per_item: 1MiB\n  fetch: {text}\n")
    assert problems == []
    assert config is not None
    return config


def test_the_defaults_are_those_of_the_part() -> None:
    assert fetch_settings(ClusterConfig()) == FetchSettings()
    assert isinstance(build_fetcher(ClusterConfig()), FetchProcess)


def test_every_key_reaches_the_fetcher(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    text = (
        "{schemes: [https, http, file], allowed_hosts: ['*.example.com', '10.1.2.3'], denied_hosts: [bad.example.com], "
        "allowed_networks: [10.1.0.0/16, 'fd00::/8'], denied_networks: ['2606:4700:64::/96'], "
        "allowed_ports: [443, 8443], max_redirects: 1, max_request_bytes: 2MiB, "
        "connect_timeout_s: 1, read_timeout_s: 2, total_timeout_s: 3, wait_s: 4, "
        "max_concurrent: 5, max_waiting: 7, in_flight_bytes: 6MiB, cache_bytes: 0, memory_bytes: 512MiB, "
        f"file_root: '{tmp_path}', ca_file: '{tmp_path}/ca.pem'}}"
    )
    assert fetch_settings(config_of(text)) == FetchSettings(
        schemes=("https", "http", "file"),
        allowed_hosts=("*.example.com", "10.1.2.3"),
        denied_hosts=("bad.example.com",),
        allowed_networks=("10.1.0.0/16", "fd00::/8"),
        denied_networks=("2606:4700:64::/96",),
        allowed_ports=(443, 8443),
        max_redirects=1,
        max_request_bytes=2 * 2**20,
        connect_timeout_s=1.0,
        read_timeout_s=2.0,
        total_timeout_s=3.0,
        wait_s=4.0,
        max_concurrent=5,
        max_waiting=7,
        in_flight_bytes=6 * 2**20,
        cache_bytes=0,
        memory_bytes=512 * 2**20,
        file_root=tmp_path,
        ca_file=tmp_path / "ca.pem",
        media_limits=MediaLimits(max_bytes_per_item=2**20),
    )


def test_check_says_what_is_fetched() -> None:
    def words(text: str) -> str:
        return config_of(text).media.fetch.summary().removeprefix("media by URL: ")

    assert words("{}") == "https from any host with public addresses, on the ports 80, 443"
    assert words("{enabled: false}") == "none are fetched"
    assert words("{allowed_hosts: [a.com, b.com], schemes: [https, http], allowed_networks: [10.1.0.0/16]}") == (
        "https and http from a.com, b.com with public addresses and in 10.1.0.0/16, on the ports 80, 443"
    )
    assert words("{denied_hosts: ['*.a.com'], allowed_ports: [443], schemes: [https, file], file_root: /srv}") == (
        "https from any host except *.a.com with public addresses, on the ports 443; files under /srv"
    )
    assert words("{denied_networks: [1.1.1.0/24]}") == (
        "https from any host with public addresses but not in 1.1.1.0/24, on the ports 80, 443"
    )


def test_patterns_of_hosts_take_the_form_of_hosts() -> None:
    text = "{denied_hosts: [Example.COM., '*.Example.com.', '2001:DB8:0:0::7', '*', a_b.test]}"
    expected = ("example.com", "*.example.com", "2001:db8::7", "*", "a_b.test")
    assert fetch_settings(config_of(text)).denied_hosts == expected


def test_fetching_can_be_turned_off() -> None:
    assert build_fetcher(config_of("{enabled: false}")) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{allowed_networks: [10.1.2.3/16]}", "not a network in CIDR notation"),
        ("{allowed_networks: [example.com]}", "not a network in CIDR notation"),
        ("{allowed_hosts: ['https://example.com']}", "allowed_hosts"),
        ("{allowed_hosts: ['a.*.com']}", "allowed_hosts"),
        ("{denied_networks: [10.1.2.3/16]}", "not a network in CIDR notation"),
        ("{denied_hosts: ['example.com:443']}", "matches no host"),
        ("{denied_hosts: ['127.1']}", "matches no host"),
        ("{denied_hosts: ['example..com']}", "matches no host"),
        ("{denied_hosts: ['-a.com']}", "matches no host"),
        ("{denied_hosts: ['*.10.0.0.1']}", "nothing lies below an address"),
        ("{denied_hosts: ['*.2001:db8::7']}", "nothing lies below an address"),
        ("{allowed_ports: [0]}", "allowed_ports"),
        ("{schemes: [ftp]}", "schemes"),
        ("{schemes: [https, file]}", "file_root"),
        ("{file_root: /srv}", "file_root"),
        ("{max_redirects: -1}", "max_redirects"),
        ("{proxy: x}", "proxy"),
    ],
)
def test_check_names_a_problem(text: str, words: str) -> None:
    config, problems = check_config(f"media:\n  fetch: {text}\n")
    assert config is None
    assert any(words in str(problem) for problem in problems)


@pytest.mark.parametrize("text", ["{schemes: [file], file_root: /missing/folder}", "{ca_file: /missing/ca.pem}"])
def test_a_missing_file_is_named_at_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match="/missing/"):
        fetch_settings(config_of(text))
