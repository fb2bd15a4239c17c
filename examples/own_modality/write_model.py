"""Writes a model directory for `weft_drawings`: the demo model's files, with two changes.

`config.json` names the architecture under which `weft_drawings` has registered its family, and the chat template writes
a picture's placeholder for a drawing. A model of your own has both from the start.

    .venv/bin/python examples/own_modality/write_model.py /tmp/drawing-model
"""

import argparse
from pathlib import Path

from weft_drawings import ARCHITECTURE, DRAWING

from deploy.testing import write_demo_variant


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a model directory whose model takes drawings.")
    parser.add_argument("directory", type=Path, help="is a directory that does not exist yet")
    directory = write_demo_variant(parser.parse_args().directory, ARCHITECTURE, DRAWING)
    print(f"The model is in {directory}.")


if __name__ == "__main__":
    main()
