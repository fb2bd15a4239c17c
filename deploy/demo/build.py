"""Makes the demo checkpoint: a small Qwen3-Omni thinker with seeded weights, as transformers would save it.

The weights are untrained. Does not know who loads it. torch and transformers are imported only while building, so
that asking for a checkpoint that is there already costs nothing.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

from blake3 import blake3

from deploy.demo.config import (
    generation_config,
    preprocessor_config,
    processor_config,
    thinker_config,
    video_preprocessor_config,
)
from deploy.demo.tokenizer import Vocabulary, write_text_files
from modalities.text import tokenizer_files

RECIPE_FILES = (
    "build.py",
    "chat_template.jinja",
    "config.py",
    "corpus.py",
    "model_card.md",
    "tokenizer.py",
    "weights.py",
)
RECIPE_PACKAGES = ("numpy", "safetensors", "tokenizers", "torch", "transformers")


def build_demo_checkpoint(out_dir: Path, seed: int = 0) -> Path:
    """Writes a complete model directory to `out_dir` (made if absent) and returns it.

    Same seed and same library versions, same bytes. `out_dir` is incomplete while this runs.
    """
    from deploy.demo.weights import save_model

    vocabulary = write_all_but_weights(out_dir, seed)
    save_model(out_dir, thinker_config(vocabulary), generation_config(vocabulary), seed)
    return out_dir


def write_all_but_weights(out_dir: Path, seed: int = 0) -> Vocabulary:
    """Every file that can be made without torch: enough for whatever reads configs or text."""
    out_dir.mkdir(parents=True, exist_ok=True)
    vocabulary = write_text_files(out_dir, seed)
    for name, content in {
        "config.json": thinker_config(vocabulary),
        "generation_config.json": generation_config(vocabulary),
        "preprocessor_config.json": preprocessor_config(),
        "video_preprocessor_config.json": video_preprocessor_config(),
        "processor_config.json": processor_config(),
    }.items():
        (out_dir / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.copyfile(_here("model_card.md"), out_dir / "MODEL_CARD.md")
    return vocabulary


def demo_checkpoint(seed: int = 0) -> Path:
    """The cached checkpoint `weft/demo-<digest of the recipe>` under `$XDG_CACHE_HOME` or `~/.cache`.

    Builds it if absent. It appears by one rename, so that concurrent builders and readers never see half of it.
    """
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    target = cache_dir / f"demo-{recipe_digest(seed)}"
    if target.is_dir():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache_dir))
    try:
        build_demo_checkpoint(building, seed)
        building.chmod(0o755)
        _publish(building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def recipe_digest(seed: int) -> str:
    """Of everything the bytes depend on: the sources, the libraries' versions, the seed."""
    digest = blake3(f"weft-demo-1 {seed}".encode())
    for path in (*map(_here, RECIPE_FILES), Path(tokenizer_files.__file__)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for package in RECIPE_PACKAGES:
        digest.update(f"{package}=={version(package)}\0".encode())
    return digest.hexdigest(length=8)


def _publish(building: Path, target: Path) -> None:
    try:
        building.rename(target)
    except OSError as error:
        # Another builder was first; its directory holds the same bytes.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def _here(name: str) -> Path:
    return Path(__file__).with_name(name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the demo checkpoint (untrained, seeded).")
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(build_demo_checkpoint(arguments.out, arguments.seed))


if __name__ == "__main__":
    main()
