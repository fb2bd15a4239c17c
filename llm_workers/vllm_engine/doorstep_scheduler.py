"""Makes vLLM's scheduler stop at the doorstep, the first placeholder of a sequence whose feature is not here.

vLLM lets its user choose the class of its scheduler, of its encoder cache manager and of a connector for encoder
features, and asks them at three moments. Each of them asks the `FeatureBoard`:

    ensure_cache_available   may this request take a step at all?  Only if its next token can be computed; otherwise the
                             scheduler skips it, and others go on
    can_allocate             is there room in the encoder cache for an item, and a unit of it to be put there?
    _try_schedule_...        how far does the step go?  A unit that is not here cuts it inside an item as well

What the scheduler plans and what comes of it is told to a `StepListener`: the engine makes its updates of that. All of
this runs in the engine thread. vLLM creates the objects itself, so `attach` gives them their board afterwards.
"""

from __future__ import annotations

from typing import Any, Protocol

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from fabric.contracts import MmHash, SequenceId
from llm_workers.vllm_engine.feature_board import FeatureBoard, FeatureLoad
from llm_workers.vllm_engine.sequence_book import PlannedChunk

_UNLIMITED = 2**62


class StepListener(Protocol):
    """A `StepListener` is told of the scheduler's steps, in the engine thread."""

    def planned(self, chunks: list[PlannedChunk]) -> None:
        """Takes a step that is about to be computed."""
        ...

    def dispatched(self) -> None:
        """Takes the news that the ranks compute the planned step."""
        ...

    def committed(self, chunks: list[PlannedChunk], loads: list[FeatureLoad]) -> None:
        """Takes a step that was computed, and the features that it has loaded."""
        ...

    def preempted(self, name: str) -> None:
        """Takes the name of a request that has lost its blocks."""
        ...


class Doorstep:
    """Holds what the objects of vLLM ask. It maps vLLM's requests to sequences."""

    def __init__(self, board: FeatureBoard, listener: StepListener, manager: DoorstepCacheManager) -> None:
        self.board, self.listener, self._manager = board, listener, manager
        self.name_to_sequence: dict[str, SequenceId] = {}

    def may_step(self, request: Request, num_computed: int) -> bool:
        """Returns whether the next token of the request can be computed now. If not, the board hears of it. vLLM
        computes no token of an item, not even a mark ahead of its first row, before the item has room in its cache."""
        name = self.name_to_sequence[request.request_id]
        is_free = self.board.limit(name, num_computed, num_computed + 1) > num_computed
        item = self._manager.uncached_item_at(request, num_computed)
        if is_free and item is not None:
            is_free = self.board.has_landed(name, MmHash(item.identifier))
            if is_free and not self._manager.has_room(item):
                self._manager.blocked.append(request)
                is_free = False
        if not is_free:
            self.board.wait(name, num_computed)
        return is_free


class DoorstepCacheManager(EncoderCacheManager):  # type: ignore[misc]
    """Manages vLLM's encoder cache. Features come from the inboxes, so there is no budget of encoding."""

    doorstep: Doorstep

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: Any) -> DoorstepCacheManager:
        """Makes room for the media of the longest prompt, so that each request can be computed."""
        manager = cls(cache_size=max(cache_size, vllm_config.model_config.max_model_len))
        manager.blocked = []
        return manager

    blocked: list[Request]
    """Holds the requests for whose next item there was no room in the last plan."""

    def uncached_item_at(self, request: Request, position: int) -> Any:
        """Returns the `MultiModalFeatureSpec` of the item at a position, or None if there is none or the cache has
        it."""
        for feature in request.mm_features:
            place = feature.mm_position
            if place.offset <= position < place.offset + place.length:
                return None if feature.identifier in self.cached else feature
        return None

    def has_room(self, feature: Any) -> bool:
        """Returns whether the cache has room for an item, once it has evicted what no request refers to."""
        return bool(feature.mm_position.get_num_embeds() <= self.num_freeable_slots)

    def can_allocate(
        self, request: Request, input_id: int, encoder_compute_budget: int, num_embeds_to_schedule: int
    ) -> bool:
        """Makes room for an item of which a unit is here. Evicts items that no request refers to."""
        board, feature = self.doorstep.board, request.mm_features[input_id]
        if not board.has_landed(self.doorstep.name_to_sequence[request.request_id], MmHash(feature.identifier)):
            return False
        num_freed = len(self.freed)
        has_room = bool(super().can_allocate(request, input_id, _UNLIMITED, num_embeds_to_schedule))
        for mm_hash in self.freed[num_freed:]:
            board.uncache(MmHash(mm_hash))
        return has_room

    def allocate(self, request: Request, input_id: int) -> None:
        super().allocate(request, input_id)
        name = self.doorstep.name_to_sequence[request.request_id]
        self.doorstep.board.cache(name, MmHash(request.mm_features[input_id].identifier))


def with_doorstep(base: type[Any]) -> type[Any]:
    """Returns vLLM's scheduler `base` with a doorstep."""

    class SteppingScheduler(base):  # type: ignore[misc]
        """Is a scheduler of vLLM that tells its listener of each step and stops at the doorstep."""

        doorstep: Doorstep

        def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
            self.encoder_cache_manager.blocked = []
            self.doorstep.board.begin_plan()
            planned = super().schedule(throttle_prefills)
            self.doorstep.listener.planned(planned_chunks(planned))
            return planned

        def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any:
            """Returns what vLLM's scheduler does. The core asks for it as soon as it has sent the step to the ranks."""
            self.doorstep.listener.dispatched()
            return super().get_grammar_bitmask(scheduler_output)

        def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            loads = scheduler_output.ec_connector_metadata.loads
            self.doorstep.listener.committed(planned_chunks(scheduler_output), loads)
            return outputs

        def _try_schedule_encoder_inputs(
            self, request: Request, num_computed_tokens: int, *args: Any, **kwargs: Any
        ) -> tuple[Any, ...]:
            """Returns what vLLM's rule says, cut at the first placeholder whose unit is not here. What the tuple holds
            beside the number of tokens changes between versions of vLLM, and is passed on."""
            inputs, num_new, *rest = super()._try_schedule_encoder_inputs(request, num_computed_tokens, *args, **kwargs)
            name = self.doorstep.name_to_sequence[request.request_id]
            end = self.doorstep.board.limit(name, num_computed_tokens, num_computed_tokens + num_new)
            return (inputs, end - num_computed_tokens, *rest)

        def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
            super()._preempt_request(request, *args, **kwargs)
            self.doorstep.listener.preempted(request.request_id)

    return SteppingScheduler


DoorstepScheduler = with_doorstep(Scheduler)
"""Plans one step after the other."""
OverlappingDoorstepScheduler = with_doorstep(AsyncScheduler)
"""Plans a step while the last one is computed."""


def planned_chunks(planned: SchedulerOutput) -> list[PlannedChunk]:
    """Returns what a step computes."""
    drafts, cached = planned.scheduled_spec_decode_tokens, planned.scheduled_cached_reqs
    starts = {new.req_id: new.num_computed_tokens for new in planned.scheduled_new_reqs}
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [
        PlannedChunk(name, starts[name], num_tokens, len(drafts.get(name, ())))
        for name, num_tokens in planned.num_scheduled_tokens.items()
    ]


def attach(core: Any, doorstep: Doorstep) -> None:
    """Gives the objects that vLLM has created for an engine core their doorstep."""
    core.scheduler.doorstep = doorstep
    core.scheduler.encoder_cache_manager.doorstep = doorstep
    core.scheduler.ec_connector.doorstep = doorstep
