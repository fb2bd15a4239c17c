"""Tests the API keys of a cluster: the form of the file, what it refuses, when it is read again, and look-ups."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
from pathlib import Path

import pytest

from fabric.contracts import ConfigError, Forbidden, ManualClock, Unauthorized
from router.router_config import ANONYMOUS, RateQuota, Tenant
from router.run import KeyBook, KeyFlaw, check_operator, check_tenant, parse_keys
from router.run.key_book import CHECK_S, MAX_FILE_BYTES, MAX_KEYS


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


SHOP, BANK = Tenant("shop"), Tenant("bank", (digest("sk-bank"),))
TENANTS = {"shop": SHOP, "bank": BANK}


def line(key: str, rest: str = "shop web") -> str:
    return f"{digest(key)} {rest}\n"


def write(path: Path, text: str) -> Path:
    """Replaces the file as a careful program does, so that it has another inode."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.chmod(0o600)
    fresh.replace(path)
    return path


# ------------------------------------------------------------ the form of the file


def test_a_line_is_a_key_with_its_options() -> None:
    text = (
        "# who has what\n\n"
        f"sha256:{line('a', 'shop web requests_per_minute=60 tokens_per_minute=1.5 max_in_flight=2')}"
        f"{line('b', 'shop app media_seconds_per_minute=90  # a phone')}"
        f"{line('c', '- grafana role=operator')}"
        f"{line('d', 'bank web role=operator')}"
    )
    web, app, grafana, boss = (key.caller for key in parse_keys(text, TENANTS))
    assert (web.tenant, web.key_name, web.max_in_flight) == (SHOP, "web", 2)
    assert web.rates == RateQuota(requests_per_minute=60.0, tokens_per_minute=1.5)
    assert app.rates == RateQuota(media_seconds_per_minute=90.0)
    assert (grafana.is_operator, grafana.sends_requests) == (True, False)
    assert (boss.tenant, boss.is_operator, boss.sends_requests) == (BANK, True, True)
    assert [web.is_operator, app.is_operator] == [False, False]


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("", "the file has no key"),
        ("# nothing\n", "the file has no key"),
        (f"{line('a')}sk-my-secret-key shop web\n", "line 2: the first word must be a SHA-256 digest"),
        (f"{digest('a').upper()} shop web\n", "line 1: the first word must be a SHA-256 digest"),
        (f"{digest('a')} shop\n", "line 1: a key is written as DIGEST TENANT NAME"),
        (f"\n{line('a', 'shoop web')}", "line 2: the config has no tenant 'shoop'; it has shop, bank"),
        (line("a", "- web"), "line 1: the config has no tenant '-'"),
        (line("a", "shop w/b"), "line 1: a name has up to 64 letters"),
        (line("a") + line("a", "shop app"), "line 2: the digest stands in line 1 already"),
        (line("a") + line("b"), "line 2: the tenant has a key of the name web in line 1 already"),
        (line("a", "shop web rpm=1"), "line 1: 'rpm=1' is no option"),
        (line("a", "shop web role=operator role=tenant"), "line 1: 'role=tenant' is no option, or stands there twice"),
        (line("a", "shop web role=root"), "line 1: the role must be tenant or operator, not 'root'"),
        (line("a", "shop web tokens_per_minute=0"), "line 1: tokens_per_minute must be a number above 0, not '0'"),
        (line("a", "shop web tokens_per_minute=nan"), "line 1: tokens_per_minute must be a number above 0"),
        (line("a", "shop web tokens_per_minute=1e9"), "line 1: tokens_per_minute must be a number above 0"),
        (line("a", "shop web max_in_flight=1.5"), "line 1: max_in_flight must be a number above 0, not '1.5'"),
    ],
)
def test_a_flaw_names_its_line(text: str, flaw: str) -> None:
    with pytest.raises(KeyFlaw) as caught:
        parse_keys(text, TENANTS)
    assert str(caught.value).startswith(flaw)
    assert "secret" not in str(caught.value), "a key that stands there by mistake is not shown"


def test_a_file_has_a_limit_of_keys() -> None:
    lines = "".join(line(str(number), f"shop key-{number}") for number in range(MAX_KEYS + 1))
    with pytest.raises(KeyFlaw, match=f"line {MAX_KEYS + 1}: the file has more than {MAX_KEYS} keys"):
        parse_keys(lines, TENANTS)


# ------------------------------------------------------------ look-ups


def test_keys_of_the_config_find_their_tenants() -> None:
    public = Tenant("public")
    book = KeyBook([BANK, public], ManualClock(), operator_digests=[digest("sk-ops")])
    assert book.find("sk-bank").tenant is BANK
    assert book.find("sk-bank").key_name == digest("sk-bank")[:8]
    assert book.find(None).tenant is public
    for wrong in ("sk-ban", "", "sk-bänk", "\udcff", digest("sk-bank")):
        with pytest.raises(Unauthorized, match="none of those"):
            book.find(wrong)
    with pytest.raises(Unauthorized, match="an API key is required"):
        KeyBook([BANK], ManualClock()).find(None)
    with pytest.raises(Unauthorized, match="an API key is required"):
        KeyBook([], ManualClock(), operator_digests=[digest("sk-ops")]).find(None)


def test_a_look_up_compares_with_all_keys_whichever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an answer must not tell how much of a key is right, or where it stands (CVE-2025-59425). So each
    look-up compares the digest with that of every key, and by the comparison whose time does not depend on them."""
    compared: list[tuple[bytes, bytes]] = []

    def noted(sent: bytes, known: bytes) -> bool:
        compared.append((sent, known))
        return compare(sent, known)

    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", noted)
    names = ["first", "second", "last"]
    book = KeyBook([Tenant(name, (digest(name),)) for name in names], ManualClock())
    for sent in (*names, "none"):
        compared.clear()
        with contextlib.suppress(Unauthorized):
            assert book.find(sent).tenant.name == sent
        digests = [bytes.fromhex(digest(name)) for name in names]
        assert compared == [(bytes.fromhex(digest(sent)), known) for known in digests]


def test_without_tenants_and_keys_everything_is_open() -> None:
    book = KeyBook([], ManualClock())
    caller = book.find(None)
    assert caller == book.find("any key")
    assert caller.tenant is ANONYMOUS
    check_operator(caller)
    check_tenant(caller)


def test_roles() -> None:
    book = KeyBook([BANK], ManualClock(), operator_digests=[digest("sk-ops")])
    check_operator(book.find("sk-ops"))
    with pytest.raises(Forbidden, match="belongs to no tenant"):
        check_tenant(book.find("sk-ops"))
    check_tenant(book.find("sk-bank"))
    with pytest.raises(Forbidden, match="need the key of an operator"):
        check_operator(book.find("sk-bank"))


def test_with_a_file_no_request_is_without_a_key(tmp_path: Path) -> None:
    book = KeyBook([SHOP, BANK], ManualClock(), write(tmp_path / "keys", line("a")))
    assert book.find("a").tenant is SHOP
    assert book.find("sk-bank").tenant is BANK
    with pytest.raises(Unauthorized, match="an API key is required"):
        book.find(None)


# ------------------------------------------------------------ reading it again


def knows(book: KeyBook, key: str) -> bool:
    try:
        book.find(key)
    except Unauthorized:
        return False
    return True


def test_a_replaced_file_is_read_again_after_a_second(tmp_path: Path) -> None:
    clock = ManualClock()
    path = write(tmp_path / "keys", line("old"))
    book = KeyBook([SHOP], clock, path)
    write(path, line("new"))
    clock.advance(CHECK_S / 2)
    assert (knows(book, "old"), knows(book, "new")) == (True, False)
    clock.advance(CHECK_S / 2)
    assert (knows(book, "old"), knows(book, "new")) == (False, True)


def test_a_file_of_the_same_size_and_time_is_told_by_its_inode(tmp_path: Path) -> None:
    clock = ManualClock()
    path = write(tmp_path / "keys", line("old"))
    book = KeyBook([SHOP], clock, path)
    before = path.stat()
    write(path, line("new"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    clock.advance(CHECK_S)
    assert knows(book, "new")


def test_a_secret_of_kubernetes_is_seen_when_its_symlink_is_swapped(tmp_path: Path) -> None:
    """Kubernetes mounts `keys -> ..data/keys` and `..data -> ..v1`, and swaps `..data` in one step. Neither the link
    `keys` nor the folder of the former version changes."""
    clock = ManualClock()
    for version, key in (("..v1", "old"), ("..v2", "new")):
        (tmp_path / version).mkdir()
        write(tmp_path / version / "keys", line(key))
    (tmp_path / "..data").symlink_to("..v1")
    (tmp_path / "keys").symlink_to("..data/keys")
    book = KeyBook([SHOP], clock, tmp_path / "keys")
    assert knows(book, "old")
    (tmp_path / "..fresh").symlink_to("..v2")
    (tmp_path / "..fresh").replace(tmp_path / "..data")
    clock.advance(CHECK_S)
    assert (knows(book, "old"), knows(book, "new")) == (False, True)


def test_a_broken_file_keeps_the_former_keys_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    path = write(tmp_path / "keys", line("old"))
    book = KeyBook([SHOP], clock, path)
    for broken, reason in (
        (line("new") + "oops\n", "line 2: a key is written as"),
        ("", "the file has no key"),
        ("x" * (MAX_FILE_BYTES + 1), f"more than {MAX_FILE_BYTES} bytes"),
    ):
        caplog.clear()
        write(path, broken)
        for _ in range(3):
            clock.advance(CHECK_S)
            assert (knows(book, "old"), knows(book, "new")) == (True, False)
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1
        assert reason in errors[0]
        assert "the former keys stay valid" in errors[0]
    caplog.clear()
    path.unlink()
    for _ in range(3):
        clock.advance(CHECK_S)
        assert knows(book, "old")
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    write(path, line("new"))
    clock.advance(CHECK_S)
    assert (knows(book, "old"), knows(book, "new")) == (False, True)


def test_a_file_that_everybody_can_read_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "keys", line("a"))
    KeyBook([SHOP], ManualClock(), path)
    assert not caplog.records
    path.chmod(0o644)
    KeyBook([SHOP], ManualClock(), path)
    assert ["every user of this machine can read" in record.getMessage() for record in caplog.records] == [True]


def test_a_cluster_does_not_start_with_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be used: No such file"):
        KeyBook([SHOP], ManualClock(), tmp_path / "keys")
    (tmp_path / "keys").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        KeyBook([SHOP], ManualClock(), tmp_path / "keys")
