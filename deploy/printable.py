"""Escapes what a text from elsewhere may not bring into a line of a log or onto a terminal.

The module knows nothing of where texts come from or go to.
"""

from __future__ import annotations

import re

UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Matches what text of a client may not bring into a line: control characters (a line break would begin a line that
nothing has written, and ESC speaks to the terminal), line separators, changes of the direction of writing, and halves
of a character, which a file can't hold."""


def escaped(text: str, kept: str = "") -> str:
    """Returns a text with its unprintable characters written as in a literal of Python, such as `\\n` and `\\x1b`,
    except those in `kept`."""
    return UNPRINTABLE.sub(
        lambda found: found[0] if found[0] in kept else found[0].encode("unicode_escape").decode(), text
    )
