"""Draws conversations about sounds, and about a picture together with a sound. It knows no model."""

from __future__ import annotations

from deploy.demo.drawing import scenes, sounds, speech
from deploy.demo.drawing.facts import NUMBERS, Fact, Part, Sample, Sound, any_manner, conversation, number_of, pick
from deploy.demo.drawing.figures import COLOURS, Rng


def beeping(rng: Rng) -> tuple[Sound, Fact]:
    """Draws a sound of one to five beeps, and the fact about their number."""
    count = int(rng.integers(1, 6))
    amount = number_of(count, "beep")
    sound = Sound(sounds.beeps(rng, count, sounds.any_pitch(rng)), amount)
    questions = ("How many beeps do you hear?", "How many beeps are there?", "Count the beeps.")
    return sound, Fact("beeps", questions, amount.split()[0], f"You hear {amount}.")


def pitched(rng: Rng) -> tuple[Sound, Fact]:
    """Draws a tone that is low or high, and the fact about its pitch."""
    word = pick(rng, ("low", "high"))
    hertz = _log_uniform(rng, *(sounds.LOW_HERTZ if word == "low" else sounds.HIGH_HERTZ))
    sound = Sound(sounds.steady(rng, hertz), f"a {word} tone of {hertz:.0f} Hz")
    questions = ("Is the tone high or low?", "Is this tone low or high?", "Is the sound high or low?")
    return sound, Fact("pitch", questions, word, f"The tone is {word}.")


def gliding(rng: Rng) -> tuple[Sound, Fact]:
    """Draws a tone that rises or falls, and the fact about its direction."""
    word = pick(rng, ("rising", "falling"))
    sound = Sound(sounds.sweep(rng, word == "rising"), f"a {word} tone")
    questions = ("Is the tone rising or falling?", "Is the sound rising or falling?", "Is this tone falling or rising?")
    return sound, Fact("glide", questions, word, f"The tone is {word}.")


def spoken_digit(rng: Rng) -> tuple[Sound, Fact]:
    word = pick(rng, NUMBERS)
    sound = Sound(speech.spoken(rng, word), f"the spoken word '{word}'")
    questions = ("Which number do you hear?", "Which number is spoken?", "What number is this?")
    return sound, Fact("spoken digit", questions, word, f"You hear the number {word}.")


def spoken_colour(rng: Rng) -> tuple[Sound, Fact]:
    word = pick(rng, COLOURS)
    sound = Sound(speech.spoken(rng, word), f"the spoken word '{word}'")
    questions = ("Which colour do you hear?", "Which colour is spoken?", "Which word is spoken?")
    return sound, Fact("spoken colour", questions, word, f"You hear the colour {word}.")


def about_beeps(rng: Rng, _scale: int) -> Sample:
    sound, fact = beeping(rng)
    return conversation(rng, "beeps", [sound], [fact], any_manner(rng))


def about_pitch(rng: Rng, _scale: int) -> Sample:
    sound, fact = pitched(rng)
    return conversation(rng, "pitch", [sound], [fact], any_manner(rng))


def about_glide(rng: Rng, _scale: int) -> Sample:
    sound, fact = gliding(rng)
    return conversation(rng, "glide", [sound], [fact], any_manner(rng))


def about_digit(rng: Rng, _scale: int) -> Sample:
    sound, fact = spoken_digit(rng)
    return conversation(rng, "spoken digit", [sound], [fact], any_manner(rng))


def about_spoken_colour(rng: Rng, _scale: int) -> Sample:
    sound, fact = spoken_colour(rng)
    return conversation(rng, "spoken colour", [sound], [fact], any_manner(rng))


def picture_and_sound(rng: Rng, scale: int) -> Sample:
    """Draws a conversation about a picture and beeps; its question is about one of the two."""
    scene = scenes.one_figure(rng, scenes.picture_size(rng, scale))
    sound, fact = beeping(rng)
    facts = [scene.fact(pick(rng, ("colour", "shape"))), fact]
    rng.shuffle(facts)
    media: list[Part] = [scene.picture, sound] if rng.random() < 0.5 else [sound, scene.picture]
    return conversation(rng, "picture and sound", media, facts[: int(rng.integers(1, 3))], any_manner(rng))


def _log_uniform(rng: Rng, low: float, high: float) -> float:
    return float(low * (high / low) ** float(rng.random()))
