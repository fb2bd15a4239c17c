"""Brings a model from an object store or a hub onto a node, once for all processes there.

`model_urls` reads what `model.path` says: `s3://` and `gs://` name a prefix of a bucket, `hf://` a repository of a hub.
`model_stores` lists and downloads the files of each kind. `model_cache` keeps them on the node: one process downloads,
the others wait, and what a killed process has left is used. `model_leases` keeps what a process reads, and
`cache_cleaning` removes other models, by a limit or when somebody asks for it. `download` runs a download in a process
of its own, because the libraries read their settings once, when they are imported. LoRA adapters come in the same way.

`deploy.compose` fetches models, `deploy.lora_adapters` fetches adapters, and `deploy.commands.node_models` cleans. The
folder knows nothing of what the files contain.
"""

from deploy.models.cache_cleaning import CachedModel, CleaningRule, cached_models, remove, superfluous
from deploy.models.download import default_cache_dir, fetch_model
from deploy.models.model_urls import ModelUrl, is_model_url

__all__ = [
    "CachedModel",
    "CleaningRule",
    "ModelUrl",
    "cached_models",
    "default_cache_dir",
    "fetch_model",
    "is_model_url",
    "remove",
    "superfluous",
]
