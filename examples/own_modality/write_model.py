"""Writes a model directory for `weft_drawings`: the demo model's files, with two changes.

`config.json` names the architecture under which `weft_drawings` has registered its family, and the chat template writes
a picture's placeholder for a drawing. A model of your own has both from the start.

    .venv/bin/python examples/own_modality/write_model.py /tmp/drawing-model
"""

import argparse
import json
from pathlib import Path

from weft_drawings import ARCHITECTURE, DRAWING

from deploy.demo.build import demo_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a model directory whose model takes drawings.")
    parser.add_argument("directory", type=Path, help="a directory that does not exist yet")
    directory = parser.parse_args().directory
    directory.mkdir()
    for file in demo_checkpoint().iterdir():
        (directory / file.name).symlink_to(file)

    config = json.loads((directory / "config.json").read_text()) | {"architectures": [ARCHITECTURE]}
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config))

    template = (directory / "chat_template.jinja").read_text()
    (directory / "chat_template.jinja").unlink()
    pictures = "('image', 'image_url')"
    assert pictures in template
    (directory / "chat_template.jinja").write_text(template.replace(pictures, f"('image', 'image_url', '{DRAWING}')"))
    print(f"The model is in {directory}.")


if __name__ == "__main__":
    main()
