"""Tests the registry: it has built-in entries, accepts others from outside, and refuses what it does not know."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from modalities_files import TOKENS, encode, picture, thinker_config, write_config

from fabric.contracts import ConfigError, InvalidMedia, InvalidRequest, UnsupportedModality
from modalities.families.qwen3_omni import Qwen3OmniFamily
from modalities.family import ImageHeader, MediaHeader
from modalities.media import MediaLimits, plan_media
from modalities.media.plugin import decode_data_url, part_url
from modalities.registry import PLUGIN_GROUP, REGISTRY, Registry, builtin_registry


class SketchPlugin:
    """A `SketchPlugin` serves a toy modality: a text file of dots and dashes, with one line per row."""

    modality = "sketch"
    part_types = ("sketch_url", "input_sketch")
    needs_process = False

    def parse(self, part: Mapping[str, object], param: str, limits: MediaLimits) -> bytes:
        return decode_data_url(part_url(part, "sketch_url", param), param, limits.max_bytes_per_item)

    def probe(self, data: bytes, param: str) -> MediaHeader:
        rows = data.decode().split("\n")
        if set(data) - set(b".-\n"):
            raise InvalidMedia(f"{param}: not a sketch", param=param)
        return ImageHeader("SKETCH", len(rows[0]), len(rows), "1")

    def validate(self, header: MediaHeader, limits: MediaLimits, param: str) -> None:
        assert isinstance(header, ImageHeader)
        if header.width > 3:
            raise InvalidMedia(f"{param}: too wide", param=param)


def test_a_modality_is_added_from_outside() -> None:
    registry = builtin_registry()
    registry.register_modality(SketchPlugin())
    plugin = registry.modality_of_part("input_sketch")
    assert plugin is registry.modality("sketch") is registry.modality_of_part("sketch_url")
    assert plugin is not None
    data = plugin.parse({"sketch_url": "data:text/plain;base64,Li0KLS4="}, "p", MediaLimits())
    header = plugin.probe(data, "p")
    assert isinstance(header, ImageHeader)
    assert (data, header.width, header.height) == (b".-\n-.", 2, 2)
    plugin.validate(header, MediaLimits(), "p")
    with pytest.raises(InvalidRequest, match="only data: URLs"):
        plugin.parse({"sketch_url": "ftp://x"}, "p", MediaLimits())
    assert registry.modalities == (*REGISTRY.modalities, "sketch")
    assert not REGISTRY.has_modality("sketch")


def test_a_family_is_added_from_outside(tmp_path: Path) -> None:
    registry = Registry()
    registry.register_family(("ToyForCausalLM",), Qwen3OmniFamily)
    write_config(tmp_path, thinker_config() | {"architectures": ["Unknown", "ToyForCausalLM"]})
    assert registry.load_family(tmp_path).name == "qwen3_omni"


def register_sketches(registry: Registry) -> None:
    """Serves as the function of an installed plugin. It looks something up while it registers."""
    assert registry.has_modality("image")
    registry.register_modality(SketchPlugin())


def register_toy(registry: Registry) -> None:
    registry.register_family(("ToyForCausalLM",), Qwen3OmniFamily)


def refuse_to_register(registry: Registry) -> None:
    raise ZeroDivisionError("no such luck")


def plugin_of(function: str) -> EntryPoint:
    return EntryPoint(function, f"{__name__}:{function}", PLUGIN_GROUP)


def test_plugins_are_called_at_the_first_look_up() -> None:
    num_calls = []

    def installed() -> list[EntryPoint]:
        num_calls.append(1)
        return [plugin_of("register_sketches")]

    registry = builtin_registry(installed)
    assert num_calls == []
    assert registry.modalities == (*REGISTRY.modalities, "sketch")
    assert registry.modality_of_part("input_sketch") is registry.modality("sketch")
    assert num_calls == [1]


@pytest.mark.parametrize(
    "look_up",
    [
        lambda registry: registry.modality("sketch"),
        lambda registry: registry.has_modality("sketch"),
        lambda registry: registry.modality_of_part("input_sketch"),
        lambda registry: "sketch" in registry.modalities,
    ],
)
def test_every_look_up_knows_the_plugins(look_up: Callable[[Registry], object]) -> None:
    assert look_up(builtin_registry(lambda: [plugin_of("register_sketches")]))


def test_a_plugins_family_is_loaded(tmp_path: Path) -> None:
    write_config(tmp_path, thinker_config() | {"architectures": ["ToyForCausalLM"]})
    assert Registry(lambda: [plugin_of("register_toy")]).load_family(tmp_path).name == "qwen3_omni"
    assert Registry(lambda: [plugin_of("register_toy")]).architectures == ("ToyForCausalLM",)


@pytest.mark.parametrize("function", ["refuse_to_register", "missing"])
def test_a_plugin_that_fails_is_named(function: str) -> None:
    reason = "ZeroDivisionError: no such luck" if function == "refuse_to_register" else "AttributeError: .*missing"
    with pytest.raises(ConfigError, match=f"the plugin '{function}' .*{function}.* failed: {reason}"):
        Registry(lambda: [plugin_of(function)]).has_modality("image")


def test_a_registry_whose_plugin_failed_answers_no_later_look_up() -> None:
    registry = builtin_registry(lambda: [plugin_of("refuse_to_register"), plugin_of("register_sketches")])
    with pytest.raises(ConfigError):
        registry.has_modality("image")
    with pytest.raises(
        ConfigError, match=r"the plugin 'refuse_to_register' .* failed: ZeroDivisionError: no such luck"
    ):
        registry.modality("image")
    with pytest.raises(ConfigError, match="refuse_to_register"):
        _ = registry.architectures


def test_names_are_registered_once() -> None:
    registry = builtin_registry()
    with pytest.raises(ConfigError, match="image"):
        registry.register_modality(REGISTRY.modality("image"))
    with pytest.raises(ConfigError, match="Qwen3OmniMoeForConditionalGeneration"):
        registry.register_family(("Qwen3OmniMoeForConditionalGeneration",), Qwen3OmniFamily)


def test_unknown_modalities() -> None:
    assert REGISTRY.has_modality("image")
    assert not REGISTRY.has_modality("smell")
    assert REGISTRY.modality_of_part("smell_url") is None
    with pytest.raises(UnsupportedModality, match="smell"):
        REGISTRY.modality("smell")


def test_unknown_architectures_are_named(tmp_path: Path) -> None:
    write_config(tmp_path, thinker_config() | {"architectures": ["MarsForCausalLM", "Other"]})
    with pytest.raises(ConfigError, match=r"MarsForCausalLM, Other.*Qwen3OmniMoeThinker"):
        REGISTRY.load_family(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"architectures": "A"}', '{"architectures": [1]}', "{}"])
def test_broken_config_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json|does not name the architecture"):
        REGISTRY.load_family(tmp_path)


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read"):
        REGISTRY.load_family(tmp_path / "nowhere")


def test_the_pure_half_imports_no_torch() -> None:
    code = "import sys, modalities.registry, modalities.media, modalities.families.qwen3_omni as f; f.Qwen3OmniFamily"
    show = "; print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code + show], check=True, capture_output=True, text=True)
    assert found.stdout == "[]\n"


@pytest.fixture
def family(tmp_path: Path) -> Qwen3OmniFamily:
    return Qwen3OmniFamily(write_config(tmp_path, thinker_config()))


def test_an_item_is_planned_and_identified(family: Qwen3OmniFamily) -> None:
    plugin = REGISTRY.modality("image")
    data = encode(picture(300, 200))
    header = plugin.probe(data, "p")
    item = plan_media(family, data, header, 3, "messages.0.content.1").item
    assert (item.index, item.modality, item.part) == (3, "image", "messages.0.content.1")
    assert (item.grid, item.unit_tokens, item.cost) == ((1, 12, 18), (54,), 216)
    assert plan_media(family, data, header, 0, "elsewhere").item.mm_hash == item.mm_hash
    assert plan_media(family, data, header, 3, "p", cache_salt="tenant").item.mm_hash != item.mm_hash
    assert plan_media(family, data + b"\0", header, 3, "p").item.mm_hash != item.mm_hash
    assert len(item.mm_hash) == 32


def test_other_options_or_another_model_are_another_identity(family: Qwen3OmniFamily, tmp_path: Path) -> None:
    plugin = REGISTRY.modality("image")
    data = encode(picture(300, 200))
    header = plugin.probe(data, "p")
    item = plan_media(family, data, header, 0, "p").item
    preprocessor = json.loads((tmp_path / "preprocessor_config.json").read_text()) | {"image_mean": [0.1, 0.1, 0.1]}
    options = Qwen3OmniFamily(write_config(tmp_path, thinker_config(), preprocessor))
    other = plan_media(options, data, header, 0, "p").item
    assert other.grid == item.grid
    assert other.mm_hash != item.mm_hash
    model = Qwen3OmniFamily(write_config(tmp_path, thinker_config({"rms_norm_eps": 1e-5})))
    assert plan_media(model, data, header, 0, "p").item.mm_hash not in (item.mm_hash, other.mm_hash)


def test_what_the_family_refuses_names_the_part(family: Qwen3OmniFamily) -> None:
    header = ImageHeader("PNG", 2010, 10, "RGB")
    with pytest.raises(InvalidMedia, match=r"messages\.2\.content\.0: .*aspect ratio") as caught:
        plan_media(family, b"x", header, 0, "messages.2.content.0")
    assert caught.value.param == "messages.2.content.0"


def test_the_placeholder_is_the_checkpoints(family: Qwen3OmniFamily) -> None:
    assert family.placeholder_text("image") == "<|image_pad|>"
    assert family.config.image_token_id == TOKENS["image_token_id"]
    for call in (family.placeholder_text, family.options):
        with pytest.raises(UnsupportedModality, match="smell"):
            call("smell")
