"""Defines how requests, members, media and KV blocks are identified in every process alike.

The router creates the ids of requests; a client never does. Members create their own ids. Contents are identified by
stable digests and never by Python's `hash()`, which differs between processes: every input is length-framed and every
digest is namespaced, so no two different inputs give the same bytes to hash. Digests have 128 bits: at a billion items
a collision is rarer than a memory error.

Two context variables keep the request and the member for which the running code works, so that a line of the log names
them and no function passes them on as arguments. Both follow tasks and `asyncio.to_thread`. A separate thread knows
only the member of its process, and must name the request itself (`extra={"request_id": ...}`).

This module knows nothing of what the identified things contain, of caches, or of how lines of a log are written.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import NamedTuple, NewType

import blake3
import xxhash

# ------------------------------------------------------------ ids

RequestId = NewType("RequestId", str)
"""Identifies one client request. A client's `x-request-id` is only an additional label."""
MemberId = NewType("MemberId", str)
"""Identifies one process of the cluster: a router, encoder or worker replica. It is never reused."""
MmHash = NewType("MmHash", str)
"""Identifies a media item as the model sees it: content + model + processing options (hex, 128 bits)."""
BlockHash = NewType("BlockHash", bytes)
"""Identifies a KV block together with all blocks before it (16 bytes)."""


KV_HASH_BYTES = 16
"""A `BlockHash` has this many bytes. Many hashes travel and are kept as one `bytes` object, in which they stand side by
side (`split_hashes`)."""
WEFT_KV = "weft-kv-1"
"""Names the hash function of this module: a block's hash covers its parent's, its token ids and its extra keys."""


class KvScheme(NamedTuple):
    """A `KvScheme` says how a prompt is cut into KV blocks and how these are hashed. Hashes of different schemes have
    nothing to do with each other. The workers of one cluster may differ in their scheme, because engines differ."""

    name: str
    """Names the hash function, e.g. `WEFT_KV`."""
    block_size: int
    """Counts the tokens of a block."""


class AttemptId(NamedTuple):
    """An `AttemptId` is one try at a request. A migration or a retry is a new attempt; messages of old attempts are
    dropped."""

    request_id: RequestId
    attempt: int


class SequenceId(NamedTuple):
    """A `SequenceId` is one choice of one attempt, the unit that a worker schedules. References (to blocks, features)
    are by sequence."""

    request_id: RequestId
    attempt: int
    choice: int

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.request_id, self.attempt)


class UnitKey(NamedTuple):
    """A `UnitKey` is one unit of a media item's features: the whole image, a group of frames, or a window of audio."""

    mm_hash: MmHash
    unit: int


def mint_request_id() -> RequestId:
    """Returns a fresh id with 96 random bits."""
    return RequestId(f"req-{secrets.token_hex(12)}")


def mint_member_id(kind: str) -> MemberId:
    """Returns a fresh id like `worker-3fa9c1d2`; `kind` is `router`, `encoder` or `worker`."""
    return MemberId(f"{kind}-{secrets.token_hex(4)}")


# ------------------------------------------------------------ digests

_LENGTH = struct.Struct("<Q")


def frame(parts: Iterable[bytes]) -> bytes:
    """Joins parts so that their boundaries are part of the bytes: `frame([b"ab"]) != frame([b"a", b"b"])`."""
    return b"".join([_LENGTH.pack(len(part)) + part for part in parts])


def content_digest(content: bytes) -> bytes:
    """Returns the BLAKE3 digest of a file. `mm_hash` accepts it in place of the file's bytes, which saves
    time for a file that is hashed more than once."""
    return blake3.blake3(content).digest()


def mm_hash(
    content: bytes, *, namespace: str, modality: str, options: str, geometry: tuple[int, ...], salt: str = ""
) -> MmHash:
    """Returns the identity of a media item. `content` is the item's bytes, or their digest.

    `namespace` is the model (id and revision), `options` is the canonical JSON of the processing options, and
    `geometry` is the decoded size (pixels, samples): a hash without dimensions let one tenant poison another's cache
    (CVE-2025-46722). `salt` isolates tenants. Content is hashed with BLAKE3, because a client chooses it and the hash
    must resist chosen collisions.
    """
    head = frame(
        [b"weft-mm-1", namespace.encode(), modality.encode(), options.encode(), repr(geometry).encode(), salt.encode()]
    )
    return MmHash(blake3.blake3(head + content).hexdigest(length=16))


def block_hash(parent: BlockHash | None, token_ids: bytes, extra_keys: Iterable[bytes] = ()) -> BlockHash:
    """Returns the identity of a KV block: the hash of its parent's hash, its token ids (little-endian int32) and its
    tagged extra keys.

    The hash is XXH3-128 over the chain. Token ids come out of Weft's own tokeniser and media enter by their BLAKE3
    digest, so resistance to chosen input is not needed and speed decides.
    """
    extra = frame(extra_keys)
    return BlockHash(xxhash.xxh3_128_digest(frame([WEFT_KV.encode(), parent or b"", token_ids, extra])))


# These are the framed parts of a block that are the same in most blocks.
_BLOCK_HEAD, _NOTHING, _HASH_SIZE = frame([WEFT_KV.encode()]), frame([b""]), struct.pack("<Q", KV_HASH_BYTES)


def block_hashes(
    parent: BlockHash | None, token_ids: bytes, block_bytes: int, index_to_keys: Mapping[int, Iterable[bytes]]
) -> list[BlockHash]:
    """Returns the identities of all full blocks of a chain, with `block_bytes` of `token_ids` each. They equal those
    that `block_hash` gives one after the other, in a fraction of its time. `index_to_keys` holds the extra keys of the
    blocks that have any."""
    size = struct.pack("<Q", block_bytes)
    hashes: list[BlockHash] = []
    last = _NOTHING if parent is None else _HASH_SIZE + parent
    for index in range(len(token_ids) // block_bytes):
        content = token_ids[index * block_bytes : (index + 1) * block_bytes]
        tail = frame([frame(index_to_keys[index])]) if index in index_to_keys else _NOTHING
        digest = xxhash.xxh3_128_digest(b"".join((_BLOCK_HEAD, last, size, content, tail)))
        hashes.append(BlockHash(digest))
        last = _HASH_SIZE + digest
    return hashes


def split_hashes(hashes: bytes) -> list[BlockHash]:
    """Returns the hashes that stand side by side in `hashes`."""
    return [BlockHash(hashes[at : at + KV_HASH_BYTES]) for at in range(0, len(hashes), KV_HASH_BYTES)]


def uniform(seed: int, choice: int, index: int) -> float:
    """Returns a number in [0, 1) that depends on its arguments alone, with 53 random bits.

    It is the draw for token `index` of `choice`: a migrated or preempted sequence draws the same number again.
    """
    bits = xxhash.xxh3_64_intdigest(struct.pack("<qqq", seed, choice, index), seed=0x5745_4654)
    return (bits >> 11) * 2.0**-53


# ------------------------------------------------------------ the request and the member of the running code

_REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
_MEMBER_ID: ContextVar[str] = ContextVar("member_id", default="")


def request_id() -> str:
    """Returns the id of the request for which the running code works, or an empty string if there is none."""
    return _REQUEST_ID.get()


def member_id() -> str:
    """Returns the id of the member to which the running code belongs. It is empty where the process has only one
    member."""
    return _MEMBER_ID.get()


def enter_request(name: str) -> None:
    """Sets the request for the rest of the running task, and for the tasks that it starts."""
    _REQUEST_ID.set(name)


@contextlib.contextmanager
def as_member(name: str) -> Iterator[None]:
    """Sets the member for the block, and for the tasks that are started in it."""
    token = _MEMBER_ID.set(name)
    try:
        yield
    finally:
        _MEMBER_ID.reset(token)
