"""Measures how well the demo's voices are understood: `python -m deploy.demo.speech.evaluate_voice DATA`.

`DATA` is what `deploy.demo.speech.prepare` wrote: it holds the codec, with which the ceiling is measured. Two judges
listen: one looks for the nearest recording (`judges`), and one is the demo's thinker, which is asked for the colours
and numbers that it knows by ear. Every measure counts words. Recordings are made with espeak-ng.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tqdm import tqdm

from deploy.demo import speech_config
from deploy.demo.build import demo_checkpoint
from deploy.demo.drawing.facts import NUMBERS, SAMPLE_RATE, ChatTurn, Sample, Sound
from deploy.demo.drawing.figures import COLOURS
from deploy.demo.evaluate import GOAL, are_right, fresh_samples, load_model
from deploy.demo.speech import mel_codec
from deploy.demo.speech.judges import Judge, Mels, features, features_of_mels, recorded, sentences_of
from deploy.demo.speech.recordings import NAME_TO_VOICE, Samples, recording, resampled
from deploy.demo.speech.script import WORDS, script
from deploy.demo.speech.speaking import GREEDY, Drawing, answer, load_voice, sound, speak
from deploy.demo.speech.speech_data import Ints
from deploy.demo.tasks.catalogue import TASKS
from deploy.demo.training.encoding import SampleEncoder

CEILING_SPEED = 160
"""Gives the words per minute of the words that the ceiling is measured with; no training has heard them."""
QUESTIONS = ("What do you see?", "Say it.", "Hello! Which one is it, please?")
NUM_LONG = 6
NUM_CONVERSATIONS = 6
"""Counts the conversations of each task."""
SECTION = "\n## How well its speech is understood\n"


class Measure(NamedTuple):
    what: str
    judge: str
    voice: str
    num_right: int
    num_words: int

    @property
    def share(self) -> float:
        return self.num_right / max(1, self.num_words)


class Listeners:
    """Hears sounds of one voice, and collects how many words each kind of sound was understood of."""

    def __init__(self, voice: str) -> None:
        self.voice = voice
        self.measures: list[Measure] = []
        self._judge = Judge(recorded(voice))

    def hear(self, what: str, said: Sequence[tuple[Mels, Sequence[str]]]) -> None:
        """Judges sounds by their features; each consists of some words and sentences."""
        found = [self._judge.words_of_parts(mels, parts) for mels, parts in tqdm(said, desc=f"{self.voice}: {what}")]
        for (_, parts), right in zip(said, found, strict=True):
            if not all(right):
                lost = [word for word, ok in zip(" ".join(parts).split(), right, strict=True) if not ok]
                print(f"{what}: of {' '.join(parts)!r}, {lost} was not understood")
        self.add(what, "recordings", [is_right for right in found for is_right in right])

    def add(self, what: str, judge: str, right: Sequence[bool]) -> None:
        self.measures.append(Measure(what, judge, self.voice, sum(right), len(right)))


def measure(model: Any, model_dir: Path, data_dir: Path, voice: str, seed: int) -> list[Measure]:
    """Returns all measures of a voice; sounds that were not understood are printed."""
    listeners = Listeners(voice)
    unseen = script(seed).held_out
    spoken = [recording(word, voice, CEILING_SPEED) for word in WORDS]
    spoken += [recording(text, voice) for text in unseen]
    parts = [[text] for text in (*WORDS, *unseen)]
    codec = mel_codec.Codec(**load_file(data_dir / "codec.safetensors"))
    codes = [codec.encode(samples) for samples in spoken]
    listeners.hear("recordings themselves", list(zip(map(features, spoken), parts, strict=True)))
    decoded = [features_of_mels(codec.decode(code)) for code in codes]
    listeners.hear("the codec's own spectrograms", list(zip(decoded, parts, strict=True)))
    sounds = [features(sound(model, code)) for code in codes]
    listeners.hear("code2wav, from a recording's codes", list(zip(sounds, parts, strict=True)))
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    for name, drawing in (("", GREEDY), (", drawn at random", Drawing())):
        speaker = _speaker(model, tokenizer, voice, drawing)
        words = [pair for question in QUESTIONS for pair in speaker(question, [[word] for word in WORDS])]
        listeners.hear(f"words{name}", [(features(samples), text) for samples, text in words])
        _ask_the_thinker(listeners, model_dir, f"words{name}", words)
        for what, texts in (("unseen sentences", [[text] for text in unseen]), ("long answers", _long(unseen, seed))):
            said = speaker(QUESTIONS[0], texts)
            listeners.hear(what + name, [(features(samples), text) for samples, text in said])
    listeners.hear("fresh conversations", list(_conversations(model, model_dir, voice, seed)))
    return listeners.measures


def _speaker(
    model: Any, tokenizer: Tokenizer, voice: str, drawing: Drawing
) -> Callable[[str, list[list[str]]], list[tuple[Samples, list[str]]]]:
    """Returns a function that speaks answers to a question, each one given by its parts."""

    def ids(text: str) -> Ints:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids)

    def said(question: str, texts: list[list[str]]) -> list[tuple[Samples, list[str]]]:
        prompt = ids(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        codes = speak(model, prompt, [ids(_joined(parts)) for parts in texts], voice, drawing)
        return [(sound(model, code), parts) for code, parts in zip(codes, texts, strict=True)]

    return said


def _joined(parts: Sequence[str]) -> str:
    return (" " if parts[0].endswith((".", "!", "?")) else ", ").join(parts)


def _long(unseen: Sequence[str], seed: int) -> list[list[str]]:
    """Returns answers of 20 s and more: unseen sentences in a row, and the words for numbers again and again."""
    rng = np.random.default_rng((seed, 0x1046))
    rows = [[unseen[index] for index in rng.permutation(len(unseen))[:11]] for _ in range(NUM_LONG - 1)]
    return [*rows, [*NUMBERS[1:]] * 4]


def _ask_the_thinker(
    listeners: Listeners, model_dir: Path, what: str, said: Sequence[tuple[Samples, Sequence[str]]]
) -> None:
    thinker, encoder = load_model(model_dir), SampleEncoder(model_dir)
    right = []
    for samples, (word, *_) in said:
        if word not in (*NUMBERS, *COLOURS):
            continue
        heard = Sound(resampled(samples, speech_config.SAMPLE_RATE, SAMPLE_RATE), word)
        question = "Which number is spoken?" if word in NUMBERS else "Which word is spoken?"
        sample = Sample("ears", (ChatTurn("user", (heard, question)),), word)
        right.append(are_right(thinker, encoder, [sample])[0])
    listeners.add(what, "the thinker", right)


def _conversations(model: Any, model_dir: Path, voice: str, seed: int) -> Iterator[tuple[Mels, list[str]]]:
    """Yields what transformers' own `generate` says in fresh conversations of each task: its sound, and its text in
    sentences."""
    encoder = SampleEncoder(model_dir)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    for task in TASKS:
        for sample in fresh_samples(task, NUM_CONVERSATIONS, seed + 100):
            ids, samples = answer(model, encoder, sample, voice)
            yield features(samples), sentences_of(tokenizer.decode(ids))


# ------------------------------------------------------------ the report


def table(measures: Sequence[Measure]) -> str:
    """Returns the measures in Markdown, a row for each kind of sound and judge."""
    rows: dict[tuple[str, str], dict[str, Measure]] = {}
    for one in measures:
        rows.setdefault((one.what, one.judge), {})[one.voice] = one
    voices = list(dict.fromkeys(one.voice for one in measures))
    lines = [f"| what is heard | judge | {' | '.join(voices)} |", f"|---|---|{'---:|' * len(voices)}"]
    for (what, judge), found in rows.items():
        cells = [f"{one.share:.1%} of {one.num_words}" for one in (found[voice] for voice in voices)]
        lines.append(f"| {what} | {judge} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_section(report: str, measures: Sequence[Measure]) -> str:
    """Returns a report with the section about speech at its end; an old one is replaced."""
    text = Path(__file__).with_name("tried.md").read_text(encoding="utf-8")
    return report.split(SECTION)[0].rstrip() + "\n" + SECTION + text.format(table=table(measures), goal=f"{GOAL:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how well the demo's voices are understood.")
    parser.add_argument("data", type=Path, help="is the directory that deploy.demo.speech.prepare wrote")
    parser.add_argument("--model", type=Path, default=demo_checkpoint(), help="is the model that speaks")
    parser.add_argument("--seed", type=int, default=0, help="is the seed of the script")
    parser.add_argument("--report", type=Path, help="writes the measures to the end of this report")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_voice(arguments.model)
    found = [
        one for voice in NAME_TO_VOICE for one in measure(model, arguments.model, arguments.data, voice, arguments.seed)
    ]
    print(table(found))
    if arguments.report is not None:
        report = arguments.report.read_text(encoding="utf-8")
        arguments.report.write_text(with_section(report, found), encoding="utf-8")


if __name__ == "__main__":
    main()
