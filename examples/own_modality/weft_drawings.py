"""Adds a modality to Weft from outside: drawings, which a client sends as lists of shapes.

    {"type": "drawing", "drawing": {"width": 96, "height": 96, "shapes": [["circle", 48, 48, 24, "red"]]}}

A modality consists of three things, and `register` hands them to Weft:

- a *plugin* reads the part of a request and knows the limits (`DrawingPlugin`);
- a *family* says how many tokens an item takes and how an encoder encodes it (`DrawingFamily`);
- two *samples* of different size show an encoder, when it starts, how long a forward pass takes.

The family here is that of the demo model, which also takes drawings: it paints them and gives them to the model's own
encoder for pictures. A modality with an encoder of its own returns that encoder from `load_encoder` instead.

Install the package where the cluster runs, write a model directory, and start a cluster on it:

    .venv/bin/python -m pip install ./examples/own_modality
    .venv/bin/python examples/own_modality/write_model.py /tmp/drawing-model
    .venv/bin/weft serve --model /tmp/drawing-model
    .venv/bin/python examples/own_modality/ask.py          # in another terminal

Every process of the cluster imports this module, and most of them have no torch, so only `load_encoder` and
`load_language_model` may import it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from PIL import Image, ImageDraw

from encoder_pool.samples import MODALITY_TO_SAMPLES, CalibrationSample
from fabric.errors import InvalidMedia
from fabric.messages import MediaItem, PlaceholderRange
from modalities.family import (
    DEFAULT_OPTIONS,
    EncoderInput,
    EncoderModel,
    ExpandedPrompt,
    ImageHeader,
    ItemPlan,
    LanguageModel,
    MediaHeader,
    MediaOptions,
    Positions,
)
from modalities.plugin import MediaLimits
from modalities.qwen3_omni.family import Qwen3OmniFamily
from modalities.registry import Registry

if TYPE_CHECKING:
    import torch

DRAWING, IMAGE = "drawing", "image"
FORMAT = "DRAWING"
ARCHITECTURE = "DrawingDemoForConditionalGeneration"
MAX_SHAPES = 100


class DrawingPlugin:
    """Reads drawings from the parts of a request. Its work is bounded, so it needs no process that may be killed."""

    modality = DRAWING
    part_types = (DRAWING,)
    needs_process = False

    def parse(self, part: Mapping[str, object], param: str, limits: MediaLimits) -> bytes:
        return json.dumps(part.get(DRAWING)).encode()

    def probe(self, data: bytes, param: str) -> MediaHeader:
        try:
            drawing = json.loads(data)
            width, height, shapes = int(drawing["width"]), int(drawing["height"]), drawing["shapes"]
            is_valid = len(shapes) <= MAX_SHAPES and all(_is_shape(shape) for shape in shapes)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidMedia(f"{param}: not a drawing", param=param) from error
        if not is_valid:
            raise InvalidMedia(f"{param}: a shape is [circle or square, x, y, radius, colour]", param=param)
        return ImageHeader(FORMAT, width, height, "RGB")

    def validate(self, header: MediaHeader, limits: MediaLimits, param: str) -> None:
        assert isinstance(header, ImageHeader)
        if not (1 <= header.width <= 1024 and 1 <= header.height <= 1024):
            raise InvalidMedia(f"{param}: a drawing has sides of 1 to 1024 pixels", param=param)


class DrawingFamily:
    """Serves a Qwen3-Omni checkpoint that also takes drawings. It passes everything on to the checkpoint's own family;
    there, a drawing is a picture."""

    name = "qwen3_omni_with_drawings"

    def __init__(self, model_dir: Path) -> None:
        self._model = Qwen3OmniFamily(model_dir)
        self.model_id, self.shape = self._model.model_id, self._model.shape
        self.max_items: Mapping[str, int] = {**self._model.max_items, DRAWING: 8}

    def plan(self, header: MediaHeader, options: MediaOptions = DEFAULT_OPTIONS) -> ItemPlan:
        plan = self._model.plan(header, options)
        is_drawing = isinstance(header, ImageHeader) and header.format == FORMAT
        return replace(plan, modality=DRAWING) if is_drawing else plan

    def placeholder_text(self, modality: str) -> str:
        return self._model.placeholder_text(_taken_for(modality))

    def expand(
        self,
        token_ids: Sequence[int],
        plans: Sequence[ItemPlan],
        tokenize: Callable[[str], Sequence[int]] | None = None,
    ) -> ExpandedPrompt:
        taken = [replace(plan, modality=_taken_for(plan.modality)) for plan in plans]
        return self._model.expand(token_ids, taken, tokenize)

    def positions(
        self, token_ids: Sequence[int], placeholders: Sequence[PlaceholderRange], media: Sequence[MediaItem]
    ) -> Positions:
        taken = [msgspec.structs.replace(item, modality=_taken_for(item.modality)) for item in media]
        return self._model.positions(token_ids, placeholders, taken)

    def options(self, modality: str) -> str:
        return self._model.options(_taken_for(modality))

    def preprocess(self, data: bytes, item: MediaItem) -> list[EncoderInput]:
        if item.modality != DRAWING:
            return self._model.preprocess(data, item)
        units = self._model.preprocess(painted(data), msgspec.structs.replace(item, modality=IMAGE))
        return [replace(unit, modality=DRAWING) for unit in units]

    def load_encoder(self, model_dir: Path, device: str, dtype: str, modalities: Sequence[str]) -> EncoderModel:
        taken = tuple(dict.fromkeys(_taken_for(modality) for modality in modalities))
        return DrawingEncoder(self._model.load_encoder(model_dir, device, dtype, taken))

    def load_language_model(self, model_dir: Path, device: str, dtype: str, attention_name: str) -> LanguageModel:
        return self._model.load_language_model(model_dir, device, dtype, attention_name)


class DrawingEncoder:
    """Encodes drawings with the encoder for pictures, and other media as before."""

    def __init__(self, encoder: EncoderModel) -> None:
        self._encoder = encoder

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        return self._encoder.encode([replace(unit, modality=_taken_for(unit.modality)) for unit in inputs])


def painted(data: bytes) -> bytes:
    """Returns a drawing as a PNG file."""
    drawing = json.loads(data)
    picture = Image.new("RGB", (drawing["width"], drawing["height"]), "white")
    canvas = ImageDraw.Draw(picture)
    for kind, x, y, radius, colour in drawing["shapes"]:
        draw = canvas.ellipse if kind == "circle" else canvas.rectangle
        draw((x - radius, y - radius, x + radius, y + radius), fill=colour)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def sample(edge: int) -> CalibrationSample:
    """Makes a drawing of `edge` x `edge` pixels, from which an encoder learns how long a forward pass takes."""
    drawing = {"width": edge, "height": edge, "shapes": [["circle", edge / 2, edge / 2, edge / 4, "red"]]}
    return CalibrationSample(ImageHeader(FORMAT, edge, edge, "RGB"), json.dumps(drawing).encode())


def register(registry: Registry) -> None:
    """Hands Weft the plugin, the family and the samples. pyproject.toml names this function as an entry point."""
    registry.register_modality(DrawingPlugin())
    registry.register_family((ARCHITECTURE,), DrawingFamily)
    MODALITY_TO_SAMPLES[DRAWING] = (sample, (64, 448))


def _taken_for(modality: str) -> str:
    """Returns the modality as which the model's own family treats an item."""
    return IMAGE if modality == DRAWING else modality


def _is_shape(shape: list[object]) -> bool:
    kind, *place, colour = shape
    is_placed = len(place) == 3 and all(isinstance(value, int | float) for value in place)
    return kind in ("circle", "square") and is_placed and colour in ("red", "green", "blue", "yellow", "black")
