"""Holds the modalities and the model families. Other code adds one by a call, without a change here.

An installed package adds its own through an entry point of the group `weft.plugins`: a function that takes the
registry. Every process of a cluster has the same packages, so every process knows the same modalities and families.
This module knows nothing of file formats or architectures. It can be imported without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from fabric.contracts import ConfigError, UnsupportedModality
from modalities.checkpoint_files import read_json
from modalities.families import (
    causal_lm,
    internvl,
    llava,
    llava_onevision,
    qwen2_5_omni,
    qwen2_5_vl,
    qwen2_audio,
    qwen2_vl,
    qwen3_omni,
    qwen3_vl,
)
from modalities.family import Family
from modalities.media import AudioPlugin, ImagePlugin, ModalityPlugin, VideoPlugin

FamilyLoader = Callable[[Path], Family]
PLUGIN_GROUP = "weft.plugins"
"""Names the group of the entry points through which installed packages register modalities and families."""

_FAMILIES = (
    causal_lm,
    llava,
    llava_onevision,
    internvl,
    qwen2_vl,
    qwen2_5_vl,
    qwen3_vl,
    qwen2_audio,
    qwen2_5_omni,
    qwen3_omni,
)


class Registry:
    """Finds modalities by name and by part type, and families by architecture. It is filled at the start and only read
    afterwards.

    The first look-up calls the functions of `plugins`, in the order of the plugins' names. They are not called earlier,
    because a plugin's module imports this one. If a plugin fails, that look-up and every later one raise ConfigError:
    a process that goes on must not serve without what the plugin registers."""

    def __init__(self, plugins: Callable[[], Iterable[EntryPoint]] = tuple) -> None:
        self._plugins: Callable[[], Iterable[EntryPoint]] | None = plugins
        self._plugin_failure: str | None = None
        self._modality_to_plugin: dict[str, ModalityPlugin] = {}
        self._part_type_to_plugin: dict[str, ModalityPlugin] = {}
        self._architecture_to_loader: dict[str, FamilyLoader] = {}

    def register_modality(self, plugin: ModalityPlugin) -> None:
        """Adds a modality. Raises ConfigError if it or one of its part types is already registered."""
        taken = [name for name in plugin.part_types if name in self._part_type_to_plugin]
        if plugin.modality in self._modality_to_plugin or taken:
            part_types = ", ".join(plugin.part_types)
            raise ConfigError(
                f"the modality {plugin.modality!r} or one of its part types ({part_types}) is already registered"
            )
        self._modality_to_plugin[plugin.modality] = plugin
        self._part_type_to_plugin.update(dict.fromkeys(plugin.part_types, plugin))

    def register_family(self, architectures: Sequence[str], loader: FamilyLoader) -> None:
        """Adds a family for `architectures`, which are named as in a checkpoint's config.json. Raises ConfigError if
        one of them is already registered."""
        if taken := [name for name in architectures if name in self._architecture_to_loader]:
            raise ConfigError(f"these architectures are already registered: {', '.join(taken)}")
        self._architecture_to_loader.update(dict.fromkeys(architectures, loader))

    def has_modality(self, name: str) -> bool:
        self._call_plugins()
        return name in self._modality_to_plugin

    def modality(self, name: str) -> ModalityPlugin:
        """Returns the plugin of a modality. Raises UnsupportedModality if there is none."""
        if not self.has_modality(name):
            known = ", ".join(self._modality_to_plugin)
            raise UnsupportedModality(f"the modality {name!r} is not known; known modalities are {known}")
        return self._modality_to_plugin[name]

    def modality_of_part(self, part_type: str) -> ModalityPlugin | None:
        """Returns the plugin that parses parts of this type, or None."""
        self._call_plugins()
        return self._part_type_to_plugin.get(part_type)

    @property
    def modalities(self) -> tuple[str, ...]:
        self._call_plugins()
        return tuple(self._modality_to_plugin)

    @property
    def architectures(self) -> tuple[str, ...]:
        self._call_plugins()
        return tuple(self._architecture_to_loader)

    def load_family(self, model_dir: Path) -> Family:
        """Loads the family for the `architectures` in config.json, whatever the form of the weights, which no family
        reads here. Raises ConfigError if the file is missing or broken, or if none of its architectures is known."""
        self._call_plugins()
        names = read_architectures(model_dir)
        for name in names:
            if name in self._architecture_to_loader:
                return self._architecture_to_loader[name](model_dir)
        if not names:
            raise ConfigError(f"config.json in {model_dir} does not name the architecture of the model")
        found, known = ", ".join(names), ", ".join(self._architecture_to_loader)
        raise ConfigError(f"the architecture {found} of {model_dir} is not supported; Weft supports {known}")

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Forgets at its end what was registered meanwhile, for tests that register a plugin by a call."""
        self._call_plugins()
        before = dict(self._modality_to_plugin), dict(self._part_type_to_plugin), dict(self._architecture_to_loader)
        try:
            yield
        finally:
            self._modality_to_plugin, self._part_type_to_plugin, self._architecture_to_loader = before

    def _call_plugins(self) -> None:
        if self._plugin_failure is not None:
            raise ConfigError(self._plugin_failure)
        if self._plugins is None:
            return
        plugins, self._plugins = self._plugins, None  # A plugin may look something up while it registers.
        for plugin in sorted(plugins(), key=lambda plugin: plugin.name):
            try:
                plugin.load()(self)
            except Exception as error:  # Whatever a stranger's code raises, the message has to name the plugin.
                kind = type(error).__name__
                self._plugin_failure = f"the plugin {plugin.name!r} ({plugin.value}) failed: {kind}: {error}"
                raise ConfigError(self._plugin_failure) from error


def installed_plugins() -> Iterable[EntryPoint]:
    """Returns the entry points of all installed packages through which they register modalities and families."""
    return entry_points(group=PLUGIN_GROUP)


def read_architectures(model_dir: Path) -> list[str]:
    """Returns the `architectures` in config.json. Raises ConfigError if the file can't be read or they are not a list
    of names."""
    path = model_dir / "config.json"
    names = read_json(path)[1].get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"`architectures` in {path} must be a list of names, not {names!r}")
    return names


def builtin_registry(plugins: Callable[[], Iterable[EntryPoint]] = tuple) -> Registry:
    """Returns a new registry with everything that is a part of Weft, and with `plugins`."""
    registry = Registry(plugins)
    registry.register_modality(ImagePlugin())
    registry.register_modality(VideoPlugin())
    registry.register_modality(AudioPlugin())
    for family in _FAMILIES:
        registry.register_family(family.ARCHITECTURES, family.load)
    return registry


REGISTRY = builtin_registry(installed_plugins)
