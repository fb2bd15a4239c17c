"""Declares naive implementations of fetching and decoding media."""

from __future__ import annotations

import base64
import io
import os
import pickle
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from naive_plugin import Guards
from naive_variant import naive

# ------------------------------------------------------------ media by URL

SSRF = "contract/test_fetch_ssrf.py::"
FETCH = "contract/test_fetch_media.py::"
FLOODS = "contract/test_fetch_floods.py::"


@naive(
    "A URL of a medium names an address inside the operator's network.",
    "CVE-2025-6242, CVE-2026-33626",
    "router/fetch/address_rules.py",
    f"{SSRF}test_url_reaches_no_forbidden_listener['http://127.0.0.1:PORT/']",
)
def takes_every_address(guards: Guards) -> None:
    """Connects to any address."""
    guards.replace("router.fetch.address_rules:AddressRules.allows", lambda self, address: True)


@naive(
    "The name of a URL's host gets another address between the check and the connection.",
    "",
    "router/fetch/pinned_network.py",
    f"{SSRF}test_an_answer_that_changes_is_asked_for_once_and_pinned",
    "a secret",
)
def resolves_again(guards: Guards) -> None:
    """Checks the addresses of a name, and lets the connection resolve the name once more."""

    @guards.method("router.fetch.pinned_network:PinnedNetwork.connect_tcp")
    async def connect(self: Any, host: str, port: int, **options: Any) -> object:
        await self._validated(host)
        return await self._connect(
            await self._resolver.resolve(host), port, options["timeout"], options["socket_options"]
        )


@naive(
    "A public server redirects to an address inside the operator's network.",
    "",
    "router/fetch/fetching.py",
    f"{SSRF}test_redirect_reaches_no_forbidden_listener['http://127.0.0.1:PORT/'-302 Found]",
)
def trusts_redirects(guards: Guards) -> None:
    """Checks the URL of the client alone, and follows redirects as the HTTP library does."""
    validated: Any = None

    async def first_alone(self: Any, host: str) -> object:
        if getattr(self, "is_used", False) and host[0].isdigit():
            return [host]
        self.is_used = True
        return await validated(self, host)

    validated = guards.replace("router.fetch.pinned_network:PinnedNetwork._validated", first_alone)


@naive(
    "Two parsers read the host of one URL differently.",
    "CVE-2026-24779, CVE-2026-25960",
    "router/fetch/url_policy.py",
    "unit/router/fetch/test_url_policy.py::test_what_needs_tolerance_is_refused['https://example.com\\\\\\\\/']",
)
def repairs_urls(guards: Guards) -> None:
    """Reads URLs with the tolerant parser of the standard library."""
    from router.fetch.url_policy import FetchUrl

    @guards.method("router.fetch.url_policy:parse_url")
    def parse(text: str) -> FetchUrl:
        parts = urlsplit(text)
        return FetchUrl(parts.scheme, parts.hostname or "", parts.port or 443, parts.path or "/")


@naive(
    "A `file:` URL, or a link, leads out of the folder for media.",
    "",
    "router/fetch/file_root.py",
    f"{FETCH}test_a_file_is_read_under_its_root_alone[LoopFetcher]",
)
def follows_links(guards: Guards) -> None:
    """Compares the path with the folder as text, and opens it."""

    @guards.method("router.fetch.file_root:open_under")
    def open_anything(root: object, url: Any) -> int:
        return os.open(unquote(url.target), os.O_RDONLY | os.O_NONBLOCK)


@naive(
    "A server of media sends without end.",
    "",
    "router/fetch/url_fetcher.py",
    f"{FETCH}test_a_wrong_answer_is_an_error_of_the_request[LoopFetcher-large]",
)
def downloads_everything(guards: Guards) -> None:
    """Reads an answer to its end, whatever its size."""
    guards.replace("router.fetch.url_fetcher:_SharedFetch._charge", lambda self, num_bytes: None)


@naive(
    "A server of media sends chunks of one byte, each of which takes as long as one of thousands.",
    "",
    "router/fetch/wire_meter.py",
    f"{FLOODS}test_an_answer_that_is_no_file_is_not_read_further[LoopFetcher-tiny chunks behind a file]",
    "more bytes than the limit|processor time",
)
def reads_tiny_chunks(guards: Guards) -> None:
    """Takes the pieces of a file as they come, and compares the file alone with its limit."""
    guards.replace("router.fetch.wire_meter:WireMeter.read", lambda self, data: None)
    guards.replace("router.fetch.wire_meter:WireMeter.hand_on", lambda self, num_bytes: None)
    limit_processor_time(guards)


@naive(
    "A server of media sends interim answers (100 Continue) without end.",
    "",
    "router/fetch/wire_meter.py",
    f"{FLOODS}test_an_answer_that_is_no_file_is_not_read_further[LoopFetcher-interim answers]",
    "processor time",
)
def awaits_the_answer(guards: Guards) -> None:
    """Reads until an answer has a final status."""
    guards.replace("router.fetch.wire_meter:WireMeter.read", lambda self, data: None)
    limit_processor_time(guards)


def limit_processor_time(guards: Guards) -> None:
    """Ends a fetch that does not end by itself, so that its test need not wait."""
    guards.replace("router.fetch.url_fetcher:PROCESSOR_S", 0.5)
    guards.replace("router.fetch.url_fetcher:PROCESSOR_S_PER_BYTE", 0.0)


@naive(
    "The fetches of one tenant have so much to parse that those of others do not run.",
    "",
    "router/fetch/fair_turns.py",
    "unit/router/fetch/test_fair_turns.py::test_many_long_steps_of_one_party_leave_every_other_turn_to_another",
    "assert",
)
def runs_what_is_ready(guards: Guards) -> None:
    """Lets the event loop run what is ready, in the order of its arrival."""
    guards.replace("router.fetch.fair_turns:FairTurns.ask", lambda self, party: None)


@naive(
    "A fetch without a limit of its own takes all the processor time that it can use.",
    "",
    "router/fetch/fair_turns.py",
    f"{FLOODS}test_too_much_processor_time_is_an_error_of_the_request",
)
def counts_no_processor_time(guards: Guards) -> None:
    """Limits a fetch by the clock alone."""
    guards.replace("router.fetch.url_fetcher:_SharedFetch.processor_allowed_s", lambda self: 1e9)


@naive(
    "Behind its answer, a server sends the answer to the next request, which is another tenant's.",
    "",
    "router/fetch/fetching.py",
    f"{FLOODS}test_a_second_answer_reaches_no_other_request[LoopFetcher-at once]",
)
def keeps_connections(guards: Guards) -> None:
    """Keeps connections for the next request to the same host."""
    from router.fetch.fetching import _HEADERS

    pool: Any = None
    pool = guards.replace(
        "httpcore:AsyncConnectionPool", lambda **options: pool(**options | {"max_keepalive_connections": 16})
    )
    guards.replace("router.fetch.fetching:_HEADERS", [each for each in _HEADERS if each[0] != "connection"])


# ------------------------------------------------------------ decoding

MEDIA = "unit/modalities/media/"
PICTURES = f"{MEDIA}test_image.py::"


@naive(
    "The error of a picture's decoder shows an address of the process.",
    "CVE-2026-22778",
    "modalities/media/image.py",
    f"{MEDIA}test_unknown_media.py::test_a_refusal_shows_nothing_of_the_process[image]",
    "0x[0-9a-f]{6}",
)
def repeats_the_decoder(guards: Guards) -> None:
    """Tells the client what the library has said."""
    from PIL import Image

    from fabric.contracts import InvalidMedia

    @guards.method("modalities.media.image:open_image")
    def open_image(data: bytes, param: str) -> object:
        try:
            return Image.open(io.BytesIO(data))
        except OSError as error:
            raise InvalidMedia(f"{param}: {error}", param=param) from error


@naive(
    "A rarely used decoder, such as that of JPEG 2000, has a flaw.",
    "CVE-2026-22778",
    "modalities/media/image.py",
    f"{PICTURES}test_formats_that_are_not_on_the_list_are_refused[JPEG2000]",
)
def decodes_every_format(guards: Guards) -> None:
    """Lets the library find out the format."""
    guards.replace("modalities.media.image:FORMATS", None)


@naive(
    "A `video/jpeg` is a list of frames without end.",
    "CVE-2026-34755, CVE-2026-5497",
    "modalities/media/video.py",
    f"{MEDIA}test_video.py::test_parts_and_limits",
)
def joins_frames(guards: Guards) -> None:
    """Decodes every picture of a comma-separated list."""

    @guards.method("modalities.media.video:VideoPlugin.parse")
    def parse(self: Any, part: Mapping[str, Any], param: str, limits: object) -> bytes:
        url = part["video_url"]
        text = url if isinstance(url, str) else url["url"]
        return b"".join(base64.b64decode(frame) for frame in text.partition("base64,")[2].split(","))


@naive(
    "A video has more frames than anything can hold.",
    "CVE-2026-5497",
    "modalities/media/video.py",
    f"{MEDIA}test_video.py::test_parts_and_limits",
)
def counts_no_frames(guards: Guards) -> None:
    """Takes what the header of a video says."""
    guards.replace("modalities.media.video:VideoPlugin.validate", lambda self, header, limits, param: None)


@naive(
    "A sound of a few bytes becomes gigabytes of samples.",
    "CVE-2026-54233",
    "modalities/media/audio.py",
    f"{MEDIA}test_audio.py::test_a_bomb_is_not_decoded_to_its_end",
)
def decodes_to_the_end(guards: Guards) -> None:
    """Decodes a sound to its end, and compares its length afterwards."""
    guards.replace("modalities.media.audio:AUDIO_S", 1e6)


@naive(
    "A picture of a few bytes has billions of pixels.",
    "",
    "modalities/media/image.py",
    f"{PICTURES}test_a_bomb_is_measured_and_not_opened",
)
def opens_bombs(guards: Guards) -> None:
    """Decodes a picture of any size."""
    guards.replace("modalities.media.image:ImagePlugin.validate", lambda self, header, limits, param: None)


@naive(
    "Media that are small enough each take all memory together.",
    "",
    "modalities/media/plugin.py",
    "unit/router/prompt/test_request_media.py::test_media_that_are_small_each_may_be_too_large_together",
)
def limits_each_alone(guards: Guards) -> None:
    """Compares each medium with the limits, and not their sum."""
    guards.replace("modalities.media.plugin:decoded_bytes", lambda header: 0)


@naive(
    "A decoder takes more memory than the header of its file calls for.",
    "CVE-2026-54233",
    "fabric/sandbox/process.py",
    "contract/test_fabric_sandbox.py::test_memory_is_limited_by_the_job",
    "268435456|assert",
)
def decodes_without_limits(guards: Guards) -> None:
    """Gives each job of a decoding process as much memory as it takes."""
    run: Any = None

    async def run_unlimited(self: Any, job: object, data: bytes, limits: Any, answer: object) -> object:
        return await run(self, job, data, limits._replace(memory_bytes=2**30), answer)

    run = guards.replace("fabric.sandbox.process:SandboxProcess.run", run_unlimited)


@naive(
    "A file takes over the process that decodes it, which answers its parent with code.",
    "",
    "fabric/sandbox/message_values.py",
    "contract/test_fabric_sandbox.py::test_a_process_that_was_taken_over_runs_nothing_in_its_parent",
    "the parent has run what the process wrote",
)
def unpickles_answers(guards: Guards) -> None:
    """Reads answers that are pickles."""
    decode: Any = None

    def decode_or_unpickle(body: memoryview, arrays: list[memoryview]) -> object:
        return pickle.loads(body) if bytes(body[:1]) == pickle.PROTO else decode(body, arrays)

    decode = guards.replace("fabric.sandbox.message_values:decode_values", decode_or_unpickle)


@naive(
    "The payload of a `data:` URL is decoded before its size is looked at.",
    "",
    "modalities/media/plugin.py",
    f"{PICTURES}test_the_size_is_checked_before_decoding",
    "base64",
)
def measures_after_decoding(guards: Guards) -> None:
    """Decodes base64 first, and then measures the file."""
    from fabric.contracts import InvalidMedia

    @guards.method("modalities.media.plugin:decode_base64")
    def decode(payload: str, param: str, max_bytes: int) -> bytes:
        try:
            data = base64.b64decode(payload, validate=True)
        except ValueError as error:
            raise InvalidMedia(f"{param}: the payload is not valid base64", param=param) from error
        if len(data) > max_bytes:
            raise InvalidMedia(f"{param}: more than the limit", param=param)
        return data


@naive(
    "A picture of one pixel ends the server.",
    "CVE-2026-22773",
    "modalities/families/qwen_vl/patches.py",
    "unit/modalities/families/test_qwen3_omni_config.py::test_plans_of_known_sizes[1-1-grid1]",
    "is too small for the model",
)
def has_no_smallest_picture(guards: Guards) -> None:
    """Rounds the sides of a picture to whole patches, and small ones to none."""

    @guards.method("modalities.families.qwen_vl.patches:smart_resize")
    def resize(height: int, width: int, options: Any, most_pixels: int | None = None) -> tuple[int, int]:
        return round(height / options.factor) * options.factor, round(width / options.factor) * options.factor
