"""Says in words for people what a record of a request has in names and numbers: fields, stages, times and places.

The pages in a browser and the commands in a terminal use the same words. The module knows nothing of how they look.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

NAME_TO_WORDS = {
    # These are the parts of the time to first token, and the spans of the timeline.
    "fetched": "Fetch the media",
    "read": "Read the media",
    "prompted": "Make the prompt",
    "waited": "Wait for a member",
    "earlier_attempts": "Earlier attempts",
    "router": "Other work of the router",
    "planned": "Plan",
    "plan": "Plan",
    "way": "On the way",
    "worker": "Worker (did not report)",
    "queue": "Queue at the worker",
    "prefill": "Prefill",
    "held": "Held at the doorstep",
    "between_steps": "Between steps",
    "decode_queue": "Queue for a decoder",
    "decoded": "Decode and preprocess",
    "prepared": "Prepare on the device",
    "encode_queue": "Queue for the device",
    "unit_encoded": "Encode",
    "transfer": "Transfer",
    "first_token": "First token",
    "generate": "Generate",
    "returned": "Last tokens on their way",
    "decode_wait": "Queue for a decoder",
    "decode": "Decode and preprocess",
    "device_prepare": "Prepare on the device",
    "ready": "Ready to encode",
    "encode": "Encode",
    "landing": "Landed, since dispatch",
    "ttft": "First token, since dispatch",
    # These are fields of plans and of lists.
    "request_id": "Request",
    "router_id": "Router",
    "worker_id": "Worker",
    "encoder_id": "Encoder",
    "member_id": "Member",
    "received_at": "Arrived",
    "num_attempts": "Attempts",
    "num_prompt_tokens": "Prompt tokens",
    "num_completion_tokens": "Generated tokens",
    "num_prefill_tokens": "Tokens to prefill",
    "covered_tokens": "Covered tokens",
    "num_bytes": "Bytes",
    "num_units": "Units",
    "num_tokens": "Tokens",
    "item_index": "Item",
    "is_cached": "Cached",
    "mm_hash": "Hash",
    "ttft_s": "First token (predicted)",
    "first_token_s": "First token",
    "total_s": "Total",
    "wait_s": "Wait",
    "delivery_s": "On the way",
    "released_s": "Prefix released",
    "landing_s": "Landed",
    "num_workers": "Workers",
    "num_near_equal": "Near-equal",
    "predicted_s": "Predicted",
    "actual_s": "Actual",
    "offset_s": "Offset",
    "uncertainty_s": "Uncertainty",
}
"""Maps names of fields, stages and spans to words. A name that is not here is shown with spaces in place of
underscores."""


def words(name: str) -> str:
    known = NAME_TO_WORDS.get(name) or NAME_TO_WORDS.get(name.removesuffix("_s"))
    return known or name.removesuffix("_s").replace("_", " ").capitalize()


def milliseconds(seconds: float | None) -> str:
    """Returns a time with three digits, in milliseconds or, from ten seconds on, in seconds."""
    if seconds is None:
        return ""
    if abs(seconds) >= 10:
        return f"{seconds:.1f} s"
    value = seconds * 1000
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} ms"


def place_of(span: Mapping[str, Any]) -> str:
    """Returns what a span belongs to: the item and unit, the tokens, the member."""
    detail = span["detail"]
    pieces = [f"item {detail['item']}"] if detail.get("item") is not None else []
    pieces += [f"unit {detail['unit']}"] if detail.get("unit") is not None else []
    pieces += [f"tokens {detail['start']} to {detail['end']}"] if "start" in detail and "end" in detail else []
    pieces += [f"attempt {span['attempt']}"] if span.get("attempt") else []
    return ", ".join([*pieces, str(span["member_id"])])


def moment(wall_s: float | None) -> str | None:
    if not wall_s:
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(wall_s)) + f".{int(wall_s * 1000) % 1000:03d} UTC"
