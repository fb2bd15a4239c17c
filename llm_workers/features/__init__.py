"""Brings features from the encoders to the worker and keeps them until no sequence needs them.

`FeatureStore` is the one book of features: it knows for each unit whether its feature is expected, announced, being
pulled, landed, read by the engine, or kept, and it makes every decision. `Receiver` carries out the decisions: it takes
announcements, pulls through the feature channel, and frees memory. `HostCache` holds the features that are kept after
prefill. `Peers` tracks the members from which features come. Everything here lives in the event loop. The package knows
the engine only as a `FeatureEngine`, which is handed references to features and gives them back, and knows nothing of
torch.
"""

from llm_workers.features.feature_entries import UnitState
from llm_workers.features.feature_store import FeatureStore, MissingUnit
from llm_workers.features.host_cache import HostCache
from llm_workers.features.receiver import FeatureEndpoint, FeatureEngine, Listener, Peers, Receiver

__all__ = [
    "FeatureEndpoint",
    "FeatureEngine",
    "FeatureStore",
    "HostCache",
    "Listener",
    "MissingUnit",
    "Peers",
    "Receiver",
    "UnitState",
]
