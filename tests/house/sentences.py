"""Says whether a docstring begins with a sentence that has a finite verb, as far as three lists of words can tell.

`verbs.txt` holds forms that are verbs wherever they stand ("returns", "is", "may"); `nouns_or_verbs.txt` holds forms
that are plural nouns as well ("names", "features"). Such a form counts as a verb where a sentence of a docstring has
its verb: at the beginning, unless a preposition follows, behind "the" and a noun, and behind a pronoun or a name.
It also counts before a determiner ("counts the tokens"). `base_verbs.txt` holds the forms that go with a plural ("units
wait"), which count behind a plural. Participles are left out, because they stand in fragments too. Each clause that
depends on another uses up one verb.
"""

from __future__ import annotations

import re
from pathlib import Path

_HERE = Path(__file__).parent
VERBS = frozenset((_HERE / "verbs.txt").read_text().split())
NOUNS_OR_VERBS = frozenset((_HERE / "nouns_or_verbs.txt").read_text().split())
BASE_VERBS = frozenset((_HERE / "base_verbs.txt").read_text().split())
_BEHIND_A_NOUN = frozenset(("of", "in", "with"))
_BEFORE_A_VERB = frozenset(("it", "and", "then", "also", "never", "always", "only", "name"))

_DETERMINERS = frozenset(
    ("a", "an", "the", "each", "every", "no", "one", "this", "these", "it", "its", "whether", "how")
)
_MARKERS = frozenset(
    ("that", "which", "who", "whose", "whom", "where", "when", "if", "because", "until", "while", "as", "after")
)
"""Each of these words begins a clause that depends on another, and such a clause has a verb of its own."""


def is_sentence(text: str) -> bool:
    """Returns whether the first sentence of `text` has a finite verb beside those of its dependent clauses."""
    first = re.split(r"(?<=[.:;!?])\s", " ".join(text.split()), maxsplit=1)[0]
    words = [word.lower() for word in re.findall(r"[A-Za-z']+", re.sub(r"`[^`]*`", " name ", first))]
    verbs = [place for place in range(len(words)) if _is_verb(words, place)]
    markers = [place for place, word in enumerate(words) if word in _MARKERS and place > 0]
    return len(verbs) > len(markers) or any(place < min(markers) for place in verbs)


def _is_verb(words: list[str], place: int) -> bool:
    word = words[place]
    if word in VERBS or word.endswith("n't"):
        return True
    before = words[place - 1] if place else ""
    if word in BASE_VERBS and (before in ("they", "we") or before.endswith("s")):
        return True
    if word not in NOUNS_OR_VERBS:
        return False
    if words[place + 1 : place + 2] and words[place + 1] in _DETERMINERS:
        return True
    if place == 0:
        return len(words) == 1 or words[1] not in _BEHIND_A_NOUN
    if place == 2 and words[0] in _DETERMINERS:
        return True
    return before in _BEFORE_A_VERB
