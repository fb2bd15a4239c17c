"""Makes trees of blocks for tests of the index: a block is a path from the root, and its hash is made of the path."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from fabric.contracts import BlockHash, BlocksStored
from kv_index.holder_table import HolderTable, NativeTable, PlainTable, _library
from llm_workers.scheduling.blocks import stored_chain

BlockPath = tuple[int, ...]


def path_hash(path: BlockPath) -> BlockHash:
    return BlockHash(hashlib.blake2b(repr(path).encode(), digest_size=16).digest())


def path_hashes(path: BlockPath, start: int = 0) -> bytes:
    """Returns the hashes of the blocks of a chain from the block `start` on, side by side."""
    return b"".join(path_hash(path[: index + 1]) for index in range(start, len(path)))


def hash_to_parent(paths: Iterable[BlockPath]) -> dict[BlockHash, BlockHash | None]:
    """Returns the parents of these blocks, parents before children."""
    return {path_hash(path): path_hash(path[:-1]) if path[:-1] else None for path in sorted(paths, key=len)}


def stored_event(path: BlockPath, start: int) -> BlocksStored:
    """Returns the event that a worker sends for the blocks of a chain from the block `start` on."""
    parents = hash_to_parent(path[: index + 1] for index in range(len(path)))
    run = [path_hash(path[: index + 1]) for index in range(start, len(path))]
    return stored_chain(path_hash(path[:start]) if start else None, run, start, parents)


def twin(block: bytes) -> bytes:
    """Returns another hash with the same 64-bit key."""
    factor, mask = 0x9E37_79B9_7F4A_7C15, (1 << 64) - 1
    low, high = int.from_bytes(block[:8], "little"), int.from_bytes(block[8:], "little")
    other = high ^ 1
    return (low ^ high * factor & mask ^ other * factor & mask).to_bytes(8, "little") + other.to_bytes(8, "little")


def leading(held: Iterable[BlockPath], path: Sequence[int]) -> int:
    """Returns how many leading blocks of the chain are among these."""
    known = set(held)
    return next((number for number in range(len(path)) if tuple(path[: number + 1]) not in known), len(path))


def native_table(max_keys: int) -> NativeTable:
    library = _library()
    assert library is not None, "these tests need a C compiler"
    return NativeTable(max_keys, library)


def tables(max_keys: int) -> list[HolderTable]:
    """Returns a table of each kind. Those with a stride of 1 must give the same answers."""
    return [native_table(max_keys), PlainTable(max_keys, 1), PlainTable(4 * max_keys, 4)]
