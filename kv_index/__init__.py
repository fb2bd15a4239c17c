"""Records which worker holds which prefix of KV blocks, and which encoder holds which features. It is pure and knows
nothing of any policy."""

from kv_index.block_hashing import keys_of_blocks, prompt_block_hashes
from kv_index.holder_index import ApplyResult, FeatureIndex, IndexStats, PrefixIndex

__all__ = [
    "ApplyResult",
    "FeatureIndex",
    "IndexStats",
    "PrefixIndex",
    "keys_of_blocks",
    "prompt_block_hashes",
]
