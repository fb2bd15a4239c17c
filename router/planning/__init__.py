"""Decides where a request goes, and why. The choice itself is a pure function of frozen views; nothing in this folder
has a clock, a socket or a random source of its own.

`views` defines what the planner sees and answers, `route_plan` makes the choice, and `predictions` computes the times
that it compares. Behind the views, `cluster_state` keeps the router's picture of the cluster: `member_state` keeps the
part of one member, `member_costs` what a member's work costs, `cost_columns` the same for all members as arrays, and
`saved_costs` what stays for another run; `link_classes` says how far apart two members run, and `cost_learning`
corrects the costs by results and reports. `kv_room` says whether a worker has room for a request, and `capacity_queue`
orders the requests that no member can serve now. All of these but `kv_room`, `link_classes` and `saved_costs` keep
something from one call to the next.

A request's run plans its attempts with `ClusterState.plan` and `ClusterState.plan_encoding` and waits in a
`CapacityQueue`; the router service passes the members' messages to `ClusterState`, whose accuracy the metrics export.
The folder knows nothing of HTTP, of the contents of requests, or of the calls to members.
"""

from router.planning.capacity_queue import CapacityNeed, CapacityQueue, Standing, Supply, TenantShares, Waiter
from router.planning.cluster_state import ClusterState, PlannerSettings
from router.planning.kv_room import BATCH_HEADROOM, ROOM_NOW, KvRoom, RoomNeed
from router.planning.link_classes import LinkClass, LinkOverride, MemberSelector
from router.planning.saved_costs import SavedCosts, decode_costs, encode_costs
from router.planning.views import RoutePlan, RouteQuery

__all__ = [
    "BATCH_HEADROOM",
    "ROOM_NOW",
    "CapacityNeed",
    "CapacityQueue",
    "ClusterState",
    "KvRoom",
    "LinkClass",
    "LinkOverride",
    "MemberSelector",
    "PlannerSettings",
    "RoomNeed",
    "RoutePlan",
    "RouteQuery",
    "SavedCosts",
    "Standing",
    "Supply",
    "TenantShares",
    "Waiter",
    "decode_costs",
    "encode_costs",
]
