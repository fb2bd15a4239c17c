"""Is the connector through which vLLM gets encoder features from the inboxes (`rank_inboxes`).

vLLM creates one half in the engine core's process and one half in the process of each rank. Both know only what stands
in the connector's extra config. The scheduler's half is asked whether a request may step, and says which features a
step loads; the rank's half owns the rank's inbox and copies features from it into vLLM's encoder cache.

A feature of Weft has shape `(num_levels, num_rows, hidden_size)`; an entry of vLLM's encoder cache has shape
`(num_rows, num_levels * hidden_size)`, with the levels of DeepStack behind the embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.request import Request

from fabric.transport import NixlFeatureSink, feature_memory
from llm_workers.vllm_engine.doorstep_scheduler import Doorstep
from llm_workers.vllm_engine.feature_board import FeatureLoad
from llm_workers.vllm_engine.rank_inboxes import RankInbox
from modalities.slot_tensors import slot_tensor
from modalities.torch_dtypes import torch_dtype


class InboxPlace(NamedTuple):
    """Is what stands in the connector's extra config."""

    address: str
    """Holds the address of the `RankedSink`."""
    name: str
    """Begins the names of the ranks' transfer agents."""
    inbox_bytes: int
    staging_bytes: int
    """Sizes the host memory beside an inbox that lies on a device."""
    device: str
    """Is `cpu` or `cuda`."""
    is_on_device: bool


class RowLoad(NamedTuple):
    """Says that rows `[row, row + num_rows)` of the entry `mm_hash`, which has `total_rows` rows, come from a slot."""

    mm_hash: str
    slot_id: int
    row: int
    num_rows: int
    total_rows: int


@dataclass
class StepLoads(ECConnectorMetadata):  # type: ignore[misc]
    """Holds what the ranks load ahead of a step. `loads` stays in the engine core's process."""

    rows: list[RowLoad] = field(default_factory=list)
    loads: list[FeatureLoad] = field(default_factory=list)

    def __getstate__(self) -> list[RowLoad]:
        return self.rows

    def __setstate__(self, rows: list[RowLoad]) -> None:
        self.rows, self.loads = rows, []


class FeatureConnector(ECConnectorBase):  # type: ignore[misc]
    """Has two halves: vLLM calls other methods of the one with the role SCHEDULER than of the one with WORKER."""

    doorstep: Doorstep

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self._inbox: RankInbox | None = None
        if role == ECConnectorRole.WORKER and get_pp_group().is_first_rank:
            self._inbox = _open_inbox(InboxPlace(**vllm_config.ec_transfer_config.ec_connector_extra_config))

    def shutdown(self) -> None:
        if self._inbox is not None:
            self._inbox.close()

    # ------------------------------------------------------------ the scheduler's half

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Returns whether the next token of the request can be computed now."""
        return self.doorstep.may_step(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        """Returns True: every item for which there is room is loaded, and none is encoded by this worker."""
        return True

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Has nothing to do: the encoder cache manager has told the board."""

    def build_connector_meta(self, scheduler_output: Any) -> StepLoads:
        """Returns what the ranks load ahead of this step. A step without tokens loads nothing, because vLLM's model
        runner drops what such a step says."""
        if not scheduler_output.total_num_scheduled_tokens:
            return StepLoads()
        loads = self.doorstep.board.take_loads()
        rows = [
            RowLoad(load.unit.mm_hash, load.feature.slot_id, load.row, load.num_rows, load.total_rows) for load in loads
        ]
        return StepLoads(rows, loads)

    # ------------------------------------------------------------ the rank's half

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Copies the features of this step into the encoder cache, on the device's current stream."""
        if self._inbox is None:
            return
        model = self._vllm_config.model_config
        device = torch.device(self._vllm_config.device_config.device)
        for load in self._get_connector_metadata().rows:
            feature = self._inbox.feature(load.slot_id)
            levels, _, hidden = feature.ticket.shape
            entry = encoder_cache.get(load.mm_hash)
            if entry is None or entry.shape[0] != load.total_rows:
                entry = torch.empty(load.total_rows, levels * hidden, dtype=model.dtype, device=device)
                encoder_cache[load.mm_hash] = entry
            rows = entry[load.row : load.row + load.num_rows].view(load.num_rows, levels, hidden)
            values = slot_tensor(feature.view).view(torch_dtype(feature.ticket.dtype)).view(feature.ticket.shape)
            rows.copy_(values.permute(1, 0, 2), non_blocking=True)
            if (wait := _end_of_copies(device)) is not None:
                self._inbox.note_read(load.slot_id, wait)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Has nothing to do, because this worker encodes nothing."""


def _open_inbox(place: InboxPlace) -> RankInbox:
    rank = get_tp_group().rank_in_group
    memory = feature_memory(
        place.device,
        place.inbox_bytes,
        place.staging_bytes,
        is_on_device=place.is_on_device,
        device_id=torch.cuda.current_device() if place.is_on_device else 0,
    )
    sink = NixlFeatureSink(f"{place.name}-{rank}", memory.nbytes, make_memory=memory.make, staging=memory.beside)
    return RankInbox(place.address, rank, sink)


def _end_of_copies(device: torch.device) -> Callable[[], None] | None:
    """Returns a call that waits until the copies that were begun on the current stream have ended, or None where copies
    end before they return."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize
