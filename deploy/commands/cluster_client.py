"""Asks a running cluster over its HTTP API, for every command that does so.

`ClusterOptions` reads the options that these commands share: the URL, the key and the certificates. A `ClusterClient`
asks, and turns what goes wrong into an error that says what to do: nothing answers, the certificate is not trusted, a
key is missing or has no right to what was asked, or what answers is no Weft. The module knows nothing of what the
answers are used for.
"""

from __future__ import annotations

import argparse
import contextlib
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from fabric.contracts import ConfigError, Unavailable, WeftError

TIMEOUT_S = 10.0
"""A router answers what these commands ask in milliseconds, and after a second if another router is silent."""


class ClusterOptions(NamedTuple):
    """Holds how a cluster is reached. `url` has neither a path nor a slash at its end."""

    url: str
    api_key: str | None = None
    ca_file: Path | None = None
    client_cert_file: Path | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> ClusterOptions:
        """Returns the options of a command line. Raises ConfigError for a URL or a file of a key that can't be used."""
        key_file = arguments.api_key_file
        key = None if key_file is None else _read_key(key_file)
        return cls(plain_url(arguments.url), key, arguments.ca_file, arguments.client_cert_file)

    def tls(self) -> ssl.SSLContext | bool:
        """Returns what httpx takes as `verify`. Raises ConfigError for a file that can't be used."""
        if self.ca_file is None and self.client_cert_file is None:
            return True
        context = ssl.create_default_context()
        try:
            if self.ca_file is not None:
                context.load_verify_locations(self.ca_file)
        except OSError as error:
            raise ConfigError(f"--ca-file {self.ca_file} has no certificate that can be read: {error}") from error
        try:
            if self.client_cert_file is not None:
                context.load_cert_chain(self.client_cert_file)
        except OSError as error:
            reason = f"--client-cert-file {self.client_cert_file} has no certificate with its key"
            raise ConfigError(f"{reason}: {error}") from error
        return context


def plain_url(text: str) -> str:
    """Returns the URL of a cluster. The scheme may be missing, and a path that OpenAI's clients need (`/v1`) is taken
    off. Raises ConfigError for what is no URL."""
    try:
        url = httpx.URL(text if "://" in text else f"http://{text}")
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {text!r} is not a URL: {error}; write it as http://HOST:PORT") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"--url {text!r} is not a URL of a server; write it as http://HOST:PORT or https://HOST:PORT")
    return str(url.copy_with(path=url.path.rstrip("/").removesuffix("/v1") or "/", query=None)).rstrip("/")


def _read_key(path: Path) -> str:
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"the file of the API key {path} can't be read: {reason}") from error
    if not key or not key.isascii() or len(key.split()) != 1:
        raise ConfigError(f"the file of the API key {path} must hold the key alone, in one line")
    return key


class ClusterClient:
    """A `ClusterClient` asks one cluster. Close it when it is no longer needed. Several threads may use it."""

    def __init__(self, options: ClusterOptions, transport: httpx.BaseTransport | None = None) -> None:
        self.options = options
        headers = {} if options.api_key is None else {"authorization": f"Bearer {options.api_key}"}
        self._http = httpx.Client(
            base_url=options.url, headers=headers, timeout=TIMEOUT_S, verify=options.tls(), transport=transport
        )

    def __enter__(self) -> ClusterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def readiness(self) -> dict[str, Any]:
        """Returns what `GET /health/ready` says, ready or not. Every path but this one may need a key."""
        response = self._get("/health/ready", {})
        state = _json(response)
        if response.status_code not in (200, 503) or not isinstance(state, dict) or "num_workers" not in state:
            raise ConfigError(self._not_weft(response))
        return state

    def json(self, path: str, **params: object) -> Any:
        """Returns the JSON of a path. Raises what `refusal` says if the cluster refuses."""
        response = self._get(path, params)
        content = _json(response)
        if response.status_code != 200 or content is None:
            raise self.refusal(response)
        return content

    def find(self, path: str, **params: object) -> tuple[Any, str]:
        """Returns the JSON of a path and an empty text; or None and what the cluster says, if it has no such thing."""
        response = self._get(path, params)
        if response.status_code == 404 and (said := _error_of(response)):
            return None, said
        content = _json(response)
        if response.status_code != 200 or content is None:
            raise self.refusal(response)
        return content, ""

    def text(self, path: str) -> str:
        """Returns the text of a path, such as that of the metrics."""
        response = self._get(path, {})
        if response.status_code != 200:
            raise self.refusal(response)
        return response.text

    def model(self) -> str:
        """Returns the name of the model that the cluster serves."""
        listed = self.json("/v1/models")
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"{self.options.url} lists no model at /v1/models; is it the URL of Weft?") from error

    @contextlib.contextmanager
    def stream(self, path: str, body: Mapping[str, object], timeout_s: float) -> Iterator[httpx.Response]:
        """Yields the response to a POST while it arrives. Leaving the block closes the connection, which tells the
        cluster that the client has left. `timeout_s` limits each wait for the next bytes. Raises as `json` does."""
        try:
            with self._http.stream("POST", path, json=body, timeout=httpx.Timeout(timeout_s, connect=TIMEOUT_S)) as got:
                if got.status_code != 200:
                    got.read()
                    raise self.refusal(got)
                yield got
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _get(self, path: str, params: Mapping[str, Any]) -> httpx.Response:
        try:
            return self._http.get(path, params=params, headers={"accept": "application/json, text/plain"})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    # ------------------------------------------------------------ what goes wrong

    def refusal(self, response: httpx.Response) -> WeftError:
        """Returns the error for a response that is no success."""
        url, said, status = self.options.url, _error_of(response), response.status_code
        if not said:
            return ConfigError(self._not_weft(response))
        if status == 401:
            has_key = self.options.api_key is not None
            what = "does not know the key that you gave" if has_key else "asks for a key"
            return ConfigError(f"the cluster at {url} {what}; name a file with a valid one with --api-key-file FILE")
        if status == 403:
            advice = "an operator's key opens it (`weft key new --operator` makes one)"
            is_denied = response.json()["error"].get("code") == "permission_denied"
            return ConfigError(f"the cluster at {url} refuses: {said}" + (f"; {advice}" if is_denied else ""))
        if status in (429, 500, 502, 503, 504):
            return Unavailable(f"the cluster at {url} answers {status}: {said}")
        return ConfigError(f"the cluster at {url} answers {status}: {said}")

    def _not_weft(self, response: httpx.Response) -> str:
        where, server = self.options.url, response.headers.get("server", "")
        kind = f" (it calls itself {server[:40]!r})" if server else ""
        return (
            f"the server at {where}{kind} answers {response.status_code} to {response.request.url.path}, and not as "
            "Weft does; check --url"
        )

    def _unreachable(self, error: Exception) -> WeftError:
        url, said = self.options.url, str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in said:
            return ConfigError(
                f"the certificate of {url} is not trusted ({_reason(said)}); name the file of its authority with "
                "--ca-file FILE"
            )
        if "WRONG_VERSION_NUMBER" in said or "RECORD_LAYER" in said:
            return ConfigError(f"{url} does not speak HTTPS; try --url http://...")
        if "CERTIFICATE_REQUIRED" in said or "HANDSHAKE_FAILURE" in said:
            return ConfigError(f"{url} asks for a certificate of the client; name it with --client-cert-file FILE")
        if "_ALERT_" in said and self.options.client_cert_file is not None:
            return ConfigError(f"{url} does not take the certificate of --client-cert-file ({said})")
        if isinstance(error, httpx.RemoteProtocolError) and "disconnected" in said:
            return Unavailable(
                f"{url} closed the connection without an answer; is it restarting, or does it speak HTTPS?"
            )
        if isinstance(error, httpx.RemoteProtocolError):
            return ConfigError(f"{url} does not answer in HTTP ({said}); if it speaks HTTPS, try --url https://...")
        if isinstance(error, httpx.TimeoutException):
            return Unavailable(f"the cluster at {url} did not answer in time; it may be overloaded, or not reachable")
        return Unavailable(f"nothing answers at {url} ({said}); start a cluster with `weft serve`, or set --url")


def _reason(said: str) -> str:
    return said.partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or "unknown authority"


def _json(response: httpx.Response) -> Any:
    """Returns the JSON of a response, or None if it has none."""
    try:
        return response.json()
    except ValueError:
        return None


def _error_of(response: httpx.Response) -> str:
    """Returns the message of an error in OpenAI's envelope, or an empty text if the response has none."""
    content = _json(response)
    error = content.get("error") if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else ""
