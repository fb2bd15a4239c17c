"""Computes the identity of KV blocks, which is the same on the worker that fills them and on the router that looks them
up.

A block's hash contains its parent's hash, so equal hashes mean equal prefixes. Media enter as extra keys, because the
id of the placeholder token says nothing about which picture stands there. So does the LoRA adapter, because the same
tokens have other keys and values under it. This module knows nothing of which member holds a block.

`prompt_block_hashes` knows one hash function, `WEFT_KV`. An engine that hashes in another way gets a function of its
own here, which is chosen by the name of the worker's `KvScheme`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from fabric.contracts import WEFT_KV, KvScheme, MediaItem, MmHash, PlaceholderRange, block_hashes, frame

_LENGTH = struct.Struct("<Q")
"""Packs the length of a part as `frame` does."""


def extra_keys(
    block_index: int,
    block_size: int,
    placeholders: Sequence[PlaceholderRange],
    media: Sequence[MediaItem],
    cache_salt: str = "",
    adapter: str = "",
) -> list[bytes]:
    """Returns the tagged keys of one block, in a fixed order: one key per overlapping placeholder (the media hash, the
    unit, and the feature row that stands at the block's start, which is negative if the run begins inside the block),
    and then the salt and the adapter on the first block. Without the row, two blocks at different places inside one
    picture would be equal. (The tags follow those of vLLM, which once removed the offset and had to restore it; a tag
    prevents a salt from being taken for a media key.)"""
    start, end = block_index * block_size, (block_index + 1) * block_size
    keys = [_media_key(run, media, start) for run in placeholders if run.offset < end and run.end > start]
    return keys + _first_keys(cache_salt, adapter) if block_index == 0 else keys


def prompt_block_hashes(
    scheme: KvScheme,
    token_ids: Sequence[int],
    placeholders: Sequence[PlaceholderRange] = (),
    media: Sequence[MediaItem] = (),
    cache_salt: str = "",
    adapter: str = "",
) -> bytes:
    """Returns the hashes of all full blocks of a prompt, in order, side by side. It takes O(blocks + runs). It returns
    no hash for a scheme whose hash function is unknown (`is_known_scheme`), because a prompt then matches nothing."""
    if not is_known_scheme(scheme):
        return b""
    block_size = scheme.block_size
    content = np.asarray(token_ids, dtype="<i4").tobytes()
    keys = keys_of_blocks(0, len(token_ids) // block_size, block_size, placeholders, media, cache_salt, adapter)
    return b"".join(block_hashes(None, content, 4 * block_size, keys))


def is_known_scheme(scheme: KvScheme) -> bool:
    """Returns whether `prompt_block_hashes` can compute the hashes of the scheme."""
    return scheme.name == WEFT_KV and scheme.block_size > 0


def keys_of_blocks(
    first: int,
    last: int,
    block_size: int,
    placeholders: Sequence[PlaceholderRange],
    media: Sequence[MediaItem],
    cache_salt: str = "",
    adapter: str = "",
) -> dict[int, list[bytes]]:
    """Returns the extra keys of those blocks in `[first, last)` that have any, by their index counted from `first`."""
    index_to_keys: dict[int, list[bytes]] = {}
    for run in placeholders:
        head, to_row = _media_head(media[run.item].mm_hash, run.unit), run.row - run.offset
        for index in range(max(first, run.offset // block_size), min(last, -(-run.end // block_size))):
            row = str(index * block_size + to_row).encode()
            index_to_keys.setdefault(index - first, []).append(head + _LENGTH.pack(len(row)) + row)
    if first == 0 < last and (keys := _first_keys(cache_salt, adapter)):
        index_to_keys.setdefault(0, []).extend(keys)
    return index_to_keys


def _first_keys(cache_salt: str, adapter: str) -> list[bytes]:
    """Returns the keys of the first block that tell apart what the whole prompt is computed for. All later blocks
    differ by them too, because their hashes contain that of the first."""
    tagged = ((b"salt", cache_salt), (b"lora", adapter))
    return [frame([tag, value.encode()]) for tag, value in tagged if value]


def _media_key(run: PlaceholderRange, media: Sequence[MediaItem], start: int) -> bytes:
    row = str(run.row + start - run.offset).encode()
    return b"".join((_media_head(media[run.item].mm_hash, run.unit), _LENGTH.pack(len(row)), row))


@lru_cache(maxsize=1024)
def _media_head(mm_hash: MmHash, unit: int) -> bytes:
    """Returns the framed parts of a media key that are the same in all blocks of a unit."""
    return frame([b"mm", mm_hash.encode(), str(unit).encode()])
