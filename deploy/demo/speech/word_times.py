"""Asks espeak-ng when each word of a recording begins.

The talker learns to name the word that is said and the one that comes next at each frame (`talker_training`). The
program `espeak-ng` does not tell the times, but its library does, with events. The module knows no model.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field
from functools import lru_cache

LIBRARY = "libespeak-ng.so.1"
_SYNCHRONOUS = 2
_CHARACTER_POSITION = 1
_PLAIN_ASCII_TEXT = 1
_RATE, _PITCH = 1, 3
_END_OF_LIST, _WORD = 0, 1


@dataclass(frozen=True, slots=True)
class Voice:
    """Names a voice of espeak-ng, and its pitch from 0 to 99."""

    espeak: str
    pitch: int


class _Event(ctypes.Structure):
    """Mirrors `espeak_EVENT` of `espeak-ng/speak_lib.h`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    )


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))


@dataclass(slots=True)
class _Library:
    """Holds the loaded library, of which a process has one, and where the words of the latest text began."""

    functions: ctypes.CDLL
    starts: list[tuple[int, float]] = field(default_factory=list)
    callback: object = None

    def hear(self, _samples: object, _num_samples: int, events: ctypes.Array[_Event]) -> int:
        at = 0
        while events[at].type != _END_OF_LIST:
            if events[at].type == _WORD and events[at].length > 0:
                self.starts.append((events[at].text_position - 1, events[at].audio_position / 1000))
            at += 1
        return 0


@lru_cache(1)
def _library() -> _Library:
    found = _Library(ctypes.CDLL(LIBRARY))
    if found.functions.espeak_Initialize(_SYNCHRONOUS, 0, None, 0) < 0:
        raise OSError(f"{LIBRARY} finds no data of its voices")
    found.callback = _Callback(found.hear)
    found.functions.espeak_SetSynthCallback(found.callback)
    return found


def word_starts(text: str, voice: Voice, speed: int) -> list[float]:
    """Returns when each word of `text.split()` begins, in seconds from the beginning of what espeak-ng writes. A word
    that it draws together with the one before, as "the" in "in the", begins halfway between its neighbours."""
    library = _library()
    library.starts.clear()
    functions, encoded = library.functions, text.encode("ascii")
    functions.espeak_SetVoiceByName(voice.espeak.encode())
    functions.espeak_SetParameter(_RATE, speed, 0)
    functions.espeak_SetParameter(_PITCH, voice.pitch, 0)
    size = ctypes.c_size_t(len(encoded) + 1)
    functions.espeak_Synth(encoded, size, 0, _CHARACTER_POSITION, 0, _PLAIN_ASCII_TEXT, None, None)
    position_to_start = dict(reversed(library.starts))
    found = [position_to_start.get(match.start()) for match in re.finditer(r"\S+", text)]
    return filled_starts(found)


def filled_starts(starts: list[float | None]) -> list[float]:
    """Returns the starts with each missing one halfway between its neighbours; one at the end is that before it."""
    found: list[float] = []
    for at, start in enumerate(starts):
        if start is None:
            before = found[-1] if found else 0.0
            after = next((later for later in starts[at:] if later is not None), before)
            start = (before + after) / 2
        found.append(start)
    return found
