"""Predicts when each worker can begin with a request, and at what pace it continues, for all workers at once; and when
each encoder's device can begin with new work.

An engine computes in steps. Each step has a cost of its own and a cost for every sequence that decodes, and it has room
for a limited number of prompt tokens. A request joins the first step that begins after its arrival and has room left
after the requests ahead of it. So it waits for the end of the running step and for full steps, and it shares its first
step with other requests:

    at the report      the queue ahead begins with a step that it fills
    since the report   as many steps have begun as fit in that time; tokens in them are no longer ahead
    dispatched since   is behind that queue, and joins when this request does

Scarce resources (places in a step, KV blocks) become free as sequences end; until then the requests ahead continue. A
silent worker (`member_columns`) has done what it could do since its last report, counts all that this router has open
on it as not done, and counts as busy for some time more, because nothing is known of what others sent there.

An encoder serves its queue by the rule of `fabric.contracts.encoder_queue`, and the waits here are those of that
module, for all encoders and for all sizes of new work.

The functions change no column. They are computed in C (`predictions.c`), or with numpy where the machine has no
compiler (`vector_predictions`). They know nothing of media, of links, or of a request except its size.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fabric.c_library import load_c_library
from fabric.contracts import NUM_BINS
from router.planning import vector_predictions
from router.planning.member_columns import MAX_SILENCE_S, EncoderColumns, Floats, WorkerColumns, address_of
from router.planning.vector_predictions import DeviceWaits, MediaRuns, RequestSize, WorkerTimes


def worker_times(workers: WorkerColumns, size: RequestSize, now: float, stale_after_s: float) -> WorkerTimes:
    """Predicts the times of a request that arrives at `now`."""
    library = _library()
    if library is None:
        return vector_predictions.worker_times(workers, size, now, stale_after_s)
    num = len(workers)
    times = np.empty((len(WorkerTimes._fields), num))
    first, step = address_of(times), 8 * num
    promised = None if size.promised_tokens is None else address_of(size.promised_tokens)
    request = _CRequest(
        now, stale_after_s, MAX_SILENCE_S, size.num_tokens, size.scale_tokens, address_of(size.depths), promised
    )
    out = _CTimes(*range(first, first + step * len(times), step))
    described = workers.described(_CWorkers)
    described.num = num
    library.worker_times(ctypes.byref(described), ctypes.byref(request), ctypes.byref(out))
    return WorkerTimes(*times)


def await_landings(
    times: WorkerTimes, landings_s: Floats, row_of_worker: npt.NDArray[np.int64], runs: MediaRuns, end_s: Floats
) -> None:
    """Raises `end_s`, the end of each worker's prefill, where the landings permit no earlier end. `landings_s` has
    shape `(rows, units)`; the row of each worker's slot is in `row_of_worker`."""
    library = _library()
    if library is None:
        vector_predictions.await_landings(times, landings_s, row_of_worker, runs, end_s)
        return
    library.await_landings(
        len(end_s),
        address_of(row_of_worker),
        address_of(landings_s),
        landings_s.shape[1],
        len(runs.unit),
        address_of(runs.unit),
        address_of(runs.end),
        address_of(runs.behind),
        address_of(times.covered),
        address_of(times.weighted),
        address_of(times.s_per_token),
        address_of(end_s),
    )


def device_waits(encoders: EncoderColumns, now: float, stale_after_s: float, priority: int) -> DeviceWaits:
    """Returns the waits at all encoders for new work that arrives at `now`. They equal those of
    `fabric.contracts.wait_s` for one encoder and one size of work; what this router has open on a silent encoder, and
    the silence itself, count in addition."""
    library = _library()
    if library is None:
        return vector_predictions.device_waits(encoders, now, stale_after_s, priority)
    found = np.empty((2 * NUM_BINS + 1, encoders.capacity))
    described = encoders.described(_CEncoders)
    described.num, described.stride, described.num_bins = len(encoders), encoders.capacity, NUM_BINS
    first = address_of(found)
    sizes = first + 8 * encoders.capacity * (NUM_BINS + 1)
    library.device_waits(ctypes.byref(described), now, stale_after_s, MAX_SILENCE_S, priority, first, sizes)
    return DeviceWaits(found[: NUM_BINS + 1], found[NUM_BINS + 1 :])


# ------------------------------------------------------------ the C library


def _structure(name: str, counts: tuple[str, ...], doubles: tuple[str, ...], arrays: tuple[str, ...]) -> type:
    fields = [(each, ctypes.c_int64) for each in counts] + [(each, ctypes.c_double) for each in doubles]
    return type(name, (ctypes.Structure,), {"_fields_": fields + [(each, ctypes.c_void_p) for each in arrays]})


# These mirror the structures of `predictions.c`, field by field.
_CWorkers = _structure(
    "_CWorkers",
    ("num",),
    (),
    (
        "num_open",
        "open_units",
        "num_pending",
        "pending_units",
        "report_at_s",
        "is_reported",
        "queued_tokens",
        "num_decoding",
        "max_step_tokens",
        "num_there",
        "max_sequences",
        "residence_s",
        "kv_blocks_total",
        "kv_blocks_used",
        "reported_base_s",
        "reported_decode_s",
        "pending_blocks",
        "block_size",
        "base_s",
        "per_token_s",
    ),
)
_CEncoders = _structure(
    "_CEncoders",
    ("num", "stride", "num_bins"),
    (),
    (
        "profiles",
        "pending_profiles",
        "is_reported",
        "report_at_s",
        "forward_left_s",
        "unit_s",
        "patience",
        "open_units",
        "pending_units",
    ),
)
_CRequest = _structure(
    "_CRequest",
    (),
    ("now", "stale_after_s", "max_silence_s", "num_tokens", "scale_tokens"),
    ("depths", "promised_tokens"),
)
_CTimes = _structure("_CTimes", (), (), WorkerTimes._fields)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_c_library(Path(__file__).with_name("predictions.c"))
    if library is not None:
        pointer, number, seconds = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        library.worker_times.argtypes = [pointer, pointer, pointer]
        library.await_landings.argtypes = [number, pointer, pointer, number, number, *[pointer] * 7]
        library.device_waits.argtypes = [pointer, seconds, seconds, seconds, number, pointer, pointer]
        for function in (library.worker_times, library.await_landings, library.device_waits):
            function.restype = None
    return library
