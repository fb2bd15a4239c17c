"""Moves features, messages and the data of stages between members, and keeps which members there are.

`feature_channel` defines how a worker pulls features out of an encoder's memory; `local_channel` implements it inside
one process and `nixl_channel` between processes, both with the sink of `pulling`. `arena` decides where slots lie in
the memory of both sides; `transfer_memory` says what that memory is, `cuda_memory` provides that of devices,
`member_memory` allocates what a member needs, and `routes` says how bytes reach it. `message_plane` defines how members
send each other small messages and implements it inside one process; `zmq_plane` implements it between processes.
`ports` chooses the port of everything that listens. `stage_connector` defines how the stages of a pipeline hand data to
each other and implements it inside one process; `shm_stage_connector` implements it between the processes of a host and
`nixl_stage_connector` between hosts. `membership` keeps leases, the directory of all members, and the routers to which
a member listens.

Routers, workers and encoders use the contracts, and `deploy` chooses the implementations. The folder knows nothing of
what a feature or a message means, and it imports neither torch nor ray.
"""

from fabric.transport.arena import Arena, ArenaUsage, Slot
from fabric.transport.cuda_memory import device_memory, num_devices, pinned_bytes
from fabric.transport.feature_channel import (
    ALIGNMENT_BYTES,
    HEADER_BYTES,
    FeatureSink,
    FeatureSource,
    LandedFeature,
    SlotMemory,
    SourceMemory,
    SourceSlot,
)
from fabric.transport.local_channel import LocalChannelHub, LocalFeatureSink, LocalFeatureSource
from fabric.transport.member_memory import FeatureMemory, feature_memory
from fabric.transport.membership import Directory, LeaseTable, Membership, RouterTable, View, ViewChange
from fabric.transport.message_plane import Handler, LocalHub, LocalPlane, Plane
from fabric.transport.nixl_channel import NixlFeatureSink, NixlFeatureSource, check_installed
from fabric.transport.nixl_stage_connector import NixlStageConnector
from fabric.transport.ports import PortRange, bind_free, join_host_port, listen
from fabric.transport.shm_stage_connector import (
    SharedMemoryStageConnector,
    remove_inboxes_without_owner,
    stage_directory,
)
from fabric.transport.stage_connector import InboxEntry, LocalStageConnector, LocalStageHub, StageConnector
from fabric.transport.transfer_memory import (
    CopyEvent,
    DeviceView,
    HostBytes,
    HostMemory,
    MakeMemory,
    MemoryPlace,
    SlotView,
    TransferMemory,
    begin_copy,
)
from fabric.transport.zmq_plane import PlaneKeys, ZmqPlane

__all__ = [
    "ALIGNMENT_BYTES",
    "HEADER_BYTES",
    "Arena",
    "ArenaUsage",
    "CopyEvent",
    "DeviceView",
    "Directory",
    "FeatureMemory",
    "FeatureSink",
    "FeatureSource",
    "Handler",
    "HostBytes",
    "HostMemory",
    "InboxEntry",
    "LandedFeature",
    "LeaseTable",
    "LocalChannelHub",
    "LocalFeatureSink",
    "LocalFeatureSource",
    "LocalHub",
    "LocalPlane",
    "LocalStageConnector",
    "LocalStageHub",
    "MakeMemory",
    "Membership",
    "MemoryPlace",
    "NixlFeatureSink",
    "NixlFeatureSource",
    "NixlStageConnector",
    "Plane",
    "PlaneKeys",
    "PortRange",
    "RouterTable",
    "SharedMemoryStageConnector",
    "Slot",
    "SlotMemory",
    "SlotView",
    "SourceMemory",
    "SourceSlot",
    "StageConnector",
    "TransferMemory",
    "View",
    "ViewChange",
    "ZmqPlane",
    "begin_copy",
    "bind_free",
    "check_installed",
    "device_memory",
    "feature_memory",
    "join_host_port",
    "listen",
    "num_devices",
    "pinned_bytes",
    "remove_inboxes_without_owner",
    "stage_directory",
]
