"""Brings a model from an object store or a hub onto a node, once for all processes there.

`model_urls` reads what `model.path` says: `s3://` and `gs://` name a prefix of a bucket, `hf://` a repository of a hub.
`model_stores` lists and downloads the files of each kind. `model_cache` keeps them on the node: one process downloads,
the others wait, and what a killed process has left is used. `download` runs this in a process of its own, because the
libraries read their settings once, when they are imported.

`deploy.compose` is the only user. The folder knows nothing of what the files contain.
"""

from deploy.models.download import fetch_model
from deploy.models.model_urls import ModelUrl, is_model_url

__all__ = ["ModelUrl", "fetch_model", "is_model_url"]
