"""Checks the file of keys on any text: it is read, or refused with the number of a line, and what was written is
read."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from router.router_config import Tenant
from router.run import KeyFlaw, parse_keys

TENANTS = {name: Tenant(name) for name in ("shop", "bank")}
WORDS = st.one_of(
    st.sampled_from(
        ["shop", "bank", "-", "web", "role=operator", "role=tenant", "#", "ab" * 32, "sha256:" + "cd" * 32]
    ),
    st.builds("{}={}".format, st.sampled_from(["max_in_flight", "tokens_per_minute", "x"]), st.text(max_size=6)),
    st.text(max_size=8),
)
LINES = st.lists(st.lists(WORDS, max_size=6).map(" ".join), max_size=5)


@given(lines=LINES)
def test_any_text_is_keys_or_has_a_flaw_with_a_line(lines: list[str]) -> None:
    text = "\n".join(lines)
    num_lines = text.count("\n") + 1
    try:
        keys = parse_keys(text, TENANTS)
    except KeyFlaw as flaw:
        reason = str(flaw)
    else:
        reason = "line 1:"
        digests = [key.digest for key in keys]
        assert len(digests) == len(set(digests)) > 0
        for key in keys:
            assert key.caller.is_operator or key.caller.sends_requests
            assert key.caller.tenant.name in TENANTS or not key.caller.sends_requests
            assert key.digest.hex() in text
    assert reason == "the file has no key" or 1 <= int(reason.removeprefix("line ").partition(":")[0]) <= num_lines


@given(names=st.lists(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True), min_size=1, unique=True))
def test_what_is_written_is_read(names: list[str]) -> None:
    digests = [hashlib.sha256(name.encode()).digest() for name in names]
    pairs = zip(names, digests, strict=True)
    lines = [f"{digest.hex()} shop {name} tokens_per_minute={at}" for at, (name, digest) in enumerate(pairs, 1)]
    keys = parse_keys("\r\n".join(lines), TENANTS)
    assert [key.caller.key_name for key in keys] == names
    assert [key.caller.rates.tokens_per_minute for key in keys] == list(range(1, len(names) + 1))
    assert [key.digest for key in keys] == digests
