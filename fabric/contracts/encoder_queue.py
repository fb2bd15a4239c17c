"""Defines the order in which an encoder serves the calls that wait there, and predicts from an encoder's report when
new work would be served. The encoder pool ranks its calls with this module, and routers predict with it, so that a
prediction follows the rule by which the encoder really decides.

`CallTurn` and `Rank` hold the rule. A *queue profile* is the encoder's queue in a fixed number of floats, small enough
for a report that is sent many times a second: the seconds of queued work, in bins of *keys*. The key of work is its
virtual rank relative to the moment of the report, so new work is behind exactly the work of lower keys
(`queue_profile`, `add_work`). `waits_s` predicts the waits of new work at many encoders at once, and `wait_s` at one.
`decode_waits_s` predicts the waits for a decode process.

The module has no clock, so callers pass the time in. It knows nothing of media, batches, models or messages.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# ------------------------------------------------------------ the order of calls


@overload
def virtual_s(waiting_since_s: float, remaining_s: float, done_s: float, patience: float) -> float: ...
@overload
def virtual_s(
    waiting_since_s: FloatArray, remaining_s: FloatArray, done_s: FloatArray | float, patience: FloatArray | float
) -> FloatArray: ...
def virtual_s(waiting_since_s: Any, remaining_s: Any, done_s: Any, patience: Any) -> Any:
    """Returns the virtual time by which calls of equal priority are ordered: the lowest goes first. A call that needs
    one second more goes first if it came `patience` seconds earlier. It holds for numbers and for columns.

    A call counts with the work that remains, but with at least half of all its work. Otherwise the last units of a
    video would count as shorter than a picture, and the picture would wait for all of them."""
    # The sum is max(remaining_s, (remaining_s + done_s) / 2), for numbers and for arrays.
    needed_s = remaining_s + (abs(done_s - remaining_s) + (done_s - remaining_s)) / 4
    return waiting_since_s + patience * needed_s


@dataclass(slots=True, eq=False)
class CallTurn:
    """A `CallTurn` records how long one call has waited and how much forward time it has received, and ranks the call
    by that. It is mutable, and all items of the call share it.

    A call is one encode request that a router sends to this encoder. Priority (the lowest number first) is strict, as
    it is in the worker that waits for the features. Otherwise a request of high priority would wait in the worker for
    features that are queued here behind others.

    Calls of equal priority are ordered by shortest remaining work, with aging: the rank is `waiting since + patience *
    remaining encoding time`, and the lowest rank goes first. So the shorter call goes first, and a call is overtaken
    only by calls that arrive within `patience` times its own encoding time. No call starves, and no timer is needed.
    The encoder serves units rather than whole calls, so a long video gives way to a picture between two of its units.
    Two rules keep this true at every moment of the video's life:

    - Time in the forward pass does not count as waiting, and each second of the call's own work takes `patience`
      seconds off the wait that has accumulated. So a video that is served continuously never looks old, and a video
      that had to wait spends its accumulated wait on the service that it gets.
    - A call never counts as shorter than half of its original work (`virtual_s`).
    """

    call: int
    """Identifies the call on this encoder."""
    age: tuple[float, str]
    waiting_since_s: float
    done_s: float = 0.0
    """Sums the predicted forward time of the units that the call has already received."""
    priority: int = 0

    def served(self, seconds: float, worth_s: float, now_s: float, patience: float) -> None:
        """Records a forward pass that ended at `now_s`, took `seconds`, and made units of this call that were predicted
        to take `worth_s`."""
        self.done_s += worth_s
        self.waiting_since_s = min(now_s, self.waiting_since_s + seconds + patience * min(worth_s, seconds))

    def rank(self, remaining_s: float, patience: float, item_index: int) -> Rank:
        """Returns the rank of one item of this call while all items of the call together need `remaining_s` on this
        encoder."""
        virtual = virtual_s(self.waiting_since_s, remaining_s, self.done_s, patience)
        return Rank(self.priority, virtual, self.age, item_index)


class Rank(NamedTuple):
    """A `Rank` orders calls and items; the smaller rank goes first. The age order of the requests breaks ties, then the
    item's place in its request."""

    priority: int
    virtual_s: float
    age: tuple[float, str]
    item_index: int


# ------------------------------------------------------------ the profile of a queue

NUM_BINS = 16
"""A profile has this many bins. The first holds work that goes before any new work, because it has waited for long or
has a priority below 0. The last holds work of a priority above 0, which goes after all other work."""
PROFILE_LENGTH = 2 * NUM_BINS
"""A profile has this many floats: the seconds of work in each bin, and then the *moment* of each bin, which is the sum
of seconds * key. Both are sums, so profiles may be added and subtracted."""
EMPTY_PROFILE = (0.0,) * PROFILE_LENGTH
SMALLEST_KEY = 0.02
"""The first bin of new work ends at this key, in virtual seconds; with a patience of 4 that is 5 ms of encoding. Each
later bin ends at twice the key of the bin before it."""
_FAR = 1e9
_FIRST, _LAST = -2 * _FAR, _FAR
"""These finite numbers stand for the keys of the first and of the last bin; infinite ones would make products with 0
undefined."""
EDGES: FloatArray = np.array([0.0, *(SMALLEST_KEY * 2**number for number in range(NUM_BINS - 3)), _FAR / 2])
"""Holds the highest key of each bin but the last. Has shape `(NUM_BINS - 1,)`."""
_ONES = np.ones(NUM_BINS)
_EQUAL = 1.0 + 1e-9
"""Work of a key that exceeds the own key by less than this factor counts as equal, so that sums of equal keys are equal
however they were rounded."""


def key_of(remaining_s: float, patience: float, age_s: float = 0.0, priority: int = 0) -> float:
    """Returns the key of new work that needs `remaining_s` on an encoder and arrives `age_s` after its report."""
    if priority:
        return 2 * _FAR if priority > 0 else -_FAR
    return virtual_s(age_s, remaining_s, 0.0, patience)


def bin_of(key: float) -> int:
    """Returns the bin of work with that key."""
    return int(np.searchsorted(EDGES, key, side="left"))


def add_work(profile: MutableSequence[float] | FloatArray, seconds: float, key: float) -> None:
    """Adds work that is queued at an encoder, or removes it if `seconds` is negative. Changes `profile`, which has
    shape `(PROFILE_LENGTH,)`. A router adds work that it has dispatched and that no report contains yet."""
    place = bin_of(key)
    bounded = _FIRST if place == 0 else min(key, _LAST)
    profile[place] += seconds
    profile[NUM_BINS + place] += seconds * bounded


class QueuedCalls(NamedTuple):
    """Holds the calls that wait at an encoder, in columns of shape `(num_calls,)`."""

    waiting_since_s: FloatArray
    remaining_s: FloatArray
    """Holds the encoding time by which the calls are ranked; it includes units in the forward pass."""
    done_s: FloatArray
    priority: FloatArray
    num_units: FloatArray
    """Counts the units that are not in the forward pass yet. Each call's units count as equally long."""
    num_running: FloatArray
    """Counts the units in the forward pass."""
    seconds: FloatArray
    """Holds the predicted time of the forward passes over the units that are not in the forward pass yet."""


class QueueState(NamedTuple):
    profile: tuple[float, ...]
    """Has `PROFILE_LENGTH` floats."""
    unit_s: float
    """Holds the mean duration of the forward pass in which the encoder is found at a random moment while it works on
    this queue. It is 0 if nothing is queued."""


NO_QUEUE = QueueState(EMPTY_PROFILE, 0.0)


def queue_profile(calls: QueuedCalls, now_s: float, patience: float) -> QueueState:
    """Returns the profile of a queue as it is at `now_s`. A unit of a call has the key at which it will be served: the
    highest virtual rank that the call reaches on the way to that unit."""
    num_units = calls.num_units.astype(np.int64)
    if not num_units.sum():
        return NO_QUEUE
    call = np.repeat(np.arange(len(num_units)), num_units)
    number = np.arange(len(call)) - np.repeat(num_units.cumsum() - num_units, num_units)
    per_unit_s = calls.remaining_s / np.maximum(calls.num_units + calls.num_running, 1.0)
    served_s = (number + calls.num_running[call]) * per_unit_s[call]
    keys = _keys_when_served(calls, call, served_s, now_s, patience)
    unit_s = (calls.seconds / np.maximum(calls.num_units, 1.0))[call]
    places = np.searchsorted(EDGES, keys, side="left")
    seconds = np.bincount(places, unit_s, NUM_BINS)
    moments = np.bincount(places, unit_s * keys, NUM_BINS)
    total_s = seconds.sum()
    met_s = float((unit_s * unit_s).sum() / total_s) if total_s else 0.0
    return QueueState((*seconds.tolist(), *moments.tolist()), met_s)


def _keys_when_served(
    calls: QueuedCalls, call: npt.NDArray[np.int64], served_s: FloatArray, now_s: float, patience: float
) -> FloatArray:
    """Returns the key of each unit, given that its call has by then received `served_s` more of its work.

    `CallTurn.served` lets a call's rank rise by the time in the forward pass while the call spends the wait that it has
    accumulated. Once that is spent, after `wait / patience` seconds of service, the call counts as waiting since now,
    and its rank falls with its remaining work. A unit after such a peak is served with the unit at the peak.
    """
    waited_s = np.maximum(now_s - calls.waiting_since_s, 0.0)[call]
    remaining_s, done_s = calls.remaining_s[call], calls.done_s[call]
    # The service while accumulated wait is left; all of it if `patience` is 0, which means first come, first served.
    spent_s = np.minimum(served_s, waited_s / patience) if patience else served_s
    rising = virtual_s((1.0 + patience) * spent_s - waited_s, remaining_s - spent_s, done_s + spent_s, patience)
    falling = virtual_s(served_s, remaining_s - served_s, done_s + served_s, patience)
    keys = np.where(served_s > spent_s, np.maximum(rising, falling), rising)
    priority = calls.priority[call]
    keys = np.where(priority > 0, _LAST, keys)
    return np.where((priority < 0) | ((priority == 0) & (keys <= EDGES[0])), _FIRST, keys)


# ------------------------------------------------------------ predictions


def waits_s(
    profiles: FloatArray,
    forward_left_s: FloatArray,
    own_keys: FloatArray,
    ages_s: FloatArray,
    unit_s: FloatArray,
) -> FloatArray:
    """Returns, for each encoder, the seconds until it begins with the first unit of new work that arrives now.

    `profiles` has shape `(num_encoders, PROFILE_LENGTH)` and the others have shape `(num_encoders,)`; they are what the
    encoders report, except for `own_keys` (see `keys_of`) and for `ages_s`, the age of each report. The new work waits
    for the rest of the running forward pass, which can't be interrupted, and for the work that ranks ahead of it. An
    encoder works on its queue while its report ages, the lowest keys first. When that has served all work ahead, the
    encoder is in the middle of a pass over other work, if there is any.

    If the encoder fuses the new work into one pass with work ahead of it, the pass begins earlier and takes longer, and
    the predicted end of the pass is the same.
    """
    # A product with ones sums the rows in a fraction of the time of `sum`, and a plan has only microseconds.
    seconds, moments = profiles[:, :NUM_BINS], profiles[:, NUM_BINS:]
    is_ahead = moments <= seconds * (own_keys * _EQUAL)[:, None]
    since_s = ages_s - forward_left_s
    waits: FloatArray = (seconds * is_ahead) @ _ONES
    waits -= since_s
    np.maximum(waits, 0.0, out=waits)
    if since_s.max(initial=0.0) > 0.0:
        in_the_way_s = np.minimum(0.5 * unit_s, seconds @ _ONES - since_s)
        np.maximum(waits, in_the_way_s, out=waits, where=since_s > 0.0)
    return waits


def keys_of(own_remaining_s: FloatArray, patiences: FloatArray, ages_s: FloatArray, priority: int = 0) -> FloatArray:
    """Returns `key_of` for many encoders at once; all arrays have shape `(num_encoders,)`."""
    if priority:
        return np.full(len(ages_s), key_of(0.0, 0.0, 0.0, priority))
    return ages_s + patiences * own_remaining_s  # This is `virtual_s` of work of which nothing is done yet.


def wait_s(profile: Sequence[float], forward_left_s: float, own_key: float, age_s: float, unit_s: float) -> float:
    """Returns the wait of new work at one encoder, as `waits_s` does for many."""
    all_s = ahead_s = 0.0
    limit = own_key * _EQUAL
    for seconds, moment in zip(profile[:NUM_BINS], profile[NUM_BINS:], strict=True):
        all_s += seconds
        if moment <= limit * seconds:
            ahead_s += seconds
    since_s = age_s - forward_left_s
    in_the_way_s = min(0.5 * unit_s, all_s - since_s) if since_s > 0.0 else 0.0
    return max(ahead_s - since_s, in_the_way_s, 0.0)


def decode_waits_s(
    decode_left_s: FloatArray, waiting_s: FloatArray, num_processes: FloatArray, ages_s: FloatArray
) -> FloatArray:
    """Returns, for each encoder, the seconds until a decode process takes a new item. All arrays have shape
    `(num_encoders,)`. `decode_left_s` is the time until a process is free, and `waiting_s` is the decoding time of the
    items that wait ahead of the new one: those of one unit if the new item has one unit, because items of several
    units leave a process to the others."""
    waits: FloatArray = np.maximum(decode_left_s + waiting_s / np.maximum(num_processes, 1.0) - ages_s, 0.0)
    return waits
