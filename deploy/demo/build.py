"""Says where the trained demo checkpoint lies, and builds an untrained one of the same form, as transformers saves it.

The module does not know which code loads the checkpoint. It imports torch and transformers only while it builds one, so
that asking for the trained checkpoint costs nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from deploy.demo.demo_config import (
    generation_config,
    preprocessor_config,
    processor_config,
    thinker_config,
    video_preprocessor_config,
)
from deploy.demo.speech_config import TALKER_GENERATION, whole_config
from deploy.demo.tokenizer import Vocabulary, write_text_files

CHECKPOINT = Path(__file__).with_name("checkpoint")


def demo_checkpoint() -> Path:
    """Returns the trained checkpoint that is shipped with the project (see its MODEL_CARD.md)."""
    return CHECKPOINT


def build_demo_checkpoint(out_dir: Path, seed: int = 0) -> Path:
    """Writes a complete model directory with untrained, seeded weights to `out_dir` (made if absent), and returns the
    directory. The model is a thinker without a voice.

    The same seed and the same library versions give the same bytes. `out_dir` is incomplete while this function runs.
    """
    from deploy.demo.weights import save_model

    vocabulary = write_all_but_weights(out_dir, seed)
    save_model(out_dir, thinker_config(vocabulary), generation_config(vocabulary), seed)
    return out_dir


def write_all_but_weights(out_dir: Path, seed: int = 0, has_voice: bool = False) -> Vocabulary:
    """Writes every file that needs no torch, which is enough for code that reads configs or text. Returns the
    vocabulary. With `has_voice` the configs are those of the whole model, and else those of the thinker alone."""
    out_dir.mkdir(parents=True, exist_ok=True)
    vocabulary = write_text_files(out_dir, seed)
    thinker, generation = thinker_config(vocabulary), generation_config(vocabulary)
    for name, content in {
        "config.json": whole_config(thinker, vocabulary) if has_voice else thinker,
        "generation_config.json": {**generation, **(TALKER_GENERATION if has_voice else {})},
        "preprocessor_config.json": preprocessor_config(),
        "video_preprocessor_config.json": video_preprocessor_config(),
        "processor_config.json": processor_config(),
    }.items():
        (out_dir / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.copyfile(_here("model_card.md"), out_dir / "MODEL_CARD.md")
    return vocabulary


def _here(name: str) -> Path:
    return Path(__file__).with_name(name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Builds a checkpoint of the demo's form with untrained, seeded weights."
    )
    parser.add_argument("out", type=Path, help="is the directory that is written")
    parser.add_argument("--seed", type=int, default=0, help="seeds the weights")
    arguments = parser.parse_args()
    print(build_demo_checkpoint(arguments.out, arguments.seed))


if __name__ == "__main__":
    main()
