"""Decides how many encoders and workers a cluster has, by the predicted seconds of their queued work.

`replica_load` turns the report of a member into the load that a decision needs: seconds of queued work, the work that
has arrived, and the use of memory. `waiting_board` keeps what waits at the routers. `pool_scaler` makes the decision
for one pool: up at once and in proportion to the work, down slowly, and never on silence.

The encoder and worker replicas (`deploy/ray/serve_app.py`) send their loads to Serve's controller, where the policy of
`deploy/ray/` asks a `PoolScaler`; the simulator asks the same class on virtual time. All of it is pure: the folder
knows nothing of Ray, and of no clock but the times that are passed in.
"""

from deploy.scaling.pool_scaler import PoolScaler, ScalingDecision, ScalingRules, ScalingTerms
from deploy.scaling.replica_load import ArrivedWork, EncoderMeter, PoolShares, ReplicaLoad, WorkerMeter, waiting_load
from deploy.scaling.waiting_board import WaitingBoard

__all__ = [
    "ArrivedWork",
    "EncoderMeter",
    "PoolScaler",
    "PoolShares",
    "ReplicaLoad",
    "ScalingDecision",
    "ScalingRules",
    "ScalingTerms",
    "WaitingBoard",
    "WorkerMeter",
    "waiting_load",
]
