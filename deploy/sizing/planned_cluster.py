"""Plans a cluster for the devices of a machine: how many encoders and workers, over how many devices each worker
spreads, and how large their pools are.

`plan_cluster` tries arrangements in the order in which they serve best, prices each with the memory budget of `weft
check`, and takes the first that fits. An arrangement in which a worker has room for several requests as long as the
model's context comes before one with room for one, and that before one that holds shorter requests only. What is
planned is a whole `ClusterConfig`. The module starts nothing, and knows nothing of how devices are found or of how a
config is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from deploy import compose
from deploy.config import ClusterConfig
from deploy.gpu_devices import GIB, GpuDevice
from deploy.sizing.budget import (
    FEATURES_BYTES,
    FEATURES_SHARE,
    STAGING_BYTES,
    STAGING_SHARE,
    Budget,
    ProcessBudget,
    plan_budget,
)
from deploy.sizing.device_use import CONTEXT_BYTES
from deploy.sizing.largest_media import largest_items
from deploy.sizing.stored_weights import StoredWeights
from fabric.contracts import ConfigError
from llm_workers.scheduling import PAGE_TOKENS_MULTIPLE, USABLE_SHARE, LargestItem, reads_in_place

HOST_SHARE = 0.8
STEP_TOKENS = (8192, 4096, 2048, 1024, 512, 256)
BATCH_COSTS = (65536, 32768, 16384, 8192, 4096)
"""These are tried from the first on. Smaller ones leave more memory for KV blocks."""
BLOCK_SIZE = 16
MAX_SEQUENCES = 256
MAX_SEQUENCES_ON_CPU = 64
BLOCKS_ON_CPU = 2048
DEVICES_PER_ENCODER = 4
"""One in so many devices is for an encoder, as in the shipped config for eight devices; `weft simulate` shows what
suits a workload."""
ENCODER_SHARE = 0.25
"""An encoder that shares its device with a worker asks Ray for this share of it."""
NUM_DOUBLINGS = 8
"""Arenas are doubled at most so often until they hold the largest medium."""


class Machine(NamedTuple):
    devices: tuple[GpuDevice, ...]
    num_cpus: int
    memory_bytes: int


class WantedRoom(NamedTuple):
    """Says what a worker should have room for: requests as long as the model's context, and tokens of a step."""

    num_contexts: int
    step_tokens: int


MUCH, ENOUGH, LITTLE = WantedRoom(4, 2048), WantedRoom(1, STEP_TOKENS[-1]), WantedRoom(0, STEP_TOKENS[-1])
ATTEMPTS = ((False, MUCH), (False, ENOUGH), (True, MUCH), (True, ENOUGH), (False, LITTLE), (True, LITTLE))
"""Lists what is tried, in order: whether an encoder shares its device with a worker, which makes both slower, and what
room a worker should have."""


class Arrangement(NamedTuple):
    """An `Arrangement` says which devices do what. If it is shared, the encoder uses one of the workers' devices."""

    num_encoders: int
    num_workers: int
    num_ranks: int
    is_shared: bool = False


class PlannedCluster(NamedTuple):
    config: ClusterConfig
    budget: Budget
    arrangement: Arrangement
    used: tuple[GpuDevice, ...]
    """Holds the devices for which it is planned; others are too small."""
    is_context_whole: bool
    """Says whether a worker holds a request as long as the model's context."""
    are_blocks_enough: bool = False
    """Says whether more KV blocks would never be used, so that memory is left over."""


def plan_cluster(
    machine: Machine, config: ClusterConfig, model: compose.Model, weights: StoredWeights | None
) -> PlannedCluster:
    """Returns a cluster for this machine. `config` has what the caller sets, and a dtype. Raises ConfigError if the
    model does not fit, with what it would take."""
    if weights is None:
        raise ConfigError(
            f"{model.directory} has no safetensors files whose parameters could be counted, so no cluster can be sized"
        )
    planner = _Planner(machine, config, model, weights)
    return planner.on_devices() if machine.devices else planner.on_cpus()


class _Planner:
    """A `_Planner` makes one plan."""

    def __init__(self, machine: Machine, config: ClusterConfig, model: compose.Model, weights: StoredWeights) -> None:
        self._machine, self._base, self._model, self._weights = machine, config, model, weights
        self._takes_media = bool(model.family.max_items)
        # Pages of this size are read where they lie; in single precision and on a CPU, none are.
        is_in_place = bool(machine.devices) and reads_in_place("cuda", config.model.dtype, PAGE_TOKENS_MULTIPLE)
        self._block_size = PAGE_TOKENS_MULTIPLE if is_in_place else BLOCK_SIZE
        limits, options = compose.media_limits(config), compose.video_options(config)
        self._largest: Sequence[LargestItem] = largest_items(
            model.family, tuple(model.family.max_items), limits, options
        )

    # ------------------------------------------------------------ devices

    def on_devices(self) -> PlannedCluster:
        devices = self._machine.devices
        for least_bytes in sorted({device.memory_bytes for device in devices}):
            used = tuple(device for device in devices if device.memory_bytes >= least_bytes)
            for is_shared, wanted in ATTEMPTS:
                for arrangement in self._arrangements(used, is_shared):
                    planned = self._fitted(used, arrangement, least_bytes, wanted)
                    if planned is not None:
                        return planned
        raise ConfigError(self._why_nothing_fits())

    def _arrangements(self, used: Sequence[GpuDevice], is_shared: bool) -> Iterator[Arrangement]:
        """Yields the arrangements of these devices. Those with few ranks come first, because ranks wait for each
        other."""
        num_devices, has_slices = len(used), any(device.is_slice for device in used)
        num_kv_heads = self._model.family.shape.num_kv_heads
        # NCCL connects no slices of a device, so a worker on slices has one rank.
        most = 1 if has_slices else num_devices
        ranks = [count for count in range(1, most + 1) if num_kv_heads % count == 0]
        for num_ranks in ranks:
            if not self._takes_media:
                if not is_shared:
                    yield Arrangement(0, num_devices // num_ranks, num_ranks)
                continue
            if is_shared:
                yield Arrangement(1, num_devices // num_ranks, num_ranks, is_shared=True)
                continue
            for_workers = num_devices - max(1, num_devices // DEVICES_PER_ENCODER)
            if num_workers := for_workers // num_ranks or (num_devices - 1) // num_ranks:
                yield Arrangement(num_devices - num_workers * num_ranks, num_workers, num_ranks)

    def _fitted(
        self, used: tuple[GpuDevice, ...], arrangement: Arrangement, device_bytes: int, wanted: WantedRoom
    ) -> PlannedCluster | None:
        """Returns the plan for an arrangement with the largest steps, batches and number of KV blocks that fit, or None
        if nothing does."""
        room = int(device_bytes * USABLE_SHARE) - CONTEXT_BYTES
        max_model_len = self._model.family.shape.max_model_len
        needed = max(2, -(-wanted.num_contexts * max_model_len // self._block_size))
        steps = [step for step in STEP_TOKENS if step >= wanted.step_tokens]

        def fits(num_blocks: int, step: int, batch: int) -> bool:
            budget = self._budget(self._config(arrangement, num_blocks, step, batch))
            return all(taken <= room for taken in _device_sums(budget, arrangement.is_shared))

        if not fits(needed, steps[-1], BATCH_COSTS[-1]):
            return None
        for batch_cost in BATCH_COSTS if arrangement.num_encoders else BATCH_COSTS[:1]:
            for step_tokens in steps:
                values = {"step": step_tokens, "batch": batch_cost}
                num_blocks = _most(needed, self.most_blocks(), partial(fits, **values))
                if num_blocks is None:
                    continue
                config = self._with_arenas(self._config(arrangement, num_blocks, **values))
                budget = self._budget(config)
                if not budget.problems:
                    is_whole = num_blocks * self._block_size >= max_model_len
                    is_most = num_blocks >= self.most_blocks()
                    return PlannedCluster(config, budget, arrangement, used, is_whole, is_most)
        return None

    def most_blocks(self) -> int:
        """Returns the number of KV blocks that the most sequences of a step fill at most."""
        return -(-MAX_SEQUENCES * self._model.family.shape.max_model_len // self._block_size)

    def _config(self, arrangement: Arrangement, num_blocks: int, step: int, batch: int) -> ClusterConfig:
        num_processes = arrangement.num_encoders + arrangement.num_workers * arrangement.num_ranks
        for_decoding = max(1, self._machine.num_cpus // 2 // max(1, arrangement.num_encoders))
        encoders: dict[str, Any] = {"replicas": 0, "device": "cpu", "gpus_per_replica": 0}
        if arrangement.num_encoders:
            encoders = {
                "replicas": arrangement.num_encoders,
                "device": "cuda",
                "gpus_per_replica": ENCODER_SHARE if arrangement.is_shared else 1,
                "max_batch_cost": batch,
                "decode_processes": min(8, for_decoding),
            }
        workers = {
            "replicas": arrangement.num_workers,
            "device": "cuda",
            "tensor_parallel": arrangement.num_ranks,
            "gpus_per_replica": 1 - ENCODER_SHARE if arrangement.is_shared else 1,
            "block_size": self._block_size,
            "cuda_graphs": "auto" if self._block_size != BLOCK_SIZE and arrangement.num_ranks == 1 else "off",
            "num_blocks": num_blocks,
            "max_step_tokens": step,
            "max_sequences": MAX_SEQUENCES,
        }
        threads = max(1, min(8, self._machine.num_cpus // 2 // num_processes))
        return self._made(encoders, workers, threads, arrangement.is_shared)

    def _why_nothing_fits(self) -> str:
        """Says how much the model takes, and how many devices of this kind it would need."""
        devices = self._machine.devices
        largest_bytes = max(device.memory_bytes for device in devices)
        num_devices = sum(device.memory_bytes == largest_bytes for device in devices)
        room = int(largest_bytes * USABLE_SHARE) - CONTEXT_BYTES
        has_slices = any(device.is_slice for device in devices)
        num_kv_heads = self._model.family.shape.num_kv_heads
        rank_bytes: dict[int, int] = {}
        encoder_bytes = 0
        for num_ranks in (count for count in range(1, num_kv_heads + 1) if num_kv_heads % count == 0):
            arrangement = Arrangement(int(self._takes_media), 1, num_ranks)
            least = self._config(arrangement, 2, STEP_TOKENS[-1], BATCH_COSTS[-1])
            *encoder, rank_bytes[num_ranks] = _device_sums(self._budget(least), is_shared=False)
            encoder_bytes = sum(encoder)
        here = max((count for count in rank_bytes if count <= (1 if has_slices else num_devices)), default=1)
        said = (
            f"{self._model.name} does not fit: with {here} rank{'s' if here > 1 else ''} per worker, a rank takes at "
            f"least {_gib(rank_bytes[here])} of its device"
            + (f" and an encoder {_gib(encoder_bytes)}" if encoder_bytes else "")
            + f", and each of the {num_devices} x {_gib(largest_bytes)} here can give {_gib(max(0, room))}"
        )
        if encoder_bytes > room:
            return f"{said}; the encoder needs a larger device"
        enough = next((count for count, taken in rank_bytes.items() if taken <= room), None)
        if has_slices:
            return f"{said}; workers on slices have one rank, so use larger slices or whole devices"
        if enough is not None:
            return f"{said}; {enough} such devices hold a worker" + (
                ", and one more the encoder" if encoder_bytes else ""
            )
        most_ranks = max(rank_bytes)
        if most_ranks == here:
            return f"{said}; its {num_kv_heads} KV heads allow no more ranks, so it needs larger devices"
        most = (
            f"{most_ranks} ranks, the most that its {num_kv_heads} KV heads allow, take {_gib(rank_bytes[most_ranks])}"
        )
        return f"{said}; even {most} each"

    # ------------------------------------------------------------ no devices

    def on_cpus(self) -> PlannedCluster:
        arrangement = Arrangement(1 if self._takes_media else 0, 1, 1)
        room = int(self._machine.memory_bytes * HOST_SHARE)
        max_model_len = self._model.family.shape.max_model_len
        most = max(BLOCKS_ON_CPU, -(-max_model_len // BLOCK_SIZE))

        def fits(num_blocks: int) -> bool:
            budget = self._budget(self._with_arenas(self._cpu_config(arrangement, num_blocks)))
            return not budget.problems and sum(map(_held_bytes, budget.processes)) <= room

        num_blocks = next((count for count in (most, BLOCKS_ON_CPU, BLOCKS_ON_CPU // 4) if fits(count)), None)
        if num_blocks is None:
            config = self._with_arenas(self._cpu_config(arrangement, BLOCKS_ON_CPU // 4))
            budget = self._budget(config)
            taken = _gib(sum(map(_held_bytes, budget.processes)))
            reasons = "; ".join(budget.problems) or f"its weights, pages and workspaces take {taken}"
            raise ConfigError(
                f"{self._model.name} does not fit into this machine, which has no GPU and can give {_gib(room)} of its "
                f"memory: {reasons}"
            )
        config = self._with_arenas(self._cpu_config(arrangement, num_blocks))
        is_whole = num_blocks * BLOCK_SIZE >= max_model_len
        return PlannedCluster(config, self._budget(config), arrangement, (), is_whole)

    def _cpu_config(self, arrangement: Arrangement, num_blocks: int) -> ClusterConfig:
        encoders: dict[str, Any] = {"replicas": arrangement.num_encoders}
        if arrangement.num_encoders:
            encoders |= {"device": "cpu", "decode_processes": max(1, min(2, self._machine.num_cpus // 2))}
        workers = {
            "replicas": 1,
            "device": "cpu",
            "block_size": BLOCK_SIZE,
            "num_blocks": num_blocks,
            "max_step_tokens": 512,
            "max_sequences": MAX_SEQUENCES_ON_CPU,
        }
        return self._made(encoders, workers, max(1, self._machine.num_cpus // 2), False)

    # ------------------------------------------------------------ pieces

    def _made(
        self, encoders: Mapping[str, Any], workers: Mapping[str, Any], threads: int, is_shared: bool
    ) -> ClusterConfig:
        data = self._base.model_dump(by_alias=True)
        data["encoders"] |= encoders
        data["workers"] |= workers
        data |= {"threads_per_replica": threads, "allow_shared_gpu": is_shared}
        return ClusterConfig.model_validate(data)

    def _budget(self, config: ClusterConfig) -> Budget:
        largest = self._largest if config.encoders.replicas else ()
        return plan_budget(config, self._model, self._weights, largest)

    def _with_arenas(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with sizes of arenas and inboxes: what they share by default, doubled until they hold the
        largest medium."""
        if not config.encoders.replicas:
            return config
        memory_bytes = self._machine.memory_bytes
        arena = _whole_mib(min(FEATURES_BYTES, memory_bytes // FEATURES_SHARE) // config.encoders.replicas)
        inbox = _whole_mib(min(STAGING_BYTES, memory_bytes // STAGING_SHARE) // config.workers.replicas)
        for _ in range(NUM_DOUBLINGS):
            data = config.model_dump(by_alias=True)
            data["encoders"]["arena_bytes"], data["workers"]["inbox_bytes"] = arena, inbox
            made = ClusterConfig.model_validate(data)
            problems = self._budget(made).problems
            arena *= 2 if any("arena_bytes is" in each for each in problems) else 1
            inbox *= 2 if any("inbox_bytes is" in each for each in problems) else 1
            if (arena, inbox) == (made.encoders.arena_bytes, made.workers.inbox_bytes):
                return made
        return made


def _most(least: int, most: int, fits: Callable[[int], bool]) -> int | None:
    """Returns the largest number between two for which `fits` holds, or None if it does not hold for the least. If it
    holds for a number, it holds for all smaller ones."""
    most = max(least, most)
    if not fits(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


def _device_sums(budget: Budget, is_shared: bool) -> list[int]:
    """Returns what the processes take of their devices: each for itself, or together if they share one."""
    sums = [sum(row.nbytes or 0 for row in process.rows if row.place == "cuda") for process in budget.processes]
    return [sum(sums)] if is_shared else sums


def _held_bytes(process: ProcessBudget) -> int:
    """Returns what the replicas of a process hold all the time; pools with a note "at most" fill only when needed."""
    held = (row.nbytes or 0 for row in process.rows if not row.note.startswith("at most"))
    return process.num_replicas * sum(held)


def _whole_mib(nbytes: int) -> int:
    return max(1, nbytes // 2**20) * 2**20


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB // 10 else f"{nbytes / 2**20:.0f} MiB"
