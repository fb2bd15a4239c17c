"""Tests which keys of the config may change while a cluster serves, and that a router takes the new values."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from pathlib import Path

import pytest
import yaml
from composed_router import composed_router

from deploy.compose import load_model, router_config
from deploy.config import ClusterConfig
from deploy.config_file import check_config, keys_of, section_in
from deploy.live_config import (
    LIVE_SECTIONS,
    NAMED_TO_LIVE_KEYS,
    SECTION_TO_LIVE_KEYS,
    LiveConfig,
    live_keys_yaml,
    live_values,
    with_live_values,
)
from deploy.logs import set_levels
from fabric.contracts import ConfigError, Overloaded, Unauthorized
from fabric.transport import LocalPlane
from router.service import RouterService

DIGEST, OTHER_DIGEST = "a" * 64, "b" * 64


def parsed(**sections: object) -> ClusterConfig:
    config, problems = check_config(yaml.safe_dump(sections))
    assert config is not None, problems
    return config


def test_every_live_key_exists() -> None:
    sections = keys_of(ClusterConfig)
    assert set(LIVE_SECTIONS) <= sections.keys()
    for name, keys in (SECTION_TO_LIVE_KEYS | NAMED_TO_LIVE_KEYS).items():
        inner = section_in(sections[name].annotation)
        assert inner is not None
        assert set(keys) <= keys_of(inner).keys(), name


def test_the_live_values_of_a_config_give_the_same_config() -> None:
    links = [{"from": {"host": "a*"}, "to": {"kind": "worker"}, "class": "tcp"}]
    whole = parsed(
        router={"max_in_flight": 7, "links": links},
        tenants={"shop": {"api_key_digests": [DIGEST], "tokens_per_minute": 6000}},
        logging={"level": "debug", "levels": {"uvicorn": "error"}},
        access={"operator_key_digests": [OTHER_DIGEST]},
        more_workers={"b": {"replicas": 3, "num_blocks": 99}},
    )
    values = json.loads(json.dumps(live_values(whole)))
    assert values["more_workers"] == {"b": {"replicas": 3}}
    assert values["router"]["max_in_flight"] == 7
    assert "links" not in values["router"]
    assert with_live_values(parsed(router={"links": links}, more_workers={"b": {"num_blocks": 99}}), values) == whole


def test_what_a_change_leaves_out_keeps_its_value() -> None:
    config = parsed(router={"max_in_flight": 7, "max_num_choices": 3}, limits={"max_messages": 11})
    changed = with_live_values(config, {"router": {"max_in_flight": 9}})
    assert (changed.router.max_in_flight, changed.router.max_num_choices, changed.limits.max_messages) == (9, 3, 11)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workers": {"num_blocks": 9}}, "workers.num_blocks: the key can't change while the cluster serves"),
        ({"more_workers": {"b": {"num_blocks": 9}}}, "more_workers.b.num_blocks: the key can't change while"),
        ({"more_workers": {"b": {"blocks": 9}}}, "more_workers.b.blocks: the key is unknown"),
        ({"more_workers": {"c": {"replicas": 9}}}, "more_workers.c: an entry comes only by a restart"),
        ({"more_workers": {"b": 3}}, "more_workers.b: must be a mapping of keys"),
        ({"more_workers": {"b": {"replicas": 0}}}, "more_workers.b.replicas: "),
        ({"router": {"ray_resources": {}}}, "router.ray_resources: the key can't change while the cluster serves"),
        ({"encoders": {"replicas": 0}}, "encoders.replicas: a cluster gets its first encoder, or loses its last"),
        ({"limits": {"max_lexer_steps": 200_000}}, "limits.max_lexer_steps: the key can't change"),
        ({"router": {"max_in_flights": 2}}, "router.max_in_flights: the key is unknown"),
        ({"routers": {"max_in_flight": 2}}, "routers.max_in_flight: the key is unknown"),
        ({"routers": 3}, "routers: the key is unknown"),
        ({"router": 3}, "router: must be a mapping of keys"),
        ({"router": {"max_in_flight": 0}}, "router.max_in_flight"),
        ({"tenants": {"shop": {"wait": 1}}}, "tenants.shop.wait: the key is unknown"),
        ({"access": {"operator_key_digests": [DIGEST]}}, "access has keys, but tenants names nobody"),
        ([], "must be a mapping of sections, not list"),
        (None, "must be a mapping of sections, not NoneType"),
    ],
)
def test_what_can_not_change_is_named(values: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        with_live_values(parsed(more_workers={"b": {}}), values)


def test_all_flaws_of_a_change_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        with_live_values(ClusterConfig(), {"workers": {"device": "cuda"}, "media": {"max_image_pixels": 1}})
    assert "workers.device" in refused.value.message
    assert "media.max_image_pixels" in refused.value.message


def test_a_wrong_change_leaves_the_former_values_in_force(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[int, int]] = []

    def apply(before: ClusterConfig, after: ClusterConfig) -> None:
        seen.append((before.router.max_in_flight, after.router.max_in_flight))

    live = LiveConfig(parsed(router={"max_in_flight": 7}))
    with pytest.raises(ConfigError, match="max_in_flight"):
        live.change({"router": {"max_in_flight": -1}}, apply)
    assert live.change({"router": {"max_in_flight": 8}}, apply)
    with caplog.at_level(logging.ERROR, "deploy.live_config"):
        assert not live.change({"router": {"max_in_flight": -1}}, apply)
    assert live.current.router.max_in_flight == 8
    assert "max_in_flight" in live.flaw
    assert "max_in_flight" in caplog.text
    assert live.change({}, apply), "what a change no longer names is as at the start"
    assert (live.current.router.max_in_flight, live.flaw) == (7, "")
    assert seen == [(7, 8), (8, 7)]


def test_the_list_for_the_chart_holds_the_same_keys() -> None:
    found = yaml.safe_load(live_keys_yaml())
    assert found["sections"] == list(LIVE_SECTIONS)
    assert {name: tuple(keys) for name, keys in found["keys"].items()} == SECTION_TO_LIVE_KEYS
    assert {name: tuple(keys) for name, keys in found["named"].items()} == NAMED_TO_LIVE_KEYS


def test_levels_of_loggers_follow_a_change() -> None:
    named = logging.getLogger("deploy.test_live_config.named")
    ours = logging.getLogger("router")
    levels = ours.level, logging.getLogger("deploy").level
    try:
        before = parsed(logging={"level": "debug", "levels": {named.name: "error"}}).logging
        set_levels(before)
        assert (ours.level, named.level) == (logging.DEBUG, logging.ERROR)
        set_levels(parsed(logging={"level": "warning"}).logging, before)
        assert (ours.level, named.level) == (logging.WARNING, logging.NOTSET)
    finally:
        ours.setLevel(levels[0])
        for name in ("deploy", "encoder_pool", "fabric", "kv_index", "llm_workers", "modalities", "loadtest"):
            logging.getLogger(name).setLevel(levels[1])


# ------------------------------------------------------------ a router


def built(model_dir: Path, plane: LocalPlane, **sections: object) -> tuple[RouterService, LiveConfig]:
    config = parsed(model={"path": str(model_dir)}, **({"media": {"probe_processes": 0}} | sections))
    return composed_router(config, model_dir, plane), LiveConfig(config)


def change(service: RouterService, live: LiveConfig, model_dir: Path, values: object) -> bool:
    return live.change(
        values, lambda _, config: service.reconfigure(router_config(config, load_model(config, model_dir)))
    )


def test_a_router_takes_new_limits_and_keeps_what_is_in_flight(model_dir: Path, plane: LocalPlane) -> None:
    service, live = built(model_dir, plane, router={"max_in_flight": 3})
    tickets = [service.admission.admit() for _ in range(3)]
    assert change(service, live, model_dir, {"router": {"max_in_flight": 2}})
    tickets.pop().release()
    with pytest.raises(Overloaded, match="takes at most 2"):
        service.admission.admit()
    tickets.pop().release()
    service.admission.admit().release()
    assert change(service, live, model_dir, {})
    assert service.config.max_in_flight == 3
    for each in tickets:
        each.release()
    assert service.admission.num_in_flight == 0


def test_tenants_and_their_keys_change_together(model_dir: Path, plane: LocalPlane, tmp_path: Path) -> None:
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("one", "two")}
    service, live = built(model_dir, plane)
    assert service.keys.is_open
    first = {"shop": {"api_key_digests": [digests["one"]], "max_in_flight": 1}}
    assert change(service, live, model_dir, {"tenants": first})
    caller = service.keys.find("one")
    ticket = service.admission.admit(caller)
    second = {"desk": {"api_key_digests": [digests["two"]], "weight": 3, "requests_per_minute": 60}}
    assert change(service, live, model_dir, {"tenants": second})
    with pytest.raises(Unauthorized):
        service.keys.find("one")
    assert service.keys.find("two").tenant.weight == 3
    ticket.release()
    assert service.admission.num_in_flight == 0
    missing = tmp_path / "keys"
    assert not change(service, live, model_dir, {"tenants": second, "access": {"keys_file": str(missing)}})
    assert "can't be used" in live.flaw
    assert service.keys.find("two").tenant.name == "desk", "the former keys stay"
    missing.write_text(f"{digests['one']} desk late\n")
    assert change(service, live, model_dir, {"tenants": second, "access": {"keys_file": str(missing)}})
    assert service.keys.find("one").key_name == "late"


def test_a_modality_may_be_refused_later_but_not_be_begun(model_dir: Path, plane: LocalPlane) -> None:
    sections = {"media": {"probe_processes": 0, "limit_mm_per_prompt": {"audio": 0}}}
    service, live = built(model_dir, plane, **sections)
    assert service.modalities == ("image", "video")
    assert change(service, live, model_dir, {"media": {"limit_mm_per_prompt": {"audio": 0, "image": 0}}})
    assert service.modalities == ("video",)
    assert not change(service, live, model_dir, {"media": {"limit_mm_per_prompt": {}}})
    assert "started without audio" in live.flaw
    assert service.modalities == ("video",), "nothing has changed"


def test_limits_of_a_request_reach_the_prompt_builder(model_dir: Path, plane: LocalPlane) -> None:
    service, live = built(model_dir, plane)
    values = {
        "limits": {"max_messages": 5, "max_schema_depth": 3},
        "media": {"fps": 4.0},
        "router": {"min_priority": 0},
    }
    assert change(service, live, model_dir, values)
    config = service.config
    assert (config.max_messages, config.grammar.max_depth, config.video_options.fps) == (5, 3, 4.0)
    assert service._prompt_builder._config == service._context.config == config
    assert service._prompt_builder._grammars._limits.max_depth == 3
