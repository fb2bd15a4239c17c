"""Fetches the media that a request names by URL, without letting a client reach what only this machine can reach.

`url_policy` parses URLs and says which may be asked, `address_rules` says which addresses may be connected to, and
`pinned_network` connects to addresses that were validated and to no others. `fetching` asks one URL with these,
`fetch_cache` keeps what may be used again, and `file_root` opens files under an allowed folder. `first_look` refuses a
file by its first bytes while the rest is on its way. `url_fetcher` runs many fetches within budgets (`fetch_budget`),
which parties share fairly (`fair_shares`), each file in sealed memory (`stored_file`). `wire_meter` limits what an
answer may cost beside its file, and `fair_turns` lets fetches run by turns. `fetch_process` runs all of this in a
process beside the router, with which it talks over a `packet_channel`; `loop_fetcher` does without the process.
`fetch_settings` says what is allowed, and how much time and memory fetching may take. The folder knows nothing of
requests' formats, and of files only what the plugins say.
"""

from router.fetch.address_rules import AddressRules
from router.fetch.fair_shares import SHARED_TENANT
from router.fetch.fetch_process import FetchedFile, FetchProcess, MediaFetcher
from router.fetch.fetch_settings import FetchSettings
from router.fetch.loop_fetcher import LoopFetcher
from router.fetch.pinned_network import NameResolver, SystemResolver
from router.fetch.url_fetcher import WantedMedium
from router.fetch.url_policy import MAX_URL_CHARS, UrlPolicy, host_pattern, parse_url
from router.fetch.wire_meter import ANSWER_LIMITS

__all__ = [
    "ANSWER_LIMITS",
    "MAX_URL_CHARS",
    "SHARED_TENANT",
    "AddressRules",
    "FetchProcess",
    "FetchSettings",
    "FetchedFile",
    "LoopFetcher",
    "MediaFetcher",
    "NameResolver",
    "SystemResolver",
    "UrlPolicy",
    "WantedMedium",
    "host_pattern",
    "parse_url",
]
