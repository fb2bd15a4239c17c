"""Defines what the sections of the cluster's configuration consist of: `Section` itself, and values that a file may
write in several forms, such as sizes with a unit.

The module knows no key.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from deploy.models import ModelUrl, is_model_url
from fabric.contracts import ConfigError
from fabric.transport import PortRange
from modalities.registry import REGISTRY

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(value: object) -> object:
    """Converts a size with a unit to bytes (`512MiB` -> 536870912); other values, such as integers, pass unchanged.
    Raises ValueError for an unknown unit."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise ValueError(f"{value!r} is not a size; write a number of bytes, or a number with a unit ({units})")
    return int(float(match[1]) * _UNITS[match[2]])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Size = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
"""Is a number of bytes that may be 0."""


def _check_blocks(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and value >= 2):
        return value
    raise ValueError(f"{value!r} is not a number of blocks; write `auto`, or a number of at least 2")


Blocks = Annotated[Annotated[int, Field(ge=2)] | Literal["auto"], BeforeValidator(_check_blocks)]
"""Is a number of KV blocks, or `auto` for as many as a device holds."""
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Device = Literal["cpu", "cuda"]


LocalFile = Annotated[Path, AfterValidator(Path.absolute)]
"""A relative path counts from the folder in which the config is read, because replicas run in other folders."""


def one_or_more(value: object) -> object:
    """Turns a single text into a list of one, for keys that take one or several."""
    return [value] if isinstance(value, str) else value


def _check_ports(text: str) -> str:
    try:
        return str(PortRange.parse(text))
    except ConfigError as error:
        raise ValueError(error.message) from error


Ports = Annotated[str, AfterValidator(_check_ports)]
"""Is a range of ports, as `PortRange` writes it."""


def _check_network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a network; write an address and a length, as in 10.1.0.0/16") from error


Network = Annotated[str, AfterValidator(_check_network)]


def _check_resource(name: str) -> str:
    if name in ("CPU", "GPU", "memory", "object_store_memory"):
        raise ValueError(f"{name} is no custom resource; GPUs are set by gpus_per_replica, and the others are not set")
    return name


RayResources = dict[Annotated[str, AfterValidator(_check_resource), Field(min_length=1)], Annotated[float, Field(gt=0)]]
"""Maps the names of custom resources of Ray to amounts."""


def _parse_model_path(value: object) -> object:
    """Keeps a URL as a text, in the form that names it, and makes a path of everything else."""
    if not isinstance(value, str):
        return value
    if not is_model_url(value):
        return Path(value)
    try:
        return str(ModelUrl.parse(value))
    except ConfigError as error:
        raise ValueError(error.message) from error


ModelPath = Annotated[Path | str, BeforeValidator(_parse_model_path)]
"""Is a folder, or the text of a URL of a model."""


def _parse_switch(value: object) -> object:
    """Converts a boolean back to `on` or `off`, because YAML 1.1 reads a bare `on` or `off` as a boolean."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Switch = BeforeValidator(_parse_switch)


def default_of(owner: type, name: str) -> Any:
    """Returns the default of a field of `owner`, the config class of the part that uses the key. That class alone
    states the default."""
    default = next(field.default for field in dataclasses.fields(owner) if field.name == name)
    assert default is not dataclasses.MISSING, f"{owner.__name__}.{name} has no default"
    return default


class Section(BaseModel):
    """A `Section` is a part of the config. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# ------------------------------------------------------------ sections


def _check_modality(name: str) -> str:
    if not REGISTRY.has_modality(name):
        raise ValueError(f"the modality {name!r} is unknown; known modalities are {', '.join(REGISTRY.modalities)}")
    return name


Modality = Annotated[str, AfterValidator(_check_modality)]
