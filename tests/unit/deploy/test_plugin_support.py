"""Tests what `deploy.testing` offers to the author of a plugin, as far as it needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.demo.build import demo_checkpoint
from deploy.testing import TinyFamily, small_config, write_demo_variant
from fabric.contracts import ConfigError
from modalities.media import ImagePlugin
from modalities.registry import Registry


def test_sections_are_added_to_the_small_config_key_by_key() -> None:
    config = small_config(workers={"num_blocks": 99}, router={"max_in_flight": 7})
    assert (config.workers.replicas, config.workers.num_blocks, config.router.max_in_flight) == (1, 99, 7)
    assert (config.encoders.replicas, config.encoders.decode_processes, config.media.probe_processes) == (1, 0, 0)


def test_a_variant_of_the_demo_differs_in_its_architecture_and_in_its_template(tmp_path: Path) -> None:
    model = write_demo_variant(tmp_path / "model", "MyArchitecture", "hologram")
    changed = [file.name for file in demo_checkpoint().iterdir() if not (model / file.name).samefile(file)]
    assert sorted(changed) == ["chat_template.jinja", "config.json"]
    demo = json.loads((demo_checkpoint() / "config.json").read_text())
    assert json.loads((model / "config.json").read_text()) == demo | {"architectures": ["MyArchitecture"]}
    assert "('image', 'image_url', 'hologram')" in (model / "chat_template.jinja").read_text()
    with pytest.raises(FileExistsError):
        write_demo_variant(model, "MyArchitecture")


def test_a_registry_forgets_what_was_registered_meanwhile_even_after_an_error() -> None:
    registry = Registry()

    def fail() -> None:
        with registry.restored():
            registry.register_modality(ImagePlugin())
            registry.register_family(("MyArchitecture",), lambda _: TinyFamily())
            assert (registry.modalities, registry.architectures) == (("image",), ("MyArchitecture",))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (registry.modalities, registry.architectures) == ((), ())
    assert registry.modality_of_part("image_url") is None


def test_the_tiny_family_says_that_it_has_no_weights() -> None:
    with pytest.raises(ConfigError, match="no weights"):
        TinyFamily().load_encoder(Path(), "cpu", "float32", ("image",))
