"""Makes all that the training of the demo's voices needs: `python -m deploy.demo.speech.prepare OUT`.

It records every text with espeak-ng, fits the codec, lets the thinker read conversations for the talker's prompts, and
writes `OUT/speech.npz` and `OUT/model`: the files of the whole model without its voice. It prints how much of the
recordings the codec keeps.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from deploy.demo.build import demo_checkpoint, write_all_but_weights
from deploy.demo.demo_config import VOCAB_MULTIPLE
from deploy.demo.drawing.facts import Sample
from deploy.demo.evaluate import load_model
from deploy.demo.speech import mel_codec
from deploy.demo.speech.recordings import NAME_TO_VOICE, Samples, recording, word_at_frames
from deploy.demo.speech.script import Script, script
from deploy.demo.speech.speech_data import Ints, SpeechData, ragged, save
from deploy.demo.speech_config import ACCEPT_HIDDEN_LAYER
from deploy.demo.tasks.catalogue import TASKS
from deploy.demo.tokenizer import TTS_TOKENS
from deploy.demo.training.batches import collate
from deploy.demo.training.encoding import SampleEncoder

NUM_CONVERSATIONS = 260
SOUND_SECONDS = 380
"""Limits the recordings of each voice of which code2wav learns, in seconds; the codes of all others are kept."""
WORD_WEIGHT = 3.0
FITTED = 8
"""The codec learns from every recording of this number; all of them would not fit into little memory."""
NEW_EMBEDDING_STD = 0.5
_MEDIA = ("<|audio_pad|>", "<|image_pad|>", "<|video_pad|>")


def prepare(out_dir: Path, seed: int) -> None:
    model_dir = out_dir / "model"
    write_model(model_dir, seed)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    said = script(seed)
    texts = (*said.words, *said.sentences)
    sounds = [recording(text, voice) for voice in NAME_TO_VOICE for text in texts]
    fitted = mel_codec.fit(torch.cat([mel_codec.patches(sound) for sound in sounds[::FITTED]]), seed)
    codes = [fitted.encode(sound) for sound in sounds]
    print(f"{sum(map(len, codes))} frames; the codec's log-mel L1 is {_codec_error(fitted, sounds, codes):.3f}")
    user_turns, media_rows = _prompts(model_dir, seed)
    save(
        SpeechData(
            texts=ragged([_ids(tokenizer, text) for text in texts]),
            later_texts=ragged([_ids(tokenizer, " " + text) for text in texts]),
            num_words=len(said.words),
            codes=ragged(codes),
            word_tokens=ragged(_word_tokens(tokenizer, texts)),
            user_turns=ragged(user_turns),
            media_rows=media_rows,
            header=_ids(tokenizer, "<|im_start|>assistant\n"),
            comma=int(_ids(tokenizer, ",")[0]),
            period=int(_ids(tokenizer, ".")[0]),
            tts_tokens=_ids(tokenizer, "".join(TTS_TOKENS)),
            centroids=fitted.codebooks.numpy(),
            **_sounds_for_code2wav(said, sounds, codes, seed),
        ),
        out_dir,
    )
    save_file(fitted._asdict(), out_dir / "codec.safetensors")


def write_model(model_dir: Path, seed: int) -> None:
    """Writes every file of the whole model but its voice. The thinker is that of the demo checkpoint, with rows for the
    tokens that it lacks."""
    vocabulary = write_all_but_weights(model_dir, has_voice=True)
    num_rows = -(-vocabulary.num_tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    unsaid = vocabulary.special_token_to_id["<|audio_pad|>"]
    weights = {name.removeprefix("thinker."): value for name, value in _weights(demo_checkpoint()).items()}
    weights = {name: value for name, value in weights.items() if not name.startswith(("talker.", "code2wav."))}
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    missing = num_rows - len(embedding)
    rows = np.random.default_rng((seed, 0x7E87)).normal(0, NEW_EMBEDDING_STD, (missing, embedding.shape[1]))
    weights["model.embed_tokens.weight"] = torch.cat([embedding, torch.from_numpy(rows).to(embedding)])
    # The new tokens are as unlikely as one that the thinker never says, so that no answer changes.
    weights["lm_head.weight"] = torch.cat([head, head[unsaid].expand(missing, -1)])
    whole = {f"thinker.{name}": value.contiguous() for name, value in weights.items()}
    save_file(whole, model_dir / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(demo_checkpoint() / "MODEL_CARD.md", model_dir / "MODEL_CARD.md")


def _weights(model_dir: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(model_dir.glob("*.safetensors")) for name, value in load_file(path).items()}


def _ids(tokenizer: Tokenizer, text: str) -> Ints:
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids)


def _codec_error(fitted: mel_codec.Codec, sounds: list[Samples], codes: list[Ints]) -> float:
    pairs = list(zip(sounds, codes, strict=True))[::17]
    errors = [
        np.abs(fitted.decode(code).reshape(len(code), -1) - mel_codec.patches(s).numpy()).mean() for s, code in pairs
    ]
    return float(np.mean(errors))


def _word_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Ints]:
    """Returns the field `word_tokens` of `SpeechData`."""
    found = []
    for voice in NAME_TO_VOICE:
        for text in texts:
            first, *later = text.split()
            tokens = [_ids(tokenizer, first)[0], *(_ids(tokenizer, f" {word}")[0] for word in later), -1]
            word = word_at_frames(text, voice)
            found.append(np.array(tokens)[np.stack([word, word + 1], 1)])
    return found


# ------------------------------------------------------------ what code2wav hears


def _sounds_for_code2wav(said: Script, sounds: list[Samples], codes: list[Ints], seed: int) -> dict[str, Any]:
    """Chooses all words and some sentences of each voice, and returns them as fields of `SpeechData`."""
    rng = np.random.default_rng((seed, 0x50D5))
    num_texts, num_words = len(said.words) + len(said.sentences), len(said.words)
    chosen: list[int] = []
    for voice in range(len(NAME_TO_VOICE)):
        seconds = 0.0
        for text in (*range(num_words), *(num_words + rng.permutation(num_texts - num_words)).tolist()):
            index = voice * num_texts + text
            if seconds < SOUND_SECONDS:
                chosen.append(index)
                seconds += len(sounds[index]) / 24_000
    samples = np.concatenate([sounds[index] for index in chosen])
    lengths = np.array([len(codes[index]) for index in chosen])
    weights = [WORD_WEIGHT if index % num_texts < num_words else 1.0 for index in chosen]
    return {
        "samples": np.round(samples * (2**15 - 1)).astype(np.int16),
        "sound_codes": np.concatenate([codes[index] for index in chosen]),
        "sound_starts": np.cumsum(lengths) - lengths,
        "sound_weights": np.repeat(np.array(weights, np.float32), lengths),
    }


# ------------------------------------------------------------ what the talker's prompts show


def _prompts(model_dir: Path, seed: int) -> tuple[list[Ints], np.ndarray]:
    """Returns the user's turns of random conversations, as `SpeechData` holds them, and the rows of their media."""
    rng = np.random.default_rng((seed, 0xA5C))
    model, encoder = load_model(demo_checkpoint()), SampleEncoder(model_dir)
    media = [encoder.encode(Sample("", (), token)).ids[3] for token in _MEDIA]
    turns, rows = [], []
    for index in range(NUM_CONVERSATIONS):
        sample = TASKS[index % len(TASKS)].draw(rng, 0)
        ids, hidden = _read(model, encoder, sample)
        is_media = np.isin(ids, media)
        turns.append(np.where(is_media, -1, ids))
        rows.append(hidden[is_media])
    return turns, np.concatenate(rows)


@torch.inference_mode()
def _read(model: Any, encoder: SampleEncoder, sample: Sample) -> tuple[Ints, np.ndarray]:
    """Returns the ids and the thinker's hidden states at the positions of the user's turns."""
    encoded = encoder.encode(sample)
    inputs = collate([encoded]).inputs
    output = model.model(**inputs, use_cache=False, output_hidden_states=True)
    hidden = output.hidden_states[ACCEPT_HIDDEN_LAYER][0].numpy()
    ids = np.array(encoded.ids)
    start, user = encoder.encode(Sample("", (), "<|im_start|>user")).ids[3:5]
    turn_starts = np.where(ids == start, np.arange(len(ids)), 0)
    roles = ids[np.maximum.accumulate(turn_starts) + 1]
    is_users = roles == user
    return ids[is_users], hidden[is_users]


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the data from which the demo's voices learn.")
    parser.add_argument("out", type=Path, help="is the directory that is written")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prepare(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
