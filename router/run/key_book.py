"""Knows the API keys of a cluster: `KeyBook` finds out whose a key is and what it may do, and reads the file of keys
again when it has changed.

A line of the file is one key: `DIGEST TENANT NAME`, and options such as `requests_per_minute=60` or `role=operator`;
`parse_keys` reads it. The keys themselves are nowhere: a digest is the SHA-256 of a key, and a key has enough random
bits that its digest can't be turned back. A file that can't be read, or has a flaw, changes nothing: the keys that were
known stay known, and the log names the line.

The module has no clock of its own, and knows nothing of HTTP or of requests.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from fabric.contracts import Clock, ConfigError, Forbidden, Unauthorized
from router.router_config import ANONYMOUS, NO_RATES, RateQuota, Tenant

_LOG = logging.getLogger(__name__)
CHECK_S = 1.0
"""The file is looked at at most this often."""
MAX_FILE_BYTES = 2**20
MAX_KEYS = 4096
"""Limits the keys of a file. A look-up compares with all of them, which takes about 0.1 µs each."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
NO_TENANT = "-"
"""A key of an operator that sends no requests has this in place of its tenant."""
RATE_OPTIONS = ("requests_per_minute", "tokens_per_minute", "media_seconds_per_minute")


class Caller(NamedTuple):
    """A `Caller` is whose a request is, as its key says."""

    tenant: Tenant = ANONYMOUS
    key_name: str = "none"
    """Names the key in metrics and messages; `none` stands for a request without a key."""
    key_id: str = ""
    """Tells keys apart: these are the first digits of the key's digest."""
    rates: RateQuota = NO_RATES
    """Holds the quotas of the key itself; those of its tenant hold too."""
    max_in_flight: int | None = None
    """Limits the requests of the key that are in flight, in all routers together."""
    is_operator: bool = False
    """Tells whether the caller may read metrics and the records of all requests."""
    sends_requests: bool = True
    """Tells whether the caller has a tenant, so that it may ask for answers."""


NO_CALLER = Caller()


class ApiKey(NamedTuple):
    """An `ApiKey` is a key that the cluster knows, by its digest."""

    digest: bytes
    caller: Caller


class KeyFlaw(ValueError):
    """A `KeyFlaw` is raised for a file of keys that has a flaw; its text names the line."""


# ------------------------------------------------------------ the file


def parse_keys(text: str, tenants: Mapping[str, Tenant]) -> list[ApiKey]:
    """Returns the keys of a file in its order. Raises KeyFlaw for a line that is no key, a tenant that the config does
    not have, a digest or name that occurs twice, and a file without a key."""
    keys: list[ApiKey] = []
    digest_to_line: dict[bytes, int] = {}
    name_to_line: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        key = _parse_line(words, number, tenants)
        name = (key.caller.tenant.name, key.caller.key_name)
        if (earlier := digest_to_line.setdefault(key.digest, number)) != number:
            raise KeyFlaw(f"line {number}: the digest stands in line {earlier} already")
        if (earlier := name_to_line.setdefault(name, number)) != number:
            raise KeyFlaw(f"line {number}: the tenant has a key of the name {name[1]} in line {earlier} already")
        keys.append(key)
        if len(keys) > MAX_KEYS:
            raise KeyFlaw(f"line {number}: the file has more than {MAX_KEYS} keys, which is the limit")
    if not keys:
        raise KeyFlaw("the file has no key")
    return keys


def _parse_line(words: list[str], number: int, tenants: Mapping[str, Tenant]) -> ApiKey:
    if len(words) < 3:
        raise KeyFlaw(f"line {number}: a key is written as DIGEST TENANT NAME [OPTION=VALUE ...]")
    digest, tenant_name, name = words[:3]
    match = DIGEST.fullmatch(digest)
    if match is None:
        # The word is not shown, because it may be the key itself.
        raise KeyFlaw(f"line {number}: the first word must be a SHA-256 digest of 64 hexadecimal digits")
    if NAME.fullmatch(name) is None:
        raise KeyFlaw(f"line {number}: a name has up to 64 letters, digits and the characters _ . -")
    options = _options(words[3:], number)
    is_operator = options.pop("role", "tenant") == "operator"
    if tenant_name not in tenants and not (tenant_name == NO_TENANT and is_operator):
        known = ", ".join(tenants) or "none"
        raise KeyFlaw(f"line {number}: the config has no tenant {tenant_name[:64]!r}; it has {known}")
    limits = {option: _number(options.pop(option, None), option, number) for option in RATE_OPTIONS}
    most = _number(options.pop("max_in_flight", None), "max_in_flight", number)
    caller = Caller(
        tenants.get(tenant_name, ANONYMOUS),
        name,
        match[1][:16],
        RateQuota(**limits),
        None if most is None else max(1, int(most)),
        is_operator,
        sends_requests=tenant_name != NO_TENANT,
    )
    return ApiKey(bytes.fromhex(match[1]), caller)


def _options(words: list[str], number: int) -> dict[str, str]:
    known = ("role", "max_in_flight", *RATE_OPTIONS)
    options: dict[str, str] = {}
    for word in words:
        option, is_pair, value = word.partition("=")
        if not is_pair or option not in known or option in options:
            raise KeyFlaw(
                f"line {number}: {word[:64]!r} is no option, or stands there twice; options are {', '.join(known)}"
            )
        options[option] = value
    if options.get("role", "tenant") not in ("tenant", "operator"):
        raise KeyFlaw(f"line {number}: the role must be tenant or operator, not {options['role'][:64]!r}")
    return options


def _number(text: str | None, option: str, number: int) -> float | None:
    if text is None:
        return None
    value = float(text) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", text) else 0.0
    if value <= 0 or (option == "max_in_flight" and value != int(value)):
        raise KeyFlaw(f"line {number}: {option} must be a number above 0, not {text[:64]!r}")
    return value


def new_key(tenant: str, name: str | None = None, is_operator: bool = False) -> tuple[str, str]:
    """Returns a new random key of 256 bits, and its line for the file. Raises ConfigError for a name or tenant that no
    line can have."""
    key = f"sk-weft-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    name = name or f"key-{digest[:8]}"
    for word in (name, *(() if tenant == NO_TENANT else (tenant,))):
        if NAME.fullmatch(word) is None:
            raise ConfigError(f"{word!r} is no name; names have up to 64 letters, digits and the characters _ . -")
    return key, f"{digest} {tenant} {name}{' role=operator' if is_operator else ''}"


class FileState(NamedTuple):
    """A `FileState` tells one content of a file from another: a file that was written, replaced, or swapped behind a
    symlink (as Kubernetes does with secrets) has another state."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileState:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class KeyFile:
    """A `KeyFile` reads the keys of a file, and again once the file has changed."""

    def __init__(self, path: Path, tenants: Iterable[Tenant], clock: Clock) -> None:
        """Reads the file for the first time. Raises ConfigError if it has a flaw or can't be read."""
        self._path = path
        self._name_to_tenant = {each.name: each for each in tenants}
        self._clock = clock
        self._checked_at_s = clock.now()
        self._state: FileState | None = None
        try:
            self.keys = self._read()
        except (OSError, KeyFlaw) as error:
            raise ConfigError(f"the file of keys {path} can't be used: {_reason(error)}") from error

    def refresh(self) -> bool:
        """Reads the file again if it has changed since it was last read, and returns whether there are new keys. A file
        with a flaw is reported once in the log, and the former keys stay."""
        now = self._clock.now()
        if now - self._checked_at_s < CHECK_S:
            return False
        self._checked_at_s = now
        before = self._state
        try:
            if FileState.of(self._path.stat()) == before:
                return False
            self.keys = self._read()
        except (OSError, KeyFlaw) as error:
            if isinstance(error, OSError):
                self._state = None
            if self._state != before or isinstance(error, KeyFlaw):
                _LOG.error(
                    "the file of keys %s can't be used, so the former keys stay valid: %s", self._path, _reason(error)
                )
            return False
        _LOG.info("the file of keys %s was read again; it has %d keys", self._path, len(self.keys))
        return True

    def _read(self) -> list[ApiKey]:
        with self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            self._state = FileState.of(found)
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise KeyFlaw(f"the file has more than {MAX_FILE_BYTES} bytes, which is the limit")
        try:
            keys = parse_keys(data.decode(), self._name_to_tenant)
        except UnicodeDecodeError:
            raise KeyFlaw("the file is not UTF-8 text") from None
        if found.st_mode & stat.S_IROTH:
            _LOG.warning("every user of this machine can read the file of keys %s; its mode should be 0600", self._path)
        return keys


def _reason(error: OSError | KeyFlaw) -> str:
    return str(error.strerror) if isinstance(error, OSError) else str(error)


# ------------------------------------------------------------ look-ups


class KeyBook:
    """A `KeyBook` finds the caller of a key. Each look-up compares with the digests of all keys, in a time that does
    not depend on how much of one matches."""

    def __init__(
        self,
        tenants: Iterable[Tenant],
        clock: Clock,
        keys_file: Path | None = None,
        operator_digests: Iterable[str] = (),
    ) -> None:
        """Raises ConfigError if there is a file of keys that can't be used."""
        tenants = tuple(tenants)
        self._file = None if keys_file is None else KeyFile(keys_file, tenants, clock)
        keyless = next((each for each in tenants if not each.key_digests), None)
        self._keyless = None if keyless is None or keys_file is not None else Caller(keyless)
        self._own = [_key_of(digest, Caller(each)) for each in tenants for digest in each.key_digests]
        operator = Caller(is_operator=True, sends_requests=False)
        self._own += [_key_of(digest, operator) for digest in operator_digests]
        self._keys = [*self._own, *(self._file.keys if self._file is not None else ())]
        self.is_open = not tenants and not self._keys
        """Tells whether no key is known at all; then everybody may do everything."""

    @property
    def asks_for_keys(self) -> bool:
        """Tells whether a request without a key is refused."""
        return not self.is_open and self._keyless is None

    def find(self, key: str | None) -> Caller:
        """Returns the caller with this key. Without configured tenants and keys, every request is of `ANONYMOUS`, with
        any key or with none. Raises Unauthorized if the key is unknown, or if a key is missing and no tenant sends
        requests without one."""
        if self.is_open:
            return Caller(is_operator=True)
        if self._file is not None and self._file.refresh():
            self._keys = [*self._own, *self._file.keys]
        if key is None:
            if self._keyless is None:
                raise Unauthorized("an API key is required; send it as `Authorization: Bearer KEY`")
            return self._keyless
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found: Caller | None = None
        for known in self._keys:
            if hmac.compare_digest(digest, known.digest):
                found = known.caller
        if found is None:
            raise Unauthorized("the API key is none of those that this cluster knows")
        return found


def _key_of(digest: str, caller: Caller) -> ApiKey:
    """Returns a key of the config, which has no name of its own there: the first digits of its digest name it."""
    return ApiKey(bytes.fromhex(digest), caller._replace(key_name=digest[:8], key_id=digest[:16]))


def check_operator(caller: Caller) -> None:
    """Raises Forbidden unless the caller is an operator."""
    if not caller.is_operator:
        raise Forbidden("metrics and the records of requests need the key of an operator")


def check_tenant(caller: Caller) -> None:
    """Raises Forbidden if the caller is an operator without a tenant."""
    if not caller.sends_requests:
        raise Forbidden("this operator's key belongs to no tenant, so it can't ask for answers; use a tenant's key")
