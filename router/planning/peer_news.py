"""Shares between routers what each of them has dispatched. `NewsLog` collects what a router tells the others, and
`PeerBook` keeps which attempts a router knows of the others.

Members report a few times per second, and less often in a large cluster. Between two reports, routers that know nothing
of each other send their requests to the same idle workers. So each router tells the others what it dispatched, and what
of it has left the queues: prompts when their first token came, encodings when they ended.

News may be lost. They are numbered, and a router that misses some forgets all attempts of their sender: most of them
would end soon, and the members' reports contain the rest. The module knows nothing of how news travel, or of what the
attempts mean for predictions.
"""

from __future__ import annotations

from collections.abc import Callable

from fabric.contracts import (
    AttemptId,
    ComputedNews,
    DispatchNews,
    EncodedNews,
    EncodingNews,
    MemberId,
    RouterNews,
)
from router.planning.member_shares import EncoderShare, WorkerShare

NEWS_INTERVAL_S = 0.002
"""A router sends news at most this often, and at once if it has sent none for this long."""


class NewsLog:
    """A `NewsLog` collects the news of one router from `start` to `stop`, until they are taken."""

    def __init__(self) -> None:
        self._on_first: Callable[[], None] | None = None
        self._seq = 0
        self._told: dict[AttemptId, set[MemberId]] = {}
        """Holds the members on which the others know an attempt to be."""
        self._dispatched: list[tuple[float, AttemptId, MemberId, WorkerShare]] = []
        self._encodings: list[tuple[float, AttemptId, MemberId, EncoderShare, int]] = []
        self._computed: list[tuple[float, AttemptId]] = []
        self._encoded: list[tuple[float, AttemptId, MemberId]] = []
        self._ended: list[AttemptId] = []

    def start(self, on_first: Callable[[], None]) -> None:
        """Begins to collect news, and calls `on_first` for the first one, also of those after `take`."""
        self._on_first = on_first

    def stop(self) -> None:
        """Collects nothing any more, and forgets what was not taken."""
        self._on_first = None
        for each in (self._dispatched, self._encodings, self._computed, self._encoded, self._ended, self._told):
            each.clear()

    def dispatched(self, attempt_id: AttemptId, worker_id: MemberId, share: WorkerShare, now: float) -> None:
        if self._on_first is not None:
            self._begin()
            self._dispatched.append((now, attempt_id, worker_id, share))
            self._told.setdefault(attempt_id, set()).add(worker_id)

    def encoding(
        self, attempt_id: AttemptId, encoder_id: MemberId, share: EncoderShare, priority: int, now: float
    ) -> None:
        if self._on_first is not None:
            self._begin()
            self._encodings.append((now, attempt_id, encoder_id, share, priority))
            self._told.setdefault(attempt_id, set()).add(encoder_id)

    def computed(self, attempt_id: AttemptId, at_s: float) -> None:
        """Collects that a prompt was computed."""
        if attempt_id in self._told:
            self._begin()
            self._computed.append((at_s, attempt_id))

    def encoded(self, attempt_id: AttemptId, encoder_id: MemberId, at_s: float) -> None:
        """Collects that an encoder has ended its work on an attempt."""
        if encoder_id in self._told.get(attempt_id, ()):
            self._begin()
            self._encoded.append((at_s, attempt_id, encoder_id))
            self._told[attempt_id].discard(encoder_id)

    def ended(self, attempt_id: AttemptId) -> None:
        """Collects that an attempt has ended, on all members."""
        if self._told.pop(attempt_id, None) is not None:
            self._begin()
            self._ended.append(attempt_id)

    def take(self, router_id: MemberId, now: float) -> RouterNews | None:
        """Returns the news since the last call, or None if there are none."""
        if not self._has_news:
            return None
        self._seq += 1
        news = RouterNews(
            router_id,
            self._seq,
            tuple(
                DispatchNews(
                    *attempt_id,
                    worker_id,
                    now - at_s,
                    share.weighted_tokens,
                    share.num_blocks,
                    share.scheme,
                    tuple(share.marks),
                    tuple((due_s - now, num) for due_s, num in share.awaited),
                )
                for at_s, attempt_id, worker_id, share in self._dispatched
            ),
            tuple(
                EncodingNews(
                    *attempt_id,
                    encoder_id,
                    now - at_s,
                    share.seconds,
                    share.decode_s,
                    priority,
                    tuple((mm_hash, done_s - now) for mm_hash, done_s in share.hash_to_done_s.items()),
                    share.num_units,
                )
                for at_s, attempt_id, encoder_id, share, priority in self._encodings
            ),
            tuple(ComputedNews(*attempt_id, now - at_s) for at_s, attempt_id in self._computed),
            tuple(EncodedNews(*attempt_id, encoder_id, now - at_s) for at_s, attempt_id, encoder_id in self._encoded),
            tuple(self._ended),
        )
        for each in (self._dispatched, self._encodings, self._computed, self._encoded, self._ended):
            each.clear()
        return news

    @property
    def _has_news(self) -> bool:
        return bool(self._dispatched or self._encodings or self._computed or self._encoded or self._ended)

    def _begin(self) -> None:
        if not self._has_news and self._on_first is not None:
            self._on_first()


class PeerBook:
    """A `PeerBook` keeps the open attempts of other routers, by router."""

    def __init__(self) -> None:
        self._router_to_seq: dict[MemberId, int] = {}
        self._router_to_attempts: dict[MemberId, set[AttemptId]] = {}

    def lost(self, news: RouterNews) -> set[AttemptId]:
        """Records that news came. Returns the attempts to forget, because news before these were lost."""
        before = self._router_to_seq.get(news.router_id, 0)
        self._router_to_seq[news.router_id] = news.seq
        return self._router_to_attempts.pop(news.router_id, set()) if news.seq != before + 1 else set()

    def add(self, router_id: MemberId, attempt_id: AttemptId) -> None:
        self._router_to_attempts.setdefault(router_id, set()).add(attempt_id)

    def remove(self, router_id: MemberId, attempt_id: AttemptId) -> None:
        """Forgets an attempt that has left all members."""
        self._router_to_attempts.get(router_id, set()).discard(attempt_id)

    def keep(self, router_ids: set[MemberId]) -> set[AttemptId]:
        """Forgets all other routers, and returns their attempts."""
        gone = [each for each in self._router_to_seq if each not in router_ids]
        for router_id in gone:
            del self._router_to_seq[router_id]
        return set().union(*(self._router_to_attempts.pop(each, set()) for each in gone))
