"""Holds FIXME."""

from router.run.context import Admission, CapacityGate, Pools, RouterContext, Ticket
from router.run.degradation import DegradationPolicy
from router.run.request_output import ChoiceOutput, RequestStream, TokenDetails
from router.run.request_run import RequestRun

__all__ = [
    "Admission",
    "CapacityGate",
    "ChoiceOutput",
    "DegradationPolicy",
    "Pools",
    "RequestRun",
    "RequestStream",
    "RouterContext",
    "Ticket",
    "TokenDetails",
]
