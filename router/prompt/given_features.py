"""Reads the features of pictures that clients have computed themselves: parts of the type `image_embeds`, as vLLM takes
them, but in the safetensors format.

`ImageEmbedsReader` checks everything that is known without a model's weights: that the operator takes features at all,
the size, the format, the shape, the dtype, that all numbers are finite, and that a picture that the model takes has as
many tokens. What it returns are the bytes that an encoder would have stored, so the encoder that gets them only has to
announce them. The module knows nothing of other media.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fabric.contracts import InvalidMedia, InvalidRequest, UnsupportedModality, content_digest, frame
from modalities.family import Family, FeaturesHeader, TakesFeatures, plan_medium
from modalities.media import (
    MediaLimits,
    Tensor,
    decode_base64,
    features_of,
    integers_of,
    num_rows,
    read_tensors,
)
from router.api import IMAGE_EMBEDS, MediaPart, shown
from router.prompt.named_media import NamedFile

KEY = "media.image_embeds"
"""Names the key of the config with which an operator takes features."""
GRID: Final = "image_grid_thw"
SIZE: Final = "image_sizes"
FIELD_TO_LENGTH: Mapping[str, int] = {GRID: 3, SIZE: 2}
"""Maps the fields that say where the tokens stand to the number of integers in each."""
MAX_SIDE = 2**31
"""Limits the integers in these fields."""


class ImageEmbedsReader:
    """A `ImageEmbedsReader` reads features for one model. It has no state; each router has one."""

    def __init__(self, family: Family, dtype: str, *, is_enabled: bool) -> None:
        """`dtype` names the dtype in which the model computes."""
        self._family = family
        self._dtype = dtype
        self._is_enabled = is_enabled

    def check(self, part: MediaPart) -> None:
        """Raises InvalidRequest if this server takes no features, and UnsupportedModality if the model takes none."""
        if not self._is_enabled:
            message = (
                f"this server takes no features as input; its operator turns them on with `{KEY}`, and an `image_url` "
                "takes the picture itself"
            )
            raise InvalidRequest(message, param=part.param)
        if not isinstance(self._family, TakesFeatures):
            raise UnsupportedModality("the model takes no features as input; send the picture", param=part.param)

    def read(self, part: MediaPart, limits: MediaLimits) -> NamedFile:
        """Returns the feature of a part as an encoder would store it, its digest, and what it says of the picture.
        Raises InvalidRequest if the part has the wrong form, and InvalidMedia if the features are broken, too large, or
        not those of a picture that the model takes."""
        payload, fields = _payload(part)
        param, shape = part.param, self._family.shape
        tensors = read_tensors(decode_base64(payload, param, limits.max_bytes_per_item), param)
        tensor, in_file = _features(tensors, param)
        num_tokens = num_rows(tensor, shape.num_levels * shape.hidden_size, param)
        numbers = {name: _numbers(name, fields.get(name), in_file.get(name), param, limits) for name in FIELD_TO_LENGTH}
        header = FeaturesHeader(num_tokens, _grid(numbers[GRID]), _size(numbers[SIZE]))
        try:
            plan_medium(self._family, header)
        except InvalidMedia as error:
            raise InvalidMedia(f"{param}: {error.message}", param=param) from error
        data = features_of(tensor, shape.num_levels, shape.hidden_size, self._dtype, param)
        kind = f"{self._dtype} {shape.num_levels}x{num_tokens}x{shape.hidden_size}"
        return NamedFile(data, content_digest(frame([b"features", kind.encode(), content_digest(data)])), header)


def _payload(part: MediaPart) -> tuple[str, Mapping[str, object]]:
    """Returns the base64 text of the features, and the fields next to it."""
    value = part.fields.get(IMAGE_EMBEDS)
    fields: Mapping[str, object] = value if isinstance(value, Mapping) else {IMAGE_EMBEDS: value}
    known = (IMAGE_EMBEDS, *FIELD_TO_LENGTH, "uuid", "detail")
    if unknown := next((name for name in fields if name not in known), None):
        message = f"{part.param}: features have no field {shown(unknown)}; known fields are {', '.join(known)}"
        raise InvalidRequest(message, param=part.param)
    payload = fields.get(IMAGE_EMBEDS)
    if not isinstance(payload, str) or not payload:
        message = f"{part.param}: `{IMAGE_EMBEDS}` must be base64 text of a file in the safetensors format"
        raise InvalidRequest(message, param=part.param)
    return payload, fields


def _features(tensors: dict[str, Tensor], param: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the tensor of features, which is the only one of its file or has its name, and the others."""
    if len(tensors) == 1:
        return next(iter(tensors.values())), {}
    others = {name: tensor for name, tensor in tensors.items() if name != IMAGE_EMBEDS}
    if IMAGE_EMBEDS not in tensors or not others.keys() <= FIELD_TO_LENGTH.keys():
        names = f"`{IMAGE_EMBEDS}`, {', '.join(f'`{name}`' for name in FIELD_TO_LENGTH)}"
        message = f"{param}: a file of features must have one tensor, or tensors of the names {names}"
        raise InvalidMedia(f"{message}, not {len(tensors)} tensors of other names", param=param)
    return tensors[IMAGE_EMBEDS], others


def _numbers(
    name: str, value: object, in_file: Tensor | None, param: str, limits: MediaLimits
) -> tuple[int, ...] | None:
    """Returns the integers that stand in a field of the part (as a list, or as a tensor in base64) or in the file of
    the features. Returns None if there are none."""
    if isinstance(value, str):
        tensors = read_tensors(decode_base64(value, param, limits.max_bytes_per_item), param)
        value = integers_of(next(iter(tensors.values()))) if len(tensors) == 1 else None
    elif value is None:
        if in_file is None:
            return None
        value = integers_of(in_file)
    elif isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    length = FIELD_TO_LENGTH[name]
    is_listed = isinstance(value, list) and len(value) == length
    if not is_listed or any(type(each) is not int or not 0 < each < MAX_SIDE for each in value):  # type: ignore[attr-defined]
        message = f"{param}: `{name}` must hold {length} positive integers, as a list or as a tensor of I64 or I32"
        raise InvalidMedia(message, param=param)
    return tuple(value)  # type: ignore[arg-type]


def _grid(numbers: tuple[int, ...] | None) -> tuple[int, int, int] | None:
    return None if numbers is None else (numbers[0], numbers[1], numbers[2])


def _size(numbers: tuple[int, ...] | None) -> tuple[int, int] | None:
    """Returns (width, height) of a size in transformers' order (height, width)."""
    return None if numbers is None else (numbers[1], numbers[0])
