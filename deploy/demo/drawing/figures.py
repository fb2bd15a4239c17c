"""Draws pictures of plain figures: colours, shapes, backgrounds and noise. It knows no questions and no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

Rng = np.random.Generator
Canvas = npt.NDArray[np.uint8]
"""Holds the RGB pixels of a picture. Has shape `(height, width, 3)`."""

COLOUR_TO_RGB = {
    "red": (215, 25, 30),
    "green": (30, 150, 50),
    "blue": (35, 65, 215),
    "yellow": (240, 225, 40),
    "orange": (245, 135, 15),
    "purple": (125, 35, 165),
    "pink": (250, 145, 195),
    "cyan": (60, 215, 225),
    "black": (12, 12, 12),
    "white": (248, 248, 248),
}
COLOURS = tuple(COLOUR_TO_RGB)
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLOUR_JITTER = 10
# A figure and its background differ by more than this Euclidean distance in RGB.
GROUND_CONTRAST = 110
MAX_TURN = 0.25
_SHIFT = 4  # OpenCV's coordinates have this many sub-pixel bits.


@dataclass(frozen=True, slots=True)
class Figure:
    shape: str
    colour: str
    x: float
    y: float
    radius: float
    """Gives the radius of the circle around the figure, in pixels as x and y."""


@dataclass(frozen=True, slots=True)
class Look:
    """Holds what is the same in all frames of a clip."""

    ground: Canvas
    colour_to_rgb: dict[str, tuple[int, int, int]]
    turn: float
    noise: float
    """Gives the standard deviation of the noise, 0 for none."""
    jpeg_quality: int | None


def choose_look(rng: Rng, height: int, width: int, colours: Sequence[str]) -> Look:
    """Draws the background, the exact colours and the noise for figures of `colours`."""
    rgb = {name: _jittered(rng, COLOUR_TO_RGB[name]) for name in dict.fromkeys(colours)}
    is_jpeg = rng.random() < 0.5
    return Look(
        ground=_ground(rng, height, width, list(rgb.values())),
        colour_to_rgb=rgb,
        turn=float(rng.uniform(-MAX_TURN, MAX_TURN)),
        noise=0.0 if rng.random() < 0.4 else float(rng.uniform(1, 8)),
        jpeg_quality=int(rng.integers(55, 96)) if is_jpeg else None,
    )


def draw(rng: Rng, look: Look, figures: Sequence[Figure]) -> Canvas:
    """Draws one picture or frame; `rng` provides the noise."""
    canvas = look.ground.copy()
    for figure in figures:
        _draw_figure(canvas, figure, look.colour_to_rgb[figure.colour], look.turn)
    if look.noise:
        canvas = _noisy(rng, canvas, look.noise)
    if look.jpeg_quality is not None:
        _, data = cv2.imencode(".jpg", canvas[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, look.jpeg_quality])
        decoded = cv2.imdecode(data, cv2.IMREAD_COLOR)
        assert decoded is not None, "OpenCV decodes what it has encoded"
        canvas = np.ascontiguousarray(decoded[:, :, ::-1])
    return canvas


def scattered(rng: Rng, height: int, width: int, num_figures: int, radius: float) -> list[tuple[float, float]]:
    """Returns the centres (x, y) of figures that touch neither one another nor the edge."""
    while True:
        centres: list[tuple[float, float]] = []
        for _ in range(60):
            x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
            if all((x - u) ** 2 + (y - v) ** 2 > (2.3 * radius) ** 2 for u, v in centres):
                centres.append((float(x), float(y)))
            if len(centres) == num_figures:
                return centres
        radius *= 0.9


def _jittered(rng: Rng, rgb: tuple[int, int, int]) -> tuple[int, int, int]:
    red, green, blue = np.clip(np.array(rgb) + rng.integers(-COLOUR_JITTER, COLOUR_JITTER + 1, 3), 0, 255).tolist()
    return red, green, blue


def _ground(rng: Rng, height: int, width: int, avoid: Sequence[tuple[int, int, int]]) -> Canvas:
    kind = rng.choice(["plain", "gradient", "noisy"])
    first = _far_colour(rng, avoid)
    if kind == "gradient":
        # Both ends of the gradient, and its middle, keep their distance from the figures' colours.
        second = first + rng.uniform(-60, 60, 3)
        second = second if _is_far(second, avoid) and _is_far((first + second) / 2, avoid) else first * 0.95
        angle = rng.uniform(0, 2 * np.pi)
        ramp = np.cos(angle) * np.linspace(0, 1, width)[None, :] + np.sin(angle) * np.linspace(0, 1, height)[:, None]
        ramp = (ramp - ramp.min()) / (ramp.max() - ramp.min())
        values: npt.NDArray[np.float64] = first + ramp[:, :, None] * (second - first)
        return np.clip(values, 0, 255).astype(np.uint8)
    plain = np.broadcast_to(first, (height, width, 3)).clip(0, 255).astype(np.uint8)
    return _noisy(rng, plain, float(rng.uniform(5, 18))) if kind == "noisy" else plain.copy()


def _far_colour(rng: Rng, avoid: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.float64]:
    while True:
        colour = rng.uniform(0, 255, 3)
        if _is_far(colour, avoid):
            return colour


def _is_far(colour: npt.NDArray[np.float64], avoid: Sequence[tuple[int, int, int]]) -> bool:
    return bool(np.all(np.linalg.norm(np.array(avoid) - colour, axis=1) > GROUND_CONTRAST))


def _noisy(rng: Rng, canvas: Canvas, deviation: float) -> Canvas:
    noise = rng.standard_normal(canvas.shape, dtype=np.float32) * np.float32(deviation)
    return np.clip(canvas + noise, 0, 255).astype(np.uint8)


def _draw_figure(canvas: Canvas, figure: Figure, rgb: tuple[int, int, int], turn: float) -> None:
    centre = (_fixed(figure.x), _fixed(figure.y))
    if figure.shape == "circle":
        cv2.circle(canvas, centre, _fixed(figure.radius), rgb, -1, cv2.LINE_AA, _SHIFT)
    elif figure.shape == "ring":
        thickness = max(2, round(figure.radius * 0.36))
        radius = figure.radius - thickness / 2
        cv2.circle(canvas, centre, _fixed(radius), rgb, thickness, cv2.LINE_AA, _SHIFT)
    else:
        corners = _outline(figure.shape, turn) * figure.radius + (figure.x, figure.y)
        cv2.fillPoly(canvas, [np.round(corners * 2**_SHIFT).astype(np.int32)], rgb, cv2.LINE_AA, _SHIFT)


def _outline(shape: str, turn: float) -> npt.NDArray[np.float64]:
    """Returns corners on or within the unit circle; y points down."""
    if shape == "cross":
        a, b = 0.94, 0.3
        corners = [(-b, -a), (b, -a), (b, -b), (a, -b), (a, b), (b, b), (b, a), (-b, a), (-b, b), (-a, b), (-a, -b)]
        points = np.array([*corners, (-b, -b)])
        rotation = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
        turned: npt.NDArray[np.float64] = points @ rotation
        return turned
    num_corners, start, inner = {"square": (4, np.pi / 4, 1.0), "triangle": (3, 0.0, 1.0), "star": (10, 0.0, 0.42)}[
        shape
    ]
    angles = start + turn + np.arange(num_corners) * 2 * np.pi / num_corners
    radii = np.where(np.arange(num_corners) % 2, inner, 1.0)
    return np.stack([np.sin(angles) * radii, -np.cos(angles) * radii], axis=1)


def _fixed(value: float) -> int:
    return round(value * (1 << _SHIFT))
