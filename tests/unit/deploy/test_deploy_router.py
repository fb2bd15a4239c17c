"""Tests the router that a config describes: it is composed on the demo model's files, and the values of the config
reach it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from composed_router import composed_router

from deploy.compose import http_limits
from deploy.config import ClusterConfig
from deploy.config_file import check_config
from deploy.http_limits import HttpLimits
from fabric.transport import LocalPlane
from modalities.text import CompileLimits
from router.router_config import GrammarLimits, RateQuota, RouterConfig


def composed(directory: Path, plane: LocalPlane, **sections: object) -> RouterConfig:
    text = yaml.safe_dump({"model": {"path": str(directory)}, "media": {"probe_processes": 0}} | sections)
    config, problems = check_config(text)
    assert isinstance(config, ClusterConfig), problems
    return composed_router(config, directory, plane).config


def test_a_modality_keeps_its_time_to_be_encoded_unless_it_is_given_another(model_dir: Path, plane: LocalPlane) -> None:
    media = {"probe_processes": 0, "encode_timeout_ms": {"video": 120_000}}
    config = composed(model_dir, plane, media=media)
    found = [config.encode_timeout_s(modality) for modality in ("image", "audio", "video", "point_cloud")]
    assert found == [10.0, 20.0, 120.0, 60.0]
    config = composed(model_dir, plane)
    assert [config.encode_timeout_s(modality) for modality in ("image", "audio", "video")] == [10.0, 20.0, 60.0]


def test_what_is_written_reaches_the_router(model_dir: Path, plane: LocalPlane) -> None:
    server = {"max_body_bytes": "3MiB"}
    router = {
        "max_in_flight": 7,
        "max_num_choices": 3,
        "min_priority": -2,
        "heartbeat_s": 0.25,
        "lease_s": 9.0,
        "dispatch_timeout_s": 33.0,
        "capacity_wait_s": 44.0,
    }
    media = {"probe_processes": 0, "on_encode_failure": "reduce", "max_frames": 11, "limit_mm_per_prompt": {"image": 2}}
    config = composed(model_dir, plane, server=server, router=router, media=media, workers={"block_size": 32})
    for name, value in router.items():
        assert getattr(config, name) == value, name
    assert config.max_body_bytes == 3 * 2**20
    assert (config.block_size, config.on_encode_failure, config.video_options.max_frames) == (32, "reduce", 11)
    assert config.max_items_per_prompt["image"] == 2


def test_limits_and_access_reach_the_router(model_dir: Path, plane: LocalPlane, tmp_path: Path) -> None:
    limits = {
        "max_messages": 11,
        "max_content_parts": 12,
        "max_media_items": 13,
        "max_stop_strings": 14,
        "max_stop_chars": 15,
        "max_stop_token_ids": 16,
    }
    grammar = {
        "max_grammar_bytes": 21,
        "max_schema_depth": 22,
        "max_grammar_choices": 23,
        "max_grammar_symbols": 24,
        "max_lexer_fuel": 25,
        "max_lexer_states": 1026,
        "max_lexer_steps": 100_027,
        "max_pattern_bytes": 28,
        "grammar_timeout_s": 2.5,
    }
    media = {"probe_processes": 0, "max_audio_bytes": "3MiB", "max_decoded_bytes": "5MiB"}
    keys = tmp_path / "keys"
    keys.write_text(f"{'ab' * 32} shop web\n")
    keys.chmod(0o600)
    access: dict[str, object] = {"keys_file": str(keys), "operator_key_digests": ["cd" * 32], "burst_s": 12.0}
    access |= {"allowed_hosts": ["Weft.example"], "allowed_origins": ["https://Chat.example"]}
    shop = {"requests_per_minute": 1.5, "tokens_per_minute": 2.5, "media_seconds_per_minute": 3.5}
    config = composed(
        model_dir, plane, limits=limits | grammar, media=media, access=access, tenants={"bank": {}, "shop": shop}
    )
    assert {name: getattr(config, name) for name in limits} == limits
    assert config.grammar == GrammarLimits(21, 22, 23, CompileLimits(24, 25, 1026, 100_027), 2.5, 28)
    assert (config.media_limits.max_audio_bytes, config.media_limits.max_decoded_bytes) == (3 * 2**20, 5 * 2**20)
    assert (config.keys_file, config.operator_digests, config.rate_burst_s) == (keys, ("cd" * 32,), 12.0)
    assert config.allowed_hosts is not None
    assert config.allowed_hosts[1:] == ("weft.example",)
    assert config.allowed_origins == ("https://chat.example",)
    assert [each.rates for each in config.tenants] == [RateQuota(), RateQuota(1.5, 2.5, 3.5)]


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_transfers_are_estimated_for_features_of_the_models_dtype(
    model_dir: Path, plane: LocalPlane, dtype: str, itemsize: int
) -> None:
    config = composed(model_dir, plane, model={"path": str(model_dir), "dtype": dtype})
    assert config.feature_itemsize == itemsize


def test_the_limits_of_clients_reach_the_http_server() -> None:
    server = {
        "max_header_bytes": "8KiB",
        "max_connections": 7,
        "header_timeout_s": 1.5,
        "body_timeout_s": 2.5,
        "min_body_bytes_per_s": 99,
        "write_timeout_s": 3.5,
    }
    limits = http_limits(ClusterConfig.model_validate({"server": server}))
    assert {name: getattr(limits, name) for name in server} == server | {"max_header_bytes": 8192}
    assert http_limits(ClusterConfig()) == HttpLimits()
