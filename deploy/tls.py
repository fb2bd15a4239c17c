"""Opens the certificate with which a router serves HTTPS, checks it, and reads it again when it is renewed.

`check_tls` makes a handshake of the certificate with itself, in memory: so it finds a key of another certificate and a
certificate that is expired, with the code that clients use. The module knows nothing of HTTP.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import NamedTuple

from deploy.config import ServerSection
from fabric.contracts import ConfigError

_LOG = logging.getLogger(__name__)


class TlsFiles(NamedTuple):
    """`TlsFiles` names the files of a certificate, in PEM."""

    cert_file: Path
    """Holds the certificate, and after it those that lead to its root."""
    key_file: Path
    client_ca_file: Path | None = None
    """Holds the authorities of clients; with it, every client needs a certificate of one of them."""

    @classmethod
    def of(cls, server: ServerSection) -> TlsFiles | None:
        """Returns the files that the config names, or None if the server speaks plain HTTP."""
        if server.tls_cert_file is None or server.tls_key_file is None:
            return None
        return cls(server.tls_cert_file, server.tls_key_file, server.tls_client_ca_file)

    def state(self) -> tuple[tuple[int, int, int], ...]:
        """Returns what changes when a file is written or replaced, also behind a symlink. Raises OSError."""
        found = [path.stat() for path in (self.cert_file, self.key_file)]
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)


def open_tls(files: TlsFiles) -> ssl.SSLContext:
    """Returns the context of a server. Raises ConfigError for a file that is missing, is no PEM, or does not belong to
    the other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, files)
    if files.client_ca_file is not None:
        try:
            context.load_verify_locations(files.client_ca_file)
        except OSError as error:
            raise ConfigError(f"server.tls_client_ca_file {files.client_ca_file}: {_reason(error)}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    for name, path in (("server.tls_cert_file", files.cert_file), ("server.tls_key_file", files.key_file)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} {path}: {_reason(error)}") from error
    try:
        # An encrypted key would otherwise ask for its password at the terminal.
        context.load_cert_chain(files.cert_file, files.key_file, password=_refuse_password)
    except (OSError, ValueError) as error:
        reason = _reason(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{files.cert_file} and {files.key_file} are no certificate with its key: {reason}"
        ) from error


def _refuse_password() -> str:
    raise ValueError("the key is encrypted with a password; write it without one")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error).replace("_", " ").lower()
    return error.strerror or str(error)


def check_tls(files: TlsFiles) -> str:
    """Returns when the certificate expires, as `Jan  1 00:00:00 2027 GMT`. Raises ConfigError as `open_tls` does, and
    if the certificate is expired, is not valid yet, or is none for servers."""
    server_context = open_tls(files)
    server_context.verify_mode = ssl.CERT_NONE
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    # The certificate itself is the root of trust, whoever signed it.
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        client_context.load_verify_locations(files.cert_file)
        server = server_context.wrap_bio(to_server, to_client, server_side=True)
        client = client_context.wrap_bio(to_client, to_server)
        is_done = False
        while not is_done:
            is_done = _step(client) & _step(server)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"the certificate {files.cert_file} can't be used: {error.verify_message}") from error
    except OSError as error:
        raise ConfigError(f"the certificate {files.cert_file} can't be used: {_reason(error)}") from error
    certificate = client.getpeercert() or {}
    return str(certificate.get("notAfter", "an unknown time"))


def _step(end: ssl.SSLObject) -> bool:
    """Takes one step of a handshake; returns whether this end is done."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


class TlsRenewal:
    """A `TlsRenewal` keeps the certificate of a running server up to date. New connections get the renewed certificate;
    a file that can't be used is reported once, and the former certificate stays."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ConfigError as `open_tls` does."""
        self.context = open_tls(files)
        self._files = files
        self._state = files.state()

    def refresh(self) -> bool:
        """Reads the files again if they have changed, and returns whether a certificate was read. Authorities of
        clients are read at the start only."""
        try:
            state = self._files.state()
        except OSError as error:
            if self._state != ():
                _LOG.error("the certificate can't be read, so the former one stays: %s", _reason(error))
            self._state = ()
            return False
        if state == self._state:
            return False
        self._state = state
        try:
            # A context that is in use must never hold the certificate of one pair and the key of another.
            open_tls(self._files)
            _load(self.context, self._files)
        except ConfigError as error:
            _LOG.error("the certificate has changed, but the former one stays: %s", error.message)
            return False
        _LOG.info("the certificate %s was read again", self._files.cert_file)
        return True
