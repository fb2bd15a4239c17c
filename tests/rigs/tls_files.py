"""Makes certificates for tests with the openssl program, each signed by itself. It knows nothing of servers."""

from __future__ import annotations

import subprocess
from pathlib import Path

from deploy.tls import TlsFiles


def make_certificate(folder: Path, name: str = "server", *options: str, usage: str = "serverAuth") -> TlsFiles:
    """Writes `NAME.crt` and `NAME.key` for 127.0.0.1 into `folder`. `options` are further ones of `openssl req`, such
    as `-not_after`."""
    files = TlsFiles(folder / f"{name}.crt", folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(files.key_file), "-out", str(files.cert_file), "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", f"extendedKeyUsage={usage}", *options]
    subprocess.run(command, check=True, capture_output=True)
    return files


def expire(folder: Path, files: TlsFiles, name: str = "expired") -> TlsFiles:
    """Writes a certificate with the key of `files` whose time has passed."""
    command = ["openssl", "x509", "-in", str(files.cert_file), "-signkey", str(files.key_file), "-days", "-1"]
    expired = TlsFiles(folder / f"{name}.crt", files.key_file)
    subprocess.run([*command, "-out", str(expired.cert_file)], check=True, capture_output=True)
    return expired
