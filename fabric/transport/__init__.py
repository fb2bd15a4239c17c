"""Holds FIXME."""

from fabric.transport.arena import ArenaUsage
from fabric.transport.feature_channel import (
    ALIGNMENT_BYTES,
    HEADER_BYTES,
    FeatureSink,
    FeatureSource,
    LandedFeature,
    SourceMemory,
    SourceSlot,
)
from fabric.transport.local_channel import LocalChannelHub, LocalFeatureSink, LocalFeatureSource
from fabric.transport.membership import Directory, LeaseTable, RouterTable, View
from fabric.transport.message_plane import Handler, LocalHub, LocalPlane, Plane
from fabric.transport.nixl_channel import NixlFeatureSink, NixlFeatureSource, check_installed
from fabric.transport.zmq_plane import PlaneKeys, ZmqPlane

__all__ = [
    "ALIGNMENT_BYTES",
    "HEADER_BYTES",
    "ArenaUsage",
    "Directory",
    "FeatureSink",
    "FeatureSource",
    "Handler",
    "LandedFeature",
    "LeaseTable",
    "LocalChannelHub",
    "LocalFeatureSink",
    "LocalFeatureSource",
    "LocalHub",
    "LocalPlane",
    "NixlFeatureSink",
    "NixlFeatureSource",
    "Plane",
    "PlaneKeys",
    "RouterTable",
    "SourceMemory",
    "SourceSlot",
    "View",
    "ZmqPlane",
    "check_installed",
]
