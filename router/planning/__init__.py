"""Decides where a request goes, and why. Its decisions are pure functions of frozen views. Only `cluster` has a memory;
nothing in this package has a clock, a socket or a random source of its own."""

from router.planning.capacity_queue import CapacityNeed, CapacityQueue, Supply, Waiter
from router.planning.cluster_state import ClusterState, PlannerSettings
from router.planning.route_plan import plan_encoding, plan_route
from router.planning.views import RoutePlan, RouteQuery

__all__ = [
    "CapacityNeed",
    "CapacityQueue",
    "ClusterState",
    "PlannerSettings",
    "RoutePlan",
    "RouteQuery",
    "Supply",
    "Waiter",
    "plan_encoding",
    "plan_route",
]
