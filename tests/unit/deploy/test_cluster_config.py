"""Tests the cluster config: an error names what is wrong and its place."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

import deploy.config
from deploy.compose import link_overrides, max_items_per_prompt, media_limits, mel_device, tenants, video_options
from deploy.config import ClusterConfig
from deploy.config_file import check_config, load_config
from deploy.config_values import parse_bytes
from encoder_pool.encoder_config import DEFAULT_LIMITS
from fabric.contracts import ConfigError
from modalities.family import MediaOptions
from modalities.media import MediaLimits
from router.planning import LinkClass, LinkOverride, MemberSelector
from router.router_config import MODALITY_TO_ENCODE_TIMEOUT_MS, RateQuota, Tenant


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


def test_links_are_overridden_by_pairs_of_selectors() -> None:
    config, found = check_config(
        """
        router:
          costs_file: /var/lib/weft/costs.json
          links:
            - from: {host: "enc-*", labels: {rack: "r?"}}
              to: {member: "w-1", kind: worker}
              class: rdma
            - class: tcp
        """
    )
    assert found == []
    assert config is not None
    assert config.router.costs_file == Path("/var/lib/weft/costs.json")
    assert link_overrides(config) == (
        LinkOverride(
            MemberSelector(host="enc-*", labels=(("rack", "r?"),)),
            MemberSelector("w-1", kind="worker"),
            LinkClass.RDMA,
        ),
        LinkOverride(MemberSelector(), MemberSelector(), LinkClass.TCP),
    )


DIGEST = "ab" * 32


def test_tenants_reach_the_router() -> None:
    shop_keys = f"api_key_digests: [{DIGEST}], weight: 2, max_bodies_bytes: 1MiB, cache_salt: s, tokens_per_minute: 90"
    config, found = check_config(f"tenants: {{shop: {{{shop_keys}}}, public: {{}}}}")
    assert found == []
    assert config is not None
    rates = RateQuota(tokens_per_minute=90.0)
    shop = Tenant("shop", (DIGEST,), weight=2.0, max_bodies_bytes=2**20, cache_salt=":s", rates=rates)
    assert tenants(config) == (shop, Tenant("public", cache_salt="public"))
    assert tenants(ClusterConfig()) == ()


def test_tenants_may_have_their_keys_in_a_file_and_share_caches_if_they_say_so() -> None:
    salts = "a: {}, b: {cache_salt: a}, c: {cache_salt: ''}, d: {cache_salt: a}"
    config, found = check_config(f"access: {{keys_file: keys.txt}}\ntenants: {{{salts}}}")
    assert found == []
    assert config is not None
    assert [each.cache_salt for each in tenants(config)] == ["a", ":a", "", ":a"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tenants: {a: {}, b: {}}", "the tenants a, b have no api_key_digests"),
        (
            f"tenants: {{a: {{api_key_digests: [{DIGEST}]}}, b: {{api_key_digests: [{DIGEST}]}}}}",
            "two tenants have the same digest",
        ),
        (
            f"tenants: {{anonymous: {{api_key_digests: [{DIGEST}]}}}}",
            "the tenant anonymous sends requests without a key",
        ),
        (
            f"access: {{operator_key_digests: [{DIGEST}]}}\ntenants: {{a: {{api_key_digests: [{DIGEST}]}}}}",
            "access.operator_key_digests has a digest of a tenant",
        ),
        (f"access: {{operator_key_digests: [{DIGEST}]}}", "tenants names nobody who may send requests"),
        ("access: {keys_file: keys}", "tenants names nobody who may send requests"),
        ("tenants: {a: {tokens_per_minute: 0}}", "tenants.a.tokens_per_minute"),
        ("tenants: {a: {wieght: 2}}", "tenants.a.wieght: the key is unknown; did you mean weight?"),
        ("tenants: {a: {api_key_digests: [sk-secret]}}", "tenants.a.api_key_digests.0"),
        ("tenants: {a: {weight: 0}}", "tenants.a.weight"),
    ],
)
def test_problems_of_tenants_are_named(text: str, expected: str) -> None:
    (problem,) = problems(text)
    assert expected in problem


def test_shipped_configs_are_sound() -> None:
    shipped = sorted(Path(deploy.config.__file__).with_name("configs").glob("*.yaml"))
    assert len(shipped) == 4
    configs = {path.name: load_config(path) for path in shipped}
    assert configs["gpu-node.yaml"].workers.engine == configs["one-gpu.yaml"].workers.engine == "vllm"
    assert configs["gpu-speech.yaml"].media.limit_mm_per_prompt == {"image": 16, "video": 4, "audio": 4}
    assert configs["laptop.yaml"].media.on_encode_failure == "error"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "router:\n  replicas: 0\n",
            "line 2, column 3: router.replicas: the value must be greater than or equal to 1, not 0",
        ),
        (
            "router:\n  dispatch_timeout_s: 5\n",
            "line 2, column 3: router.dispatch_timeout_s: the value must be greater than 5, not 5",
        ),
        ("wrokers: {}\n", "line 1, column 1: wrokers: the key is unknown; did you mean workers?"),
        (
            "encoders:\n  device: tpu\n",
            "line 2, column 3: encoders.device: the value must be 'cpu' or 'cuda', not \"tpu\"",
        ),
        (
            "model: {}\nmodel: {}\n",
            "line 2, column 1: (file): the file is not valid YAML: the key 'model' occurs twice",
        ),
        (
            "router:\n  links:\n    - from: {hots: a}\n      class: rdma\n",
            "line 3, column 14: router.links.0.from.hots: the key is unknown; did you mean host?",
        ),
        (
            "router:\n  links:\n    - {from: {host: a}, class: pigeon}\n",
            "line 3, column 25: router.links.0.class: the value must be 'same_process', 'nvlink', 'same_host', 'rdma' "
            "or 'tcp', not \"pigeon\"",
        ),
        (
            "router:\n  links:\n    - class: tcp\n      from: {kind: worker}\n",
            "line 3, column 7: router.links.0: features travel from encoders to workers, so no link begins at a worker",
        ),
        (
            "router:\n  links:\n    - class: tcp\n      to: {kind: encoder}\n",
            "line 3, column 7: router.links.0: features travel from encoders to workers, so no link ends at an encoder",
        ),
        ("- 1\n", "line 1, column 1: (file): the file must be a mapping of keys, not an array"),
        (
            "workers:\n  device: cuda\n",
            "(file): workers.device is cuda, but workers.gpus_per_replica is 0; set both for a GPU",
        ),
        (
            "workers: {device: cuda, gpus_per_replica: 0.5}\n",
            "(file): workers.gpus_per_replica is 0.5, which shares a GPU; allow this with allow_shared_gpu: true",
        ),
    ],
)
def test_problem_is_named_with_line_and_key(text: str, expected: str) -> None:
    assert problems(text) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("media:\n  fps: 0\n", "line 2, column 3: media.fps: the value must be greater than 0, not 0"),
        ("media:\n  framess: 3\n", "line 2, column 3: media.framess: the key is unknown"),
        ("media:\n  on_encode_failure: hope\n", "media.on_encode_failure: the value must be 'error', 'reduce' or"),
        ("media:\n  limit_mm_per_prompt: {smell: 1}\n", "the modality 'smell' is unknown; known modalities are image"),
        ("media:\n  limit_mm_per_prompt: {image: -1}\n", "the value must be greater than or equal to 0, not -1"),
        ("media:\n  encode_timeout_ms: {image: 0}\n", "the value must be greater than or equal to 1, not 0"),
    ],
)
def test_problems_of_media_are_named(text: str, expected: str) -> None:
    (problem,) = problems(text)
    assert expected in problem


def media_config(text: str) -> ClusterConfig:
    config, _ = check_config(text)
    assert config is not None
    return config


def test_media_settings_reach_the_router() -> None:
    config = media_config("media: {fps: 1, max_frames: 9, max_video_tokens: 77, sampling: uniform, keep_fraction: 0.5}")
    assert video_options(config) == MediaOptions("uniform", 1.0, 9, 77, keep_fraction=0.5)
    assert media_limits(media_config("")) == MediaLimits()
    assert media_limits(media_config("media: {max_audio_seconds: 5, max_bytes_per_item: 1MiB}")) == MediaLimits(
        max_bytes_per_item=2**20, max_audio_seconds=5.0
    )
    assert video_options(media_config("")) == MediaOptions()


class _Family(NamedTuple):
    max_items: dict[str, int]


@pytest.mark.parametrize(
    ("text", "served"),
    [
        ("encoders: {modalities: [image, video]}", {"image": 8, "video": 4, "audio": 0}),
        ("encoders: {modalities: [image, audio]}", {"image": 8, "video": 0, "audio": 2}),
        ("encoders: {replicas: 0}", {"image": 0, "video": 0, "audio": 0}),
        (
            "{encoders: {modalities: [image, video]}, media: {limit_mm_per_prompt: {image: 3, video: 9}}}",
            {"image": 3, "video": 4, "audio": 0},
        ),
    ],
)
def test_what_is_served_is_what_encoders_have_loaded_lowered_by_the_limits(text: str, served: dict[str, int]) -> None:
    family = _Family({"image": 8, "video": 4, "audio": 2})
    assert max_items_per_prompt(media_config(text), family) == served


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("encoders: {device: cuda, gpus_per_replica: 1}", "cuda"),
        ("encoders: {device: cpu}", ""),
        ("encoders: {device: cpu, mel_on_device: on}", "cpu"),
        ("encoders: {device: cuda, gpus_per_replica: 1, mel_on_device: off}", ""),
    ],
)
def test_spectrograms_are_made_on_a_gpu_unless_told_otherwise(text: str, device: str) -> None:
    """The config does not read `on` and `off` as booleans here, although YAML does."""
    config, _ = check_config(text)
    assert config is not None
    assert mel_device(config.encoders) == device


def test_switches_are_words_or_what_yaml_makes_of_them() -> None:
    for text in ("workers: {cuda_graphs: off}", 'workers: {cuda_graphs: "off"}'):
        assert problems(text) == []
    assert len(problems("encoders: {mel_on_device: 1}")) == 1
    assert len(problems("workers: {cuda_graphs: on}")) == 1


def test_all_problems_are_reported_at_once() -> None:
    assert len(problems("router: {replicas: 0}\nserver: {port: 99999}\n")) == 2


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("2KiB", 2048), ("1.5 GiB", 3 * 2**29), ("3MB", 3_000_000)])
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_a_missing_file_is_a_config_error(tmp_path: object) -> None:
    from pathlib import Path

    with pytest.raises(ConfigError, match="can't be read"):
        load_config(Path(str(tmp_path)) / "none.yaml")


def test_limits_of_decoding_are_by_modality_or_one_for_all() -> None:
    config, problems = check_config("encoders: {decode_timeout_s: 7, decode_cpu_s: {video: 90}}")
    assert not problems
    assert config is not None
    assert config.encoders.decode_timeout_s == {"image": 7.0, "audio": 7.0, "video": 7.0}
    assert config.encoders.decode_cpu_s == {"video": 90.0}
    for text in ("{decode_cpu_s: 0}", "{decode_cpu_s: true}", "{decode_timeout_s: {smell: 3}}"):
        assert check_config(f"encoders: {text}")[0] is None


def test_an_item_runs_out_of_processor_time_before_it_is_late_and_is_late_before_its_router_gives_up() -> None:
    for modality, timeout_ms in MODALITY_TO_ENCODE_TIMEOUT_MS.items():
        cpu_s, timeout_s = DEFAULT_LIMITS.cpu_s(modality), DEFAULT_LIMITS.timeout_s(modality)
        assert cpu_s < timeout_s < timeout_ms / 1000


def test_the_port_for_metrics_is_one_that_nothing_else_of_the_cluster_uses() -> None:
    (found,) = problems("{server: {port: 9467}, network: {metrics_port: 9467}}")
    assert "network.metrics_port is 9467, which is server.port too" in found
    (found,) = problems("network: {ports: 21000-21999, metrics_port: 21500}")
    assert "network.metrics_port is 21500, which lies in network.ports (21000-21999)" in found
    assert problems("network: {ports: 21000-21999, metrics_port: 9467}") == []
    assert problems("{server: {port: 0}, network: {metrics_port: 0}}") == []
