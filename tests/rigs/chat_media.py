"""Makes pictures and chat messages for tests. It knows nothing of clusters."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image, ImageDraw


def picture(seed: int, width: int = 96, height: int = 96) -> Image.Image:
    """Draws a filled shape on a plain background; different seeds give different pictures."""
    rng = np.random.default_rng(seed)
    ground, colour = (tuple(int(c) for c in rng.integers(0, 256, 3)) for _ in range(2))
    image = Image.new("RGB", (width, height), ground)
    left, top = (int(v) for v in rng.integers(4, 30, 2))
    draw = ImageDraw.Draw(image)
    (draw.ellipse if seed % 2 else draw.rectangle)((left, top, width - left, height - top), fill=colour)
    return image


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def image_part(seed: int, **size: int) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_url(png(picture(seed, **size)))}}


def text_part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, object] | str) -> list[dict[str, object]]:
    """Returns one user turn of these parts; strings become text parts."""
    return [{"role": "user", "content": [text_part(p) if isinstance(p, str) else p for p in parts]}]
