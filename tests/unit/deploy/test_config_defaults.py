"""Tests that a default stands in one place: at the part that receives a config key's value, or in the config where no
part has one."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from deploy import compose, config, request_config, workers_config
from deploy.config import ClusterConfig

OWNERS = {
    each.__name__: each
    for each in (
        compose.EncoderConfig,
        compose.WorkerConfig,
        compose.RouterConfig,
        compose.PlannerSettings,
        compose.HttpLimits,
        compose.MediaLimits,
        compose.MediaOptions,
        compose.Speculation,
    )
}


def handed_on() -> list[tuple[str, str, str]]:
    """Returns (owner, its field, config key) for every value that `compose` passes on unchanged."""
    found = []
    for call in ast.walk(ast.parse(Path(compose.__file__).read_text())):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in OWNERS:
            found += [
                (call.func.id, keyword.arg, keyword.value.attr)
                for keyword in call.keywords
                if keyword.arg is not None and isinstance(keyword.value, ast.Attribute)
            ]
    return found


def taken_from_owners() -> dict[str, list[tuple[str, str]]]:
    """Returns, for each config key, the (owner, its field) pairs from which its default is taken."""
    taken: dict[str, list[tuple[str, str]]] = {}
    trees = [ast.parse(Path(str(module.__file__)).read_text()) for module in (config, request_config, workers_config)]
    for statement in (statement for tree in trees for statement in ast.walk(tree)):
        if not isinstance(statement, ast.AnnAssign) or statement.value is None:
            continue
        for call in ast.walk(statement.value):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "default_of":
                owner, field = call.args
                assert isinstance(statement.target, ast.Name)
                assert isinstance(owner, ast.Name)
                assert isinstance(field, ast.Constant)
                taken.setdefault(statement.target.id, []).append((owner.id, str(field.value)))
    return taken


def has_default(owner: str, name: str) -> bool:
    (field,) = (each for each in dataclasses.fields(OWNERS[owner]) if each.name == name)
    return field.default is not dataclasses.MISSING


@pytest.mark.parametrize(("owner", "field", "key"), handed_on())
def test_what_is_handed_on_has_its_default_at_its_owner_alone(owner: str, field: str, key: str) -> None:
    if has_default(owner, field):
        assert (owner, field) in taken_from_owners().get(key, []), f"{key}: stated in the config too"


def test_the_test_sees_them() -> None:
    assert len(handed_on()) >= 35
    assert ("EncoderConfig", "lease_s", "feature_lease_s") in handed_on()


def test_the_three_that_differed() -> None:
    defaults = ClusterConfig()
    assert defaults.router.lease_s == compose.RouterConfig("m", capacity_wait_s=1, block_size=1).lease_s == 5.0
    encoder = compose.EncoderConfig(("image",), model_dir="m")
    assert defaults.encoders.decode_processes == encoder.num_decode_processes == 2
    with pytest.raises(TypeError, match="modalities"):
        compose.EncoderConfig()  # type: ignore[call-arg]  # The missing argument is the test.


def test_every_budget_has_a_key() -> None:
    section = ClusterConfig.model_validate(
        {"router": {"max_bodies_bytes": "2GiB", "max_index_blocks": 7, "max_index_items": 5}}
    ).router
    assert (section.max_bodies_bytes, section.max_index_blocks, section.max_index_items) == (2 * 2**30, 7, 5)
