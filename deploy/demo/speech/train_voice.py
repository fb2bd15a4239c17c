"""Trains the demo's voice and writes the whole model: `python -m deploy.demo.speech.train_voice DATA OUT`.

`DATA` is what `deploy.demo.speech.prepare` wrote. The talker and code2wav know nothing of each other, so two processes
train them at the same time, on one core each or on a GPU. The numbers of steps are fixed: the same seed on the same
kind of machine gives the same weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from deploy.demo.speech import code2wav_training, talker_training
from deploy.demo.speech.speech_data import load

EMBEDDING = "thinker.model.embed_tokens.weight"


def train(data_dir: Path, out_dir: Path, seed: int, device: str, talker_steps: int, code2wav_steps: int) -> None:
    """Trains both and writes the whole model to `out_dir` (made if absent), where files of the same names are
    replaced."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (data_dir, Path(scratch), seed, device, (talker_steps, code2wav_steps))
        torch.multiprocessing.spawn(_learn, arguments, nprocs=2)
        assemble(data_dir / "model", Path(scratch), out_dir)


def _learn(part: int, data_dir: Path, scratch: Path, seed: int, device: str, num_steps: tuple[int, int]) -> None:
    """Trains the talker (part 0) or code2wav (part 1), and writes its weights into `scratch`."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    data = load(data_dir)
    place = torch.device(device)
    started = time.perf_counter()
    if part == 0:
        thinker = json.loads((data_dir / "model" / "config.json").read_text(encoding="utf-8"))["thinker_config"]
        embeddings = load_file(data_dir / "model" / "model.safetensors")[EMBEDDING]
        model = talker_training.train_talker(data, thinker, embeddings, seed, num_steps[0], place)
    else:
        model = code2wav_training.train_code2wav(data, seed, num_steps[1], place)
    name = ("talker", "code2wav")[part]
    print(f"{name}: {num_steps[part]} steps in {time.perf_counter() - started:.0f} s")
    weights = {f"{name}.{key}": value.contiguous() for key, value in model.state_dict().items()}
    save_file(weights, scratch / f"{name}.safetensors")


def assemble(model_dir: Path, parts_dir: Path, out_dir: Path) -> None:
    """Writes the whole model: the files of `model_dir`, with the weights of the talker in bfloat16 and those of
    code2wav in float32 (a sound shows how its weights are rounded)."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for path in model_dir.iterdir():
        shutil.copyfile(path, out_dir / path.name)
    weights = load_file(model_dir / "model.safetensors")
    weights |= {key: value.bfloat16() for key, value in load_file(parts_dir / "talker.safetensors").items()}
    weights |= load_file(parts_dir / "code2wav.safetensors")
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    (out_dir / "model.safetensors").chmod(0o644)  # The library makes this file readable by the owner alone.


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the demo's voice.")
    parser.add_argument("data", type=Path, help="is the directory that deploy.demo.speech.prepare wrote")
    parser.add_argument("out", type=Path, help="is the directory that is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--talker-steps", type=int, default=talker_training.NUM_STEPS)
    parser.add_argument("--code2wav-steps", type=int, default=code2wav_training.NUM_STEPS)
    arguments = parser.parse_args()
    train(
        arguments.data,
        arguments.out,
        arguments.seed,
        arguments.device,
        arguments.talker_steps,
        arguments.code2wav_steps,
    )


if __name__ == "__main__":
    main()
