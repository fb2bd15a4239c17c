"""Decides where a request goes, and why. Nothing in this folder has a clock, a socket or a random source of its own.

`plan_types` defines what the planner is asked and answers, and `route_plan` makes the choice, with the values of
`scored_workers` on its way. It compares times: `predictions` says when workers and encoders begin, and `landings` when
the features of media land, with the encoders chosen for that. `compiled_search` does all of it in one call of C; these
modules, with `landing_search`, do the same for machines without a compiler. What they read of the members is in the
columns of `member_columns`.

`cluster_state` keeps the router's picture of the cluster, in these columns and in `member_state`. `member_shares` says
what an attempt puts on members, and `block_ledger` counts its KV blocks. `promised_prompts` knows which prompts are on
their way, `report_age` how old a report is, and `peer_news` what other routers dispatched. `member_costs` keeps what
the work of one member costs, `cost_columns` the same for all members as arrays, and `saved_costs` what stays for
another run; `link_classes` says how far apart two members run, and `cost_learning` corrects the costs by results and
reports. `member_standing` says for people how a router sees each member. `kv_room` says whether a worker has room for a
request, and `capacity_queue` orders the requests that no member can serve now. `predicted_work` says what such a
request will be to the members. `stage_plan` chooses the stages that speak the answer.

A request's run plans its attempts with `ClusterState.plan` and `ClusterState.plan_encoding` and waits in a
`CapacityQueue`; the router service passes the members' messages to `ClusterState`, whose accuracy the metrics export.
The folder knows nothing of HTTP, of the contents of requests, or of the calls to members.
"""

from router.planning.capacity_queue import CapacityNeed, CapacityQueue, Standing, Supply, TenantShares, Waiter
from router.planning.cluster_state import ClusterState, PlannerSettings
from router.planning.cost_learning import Learning
from router.planning.kv_room import BATCH_HEADROOM, ROOM_NOW, KvRoom, RoomNeed
from router.planning.landing_search import LandingGoal, LandingProblem
from router.planning.landings import improve, land_rows
from router.planning.link_classes import LinkClass, LinkOverride, LinkRules, MemberSelector
from router.planning.member_costs import CostDefaults
from router.planning.member_standing import MemberLink, MemberStanding, member_links, member_standings
from router.planning.peer_news import NEWS_INTERVAL_S
from router.planning.plan_types import CandidateTerms, Line, PairScores, RoutePlan, RouteQuery
from router.planning.saved_costs import SavedCosts, decode_costs, encode_costs
from router.planning.stage_plan import StageHop, StageLinkCosts, StagePlan, StageState

__all__ = [
    "BATCH_HEADROOM",
    "NEWS_INTERVAL_S",
    "ROOM_NOW",
    "CandidateTerms",
    "CapacityNeed",
    "CapacityQueue",
    "ClusterState",
    "CostDefaults",
    "KvRoom",
    "LandingGoal",
    "LandingProblem",
    "Learning",
    "Line",
    "LinkClass",
    "LinkOverride",
    "LinkRules",
    "MemberLink",
    "MemberSelector",
    "MemberStanding",
    "PairScores",
    "PlannerSettings",
    "RoomNeed",
    "RoutePlan",
    "RouteQuery",
    "SavedCosts",
    "StageHop",
    "StageLinkCosts",
    "StagePlan",
    "StageState",
    "Standing",
    "Supply",
    "TenantShares",
    "Waiter",
    "decode_costs",
    "encode_costs",
    "improve",
    "land_rows",
    "member_links",
    "member_standings",
]
