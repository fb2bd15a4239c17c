"""Brings features from the encoders to the worker and keeps them until no sequence needs them.

`feature_store` is the one book of features: it knows for each unit whether its feature is expected, announced, being
pulled, landed, read by the engine, or kept, and it makes every decision. `feature_entries` describes what the book says
of one unit, and the order in which units are read. `receiver` carries out the decisions: it takes announcements, pulls
through the feature channel, and frees memory; its `Peers` track the members from which features come. `host_cache`
holds the features that are kept after prefill. `pull_log` keeps when pulls began and ended, for the reports, and
`link_meter` counts pulls by the class of their link.

The service passes requests, announcements and the engine's updates to the `Receiver`. Everything here lives in the
event loop. The package knows the engine only as a `FeatureEngine`, which is handed references to features and gives
them back, and knows nothing of torch.
"""

from llm_workers.features.feature_store import FeatureStore, MissingUnit
from llm_workers.features.host_cache import HostCache
from llm_workers.features.link_meter import LinkClassOf
from llm_workers.features.receiver import FeatureEndpoint, FeatureEngine, Listener, Peers, Receiver

__all__ = [
    "FeatureEndpoint",
    "FeatureEngine",
    "FeatureStore",
    "HostCache",
    "LinkClassOf",
    "Listener",
    "MissingUnit",
    "Peers",
    "Receiver",
]
