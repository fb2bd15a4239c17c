"""Contains what the author of a plugin or of an integration needs for tests. Weft's own tests use the same.

There are two clusters. `in_process_cluster` (in `in_process`) is a real one, with a model, behind its HTTP API in the
test's process; use it with `registered`, `small_config` and `write_demo_variant`. `fake_cluster` (in `fake_clusters`)
is a real router over the fake workers and encoders of `fake_members` and the stages of `fake_stages`. It needs no torch
and no model but the family of `tiny_family`, and a test can script its members: they pause, fail, lose messages or
leave. The clock and the transports are for tests of single parts.
"""

from deploy.testing.fake_clusters import TINY_MODEL, FakeCluster, FakePools, NoProber, fake_cluster, settled
from deploy.testing.fake_members import FakeEncoder, FakeWorker, WorkerScript, reply_outputs, reply_text
from deploy.testing.fake_stages import FakeStage, StageScript, spoken_samples
from deploy.testing.in_process import in_process_cluster, registered, small_config, write_demo_variant
from deploy.testing.tiny_family import TinyFamily, tiny_codec
from fabric.contracts import ManualClock
from fabric.transport import LocalChannelHub, LocalFeatureSink, LocalFeatureSource, LocalHub, LocalPlane

__all__ = [
    "TINY_MODEL",
    "FakeCluster",
    "FakeEncoder",
    "FakePools",
    "FakeStage",
    "FakeWorker",
    "LocalChannelHub",
    "LocalFeatureSink",
    "LocalFeatureSource",
    "LocalHub",
    "LocalPlane",
    "ManualClock",
    "NoProber",
    "StageScript",
    "TinyFamily",
    "WorkerScript",
    "fake_cluster",
    "in_process_cluster",
    "registered",
    "reply_outputs",
    "reply_text",
    "settled",
    "small_config",
    "spoken_samples",
    "tiny_codec",
    "write_demo_variant",
]
