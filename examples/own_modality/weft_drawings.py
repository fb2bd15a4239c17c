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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from PIL import Image, ImageDraw

from encoder_pool.calibration import MODALITY_TO_SAMPLES, CalibrationSample
from fabric.contracts import InvalidMedia, MediaItem, PlaceholderRange
from modalities.families.qwen3_omni import Qwen3OmniFamily
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
    Tokenize,
)
from modalities.media import MediaLimits
from modalities.registry import Registry

if TYPE_CHECKING:
    import torch

DRAWING, IMAGE = "drawing", "image"
FORMAT = "DRAWING"
ARCHITECTURE = "DrawingDemoForConditionalGeneration"
COLOURS = ("red", "green", "blue", "yellow", "black")
MAX_SHAPES, MAX_SIDE = 100, 1024


class DrawingPlugin:
    """Reads drawings from the parts of a request. Its work is bounded, so it needs no process that may be killed."""

    modality = DRAWING
    part_types = (DRAWING,)
    needs_process = False

    def parse(self, part: Mapping[str, object], param: str, limits: MediaLimits) -> bytes:
        return json.dumps(part.get(DRAWING)).encode()

    def probe(self, data: bytes, param: str) -> MediaHeader:
        drawing = json.loads(data)
        if not is_drawing(drawing):
            message = "a drawing has a width, a height and shapes; a shape is [kind, x, y, radius, colour]"
            raise InvalidMedia(f"{param}: {message}", param=param)
        return ImageHeader(FORMAT, drawing["width"], drawing["height"], "RGB")

    def validate(self, header: MediaHeader, limits: MediaLimits, param: str) -> None:
        assert isinstance(header, ImageHeader)
        if not (1 <= header.width <= MAX_SIDE and 1 <= header.height <= MAX_SIDE):
            message = f"a drawing has sides of 1 to {MAX_SIDE} pixels, not {header.width} x {header.height}"
            raise InvalidMedia(f"{param}: {message}", param=param)


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
        is_drawn = isinstance(header, ImageHeader) and header.format == FORMAT
        return replace(plan, modality=DRAWING) if is_drawn else plan

    def placeholder_text(self, modality: str) -> str:
        return self._model.placeholder_text(_taken_for(modality))

    def expand(
        self,
        token_ids: Sequence[int],
        plans: Sequence[ItemPlan],
        tokenize: Tokenize | None = None,
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


def is_drawing(drawing: object) -> bool:
    """Returns whether a client's value is a drawing that can be painted."""
    match drawing:
        case {"width": int(), "height": int(), "shapes": [*shapes]}:
            return len(shapes) <= MAX_SHAPES and all(is_shape(shape) for shape in shapes)
    return False


def is_shape(shape: object) -> bool:
    match shape:
        case ["circle" | "square", int() | float() as x, int() | float() as y, int() | float() as radius, str(colour)]:
            is_near = all(abs(value) <= MAX_SIDE for value in (x, y, radius))  # This is False for NaN.
            return is_near and radius >= 0 and colour in COLOURS
    return False


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
