"""Writes the file of voices of Qwen2.5-Omni as `torch.save` does, without torch."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any


class CountedPickler(pickle.Pickler):
    """A `CountedPickler` keeps bytes out of the pickle by a reference, as `torch.save` does with the values of
    tensors."""

    def persistent_id(self, given: Any) -> Any:
        return ("storage", len(given)) if isinstance(given, bytes) else None


def voices_file(voices: object) -> bytes:
    """Returns a file of the form that `torch.save` writes."""
    pickled, archive = io.BytesIO(), io.BytesIO()
    CountedPickler(pickled, protocol=2).dump(voices)
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("spk_dict/data.pkl", pickled.getvalue())
        file.writestr("spk_dict/data/0", b"0000")
    return archive.getvalue()


def written_single_code(directory: Path, file: bytes | None = None, **values: Any) -> Path:
    """Writes what a cluster reads of a whole Qwen2.5-Omni before its weights: the config with `values`, and the file of
    voices, by default of two."""
    voices = {name: {"bos_token": 7, "cond": b"values", "kept": OrderedDict()} for name in ("Ethan", "Chelsie")}
    (directory / "spk_dict.pt").write_bytes(voices_file(voices) if file is None else file)
    config = {"model_type": "qwen2_5_omni", "talker_config": {}} | values
    (directory / "config.json").write_text(json.dumps(config))
    return directory
