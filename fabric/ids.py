"""Names of the things that travel between parts. Internal ids are minted by the router, never by a client."""

from __future__ import annotations

import secrets
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
"""One client request. A client's `x-request-id` is only a label beside it."""
MemberId = NewType("MemberId", str)
"""One process of the cluster: a router, encoder or worker replica. Never reused."""
MmHash = NewType("MmHash", str)
"""Identity of a media item as the model sees it: content + model + processing options (hex, 128 bits)."""
BlockHash = NewType("BlockHash", bytes)
"""Identity of a KV block with everything in front of it (16 bytes)."""


class AttemptId(NamedTuple):
    """One try at a request. A migration or a retry is a new attempt; messages of old ones are dropped."""

    request_id: RequestId
    attempt: int


class SequenceId(NamedTuple):
    """One choice of one attempt: what a worker schedules. References (to blocks, features) are by sequence."""

    request_id: RequestId
    attempt: int
    choice: int

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.request_id, self.attempt)


class UnitKey(NamedTuple):
    """One unit of a media item's features: the whole image, a group of frames, a window of audio."""

    mm_hash: MmHash
    unit: int


def mint_request_id() -> RequestId:
    """A fresh id with 96 random bits."""
    return RequestId(f"req-{secrets.token_hex(12)}")


def mint_member_id(kind: str) -> MemberId:
    """A fresh id like `worker-3fa9c1d2`; `kind` is `router`, `encoder` or `worker`."""
    return MemberId(f"{kind}-{secrets.token_hex(4)}")
