"""Puts what is wrong with a field into words, for the messages that clients see about a request and operators about a
config file. `describe_flaw` turns an error of pydantic into a sentence with the value that was received, and `shown`
writes such a value. The module knows nothing of what a field means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from pydantic_core import ErrorDetails

MAX_SHOWN_CHARS = 64
"""Limits how much of a value a message repeats."""
_CONDITION = re.compile(r"(?:Input|String|List|Dictionary|Value) should ")
"""Matches the beginning of most of pydantic's messages; the condition follows it."""
_HINT = re.compile(r", (?:unable|got) .*| after validation")
"""Matches what pydantic adds to a condition, and what the received value says better."""
_MAPPING = re.compile(r"a valid dictionary(?: or instance of \w+)?")


def describe_flaw(flaw: ErrorDetails, subject: str) -> str:
    """Returns a sentence about `subject`, the name of the field: what it must be, and what it is. The text of a
    ValueError that a validator has raised is returned as it is."""
    if flaw["type"] == "value_error":
        return flaw["msg"].removeprefix("Value error, ")
    condition = _CONDITION.match(flaw["msg"])
    if condition is None:
        return f"{subject} is not valid: {flaw['msg']}"
    wanted = _MAPPING.sub("a mapping", _HINT.sub("", flaw["msg"][condition.end() :]))
    if flaw["type"] == "string_too_long":
        return f"{subject} must {wanted}, not {len(flaw['input'])}"
    return f"{subject} must {wanted}" if ", not " in wanted else f"{subject} must {wanted}, not {shown(flaw['input'])}"


def shown(value: object) -> str:
    """Returns a value as JSON, cut after `MAX_SHOWN_CHARS` characters; of an object or an array, only its kind."""
    if isinstance(value, Mapping):
        return "an object" if value else "an empty object"
    if isinstance(value, list | tuple):
        return "an array" if value else "an empty array"
    text = json.dumps(value[:MAX_SHOWN_CHARS] if isinstance(value, str) else value, default=str)
    is_cut = len(text) > MAX_SHOWN_CHARS or (isinstance(value, str) and len(value) > MAX_SHOWN_CHARS)
    return f"{text[:MAX_SHOWN_CHARS]}..." if is_cut else text
