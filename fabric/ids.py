"""Defines the ids of the things that travel between parts. The router creates the ids of requests; a client never does.
The module knows nothing of what the things contain.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
"""Identifies one client request. A client's `x-request-id` is only an additional label."""
MemberId = NewType("MemberId", str)
"""Identifies one process of the cluster: a router, encoder or worker replica. It is never reused."""
MmHash = NewType("MmHash", str)
"""Identifies a media item as the model sees it: content + model + processing options (hex, 128 bits)."""
BlockHash = NewType("BlockHash", bytes)
"""Identifies a KV block together with all blocks before it (16 bytes)."""


class AttemptId(NamedTuple):
    """An `AttemptId` is one try at a request. A migration or a retry is a new attempt; messages of old attempts are
    dropped."""

    request_id: RequestId
    attempt: int


class SequenceId(NamedTuple):
    """A `SequenceId` is one choice of one attempt, the unit that a worker schedules. References (to blocks, features)
    are by sequence."""

    request_id: RequestId
    attempt: int
    choice: int

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.request_id, self.attempt)


class UnitKey(NamedTuple):
    """A `UnitKey` is one unit of a media item's features: the whole image, a group of frames, or a window of audio."""

    mm_hash: MmHash
    unit: int


def mint_request_id() -> RequestId:
    """Returns a fresh id with 96 random bits."""
    return RequestId(f"req-{secrets.token_hex(12)}")


def mint_member_id(kind: str) -> MemberId:
    """Returns a fresh id like `worker-3fa9c1d2`; `kind` is `router`, `encoder` or `worker`."""
    return MemberId(f"{kind}-{secrets.token_hex(4)}")
