"""Sends many requests of all kinds to a running cluster at once, kills a process meanwhile, and checks every answer.

A question of the demo has one right answer, which the demo model gives nearly always. An answer could still be right by
luck, so every question is asked and computed again when the cluster is undisturbed: each token must have the same
log-probability. No answer to these questions depends on rounding (see `TOLERANCE`).
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
import numpy as np
from cluster_process import ClusterProcess, eventually, pids

from deploy.demo.ask import messages
from deploy.demo.tasks.catalogue import TASKS

KIND_TO_TASKS = {
    "text": ("repeat", "next number", "earlier turn"),
    "picture": ("colour", "shape", "place"),
    "pictures": ("which picture", "picture, text, picture", "number of pictures"),
    "video": ("direction", "appearing", "order of colours"),
    "sound": ("beeps", "pitch", "glide"),
}
MAX_TOKENS = 32
TIMEOUT_S = 300.0
NUM_AT_ONCE_AGAIN = 4
FROZEN_S = 0.3
"""A member is stopped for this long before it is killed. Its last reports arrive meanwhile, and the router gives it
more work. The time is far below the lease, after which the directory would drop the member."""
KIND_TO_LASTING_WORK = {"encoder": "num_queued", "worker": "num_waiting_for_features"}
"""Maps each kind of member to the gauge of work that can't end between its last report and the stop. A queued unit of
an encoder still needs a forward pass, which takes `encode_delay_s` at least. A request of a worker that waits for
features has all its tokens before it."""
ITEMS_ENCODED = "weft_encoder_items_encoded_total"
LEAST_RIGHT = 0.95
"""At least this share of the answers must be right; otherwise the model has changed."""
LEAST_ANEW = 0.5
"""At least this share of the media must be encoded again for the second answer; otherwise it hardly tests the
features."""
TOLERANCE = 1e-3
"""Limits the difference between the log-probabilities of a token that are computed in batches of different sizes. In
some 7,000 answers under load (float32) they differed by at most 1.4e-5. The two best tokens of a thousand questions
differed by at least 0.3."""


class Question(NamedTuple):
    kind: str
    messages: list[dict[str, Any]]
    answer: str


class Reply(NamedTuple):
    status: int
    text: str
    """Holds the answer, or the body of a failure."""
    logprobs: tuple[float, ...] = ()
    """Holds the log-probabilities of the answer's tokens."""


@dataclass(frozen=True)
class Outcome:
    questions: Sequence[Question]
    replies: Sequence[Reply]

    @property
    def failures(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.status != 200]

    @property
    def unexpected(self) -> list[int]:
        pairs = zip(self.questions, self.replies, strict=True)
        return [at for at, (question, reply) in enumerate(pairs) if reply.text != question.answer]


def questions(number: int, seed: int) -> Iterator[Question]:
    """Yields `number` questions, with the kinds in turn. No two questions are equal."""
    rng = np.random.default_rng((0xD1CE, seed))
    name_to_task = {task.name: task for task in TASKS}
    kinds = list(KIND_TO_TASKS.items())
    for at in range(number):
        kind, names = kinds[at % len(kinds)]
        sample = name_to_task[names[at // len(kinds) % len(names)]].draw(rng, 0)
        yield Question(kind, messages(sample), sample.answer)


def ask(client: httpx.Client, model: str, question: Question, is_streamed: bool = False, salt: str = "") -> Reply:
    """Asks a question with greedy decoding. A stream that breaks off is a failure."""
    body: dict[str, Any] = {
        "model": model,
        "messages": question.messages,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": is_streamed,
        "logprobs": True,
    }
    if salt:
        body["cache_salt"] = salt
    if not is_streamed:
        response = client.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            return Reply(response.status_code, response.text)
        (choice,) = response.json()["choices"]
        return Reply(200, str(choice["message"]["content"]), tuple(_logprobs(choice)))
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            return Reply(response.status_code, response.read().decode())
        return _read_stream(response.iter_lines())


def _read_stream(lines: Iterator[str]) -> Reply:
    text, logprobs = "", list[float]()
    for line in lines:
        if line == "data: [DONE]":
            return Reply(200, text, tuple(logprobs))
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return Reply(599, line)
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                logprobs += _logprobs(choice)
    return Reply(599, f"the stream broke off after {text!r}")


def _logprobs(choice: dict[str, Any]) -> list[float]:
    return [float(token["logprob"]) for token in (choice.get("logprobs") or {}).get("content") or ()]


def run_mixed(
    cluster: ClusterProcess,
    asked: Sequence[Question],
    num_at_once: int,
    disturb: Callable[[], None] = lambda: None,
    salt: str = "",
) -> Outcome:
    """Asks all questions in order, `num_at_once` at a time, every other one as a stream. When a third is answered,
    `disturb` is called in a separate thread; its error is raised."""
    replies: list[Reply | None] = [None] * len(asked)
    is_time = threading.Event()
    num_answered = 0
    lock = threading.Lock()

    def answer(at: int) -> None:
        nonlocal num_answered
        try:
            replies[at] = ask(client, cluster.model, asked[at], at % 2 == 1, salt)
        except httpx.HTTPError as error:
            replies[at] = Reply(0, repr(error))
        with lock:
            num_answered += 1
            if num_answered * 3 >= len(asked):
                is_time.set()

    def disturb_in_time() -> None:
        is_time.wait()
        disturb()

    limits = httpx.Limits(max_connections=num_at_once)
    with (
        httpx.Client(base_url=cluster.url, timeout=TIMEOUT_S, limits=limits) as client,
        ThreadPoolExecutor(num_at_once) as clients,
        ThreadPoolExecutor(1) as beside,
    ):
        disturbed = beside.submit(disturb_in_time)
        list(clients.map(answer, range(len(asked))))
        disturbed.result()
    return Outcome(asked, [reply for reply in replies if reply is not None])


def assert_all_right(cluster: ClusterProcess, outcome: Outcome) -> None:
    """Asserts that every question is answered, and with the answer of an undisturbed cluster. The cluster's arenas must
    be too small for the features of all questions, so that most are missing when the questions are asked again in
    order."""
    assert outcome.failures == [], f"{len(outcome.failures)} of {len(outcome.questions)} failed"
    assert len(outcome.replies) == len(outcome.questions)
    assert len(outcome.unexpected) <= (1 - LEAST_RIGHT) * len(outcome.questions)
    num_media = sum(question.kind != "text" for question in outcome.questions)
    num_encoded = cluster.total(ITEMS_ENCODED)
    again = run_mixed(cluster, outcome.questions, NUM_AT_ONCE_AGAIN, salt="again")
    assert again.failures == []
    eventually(lambda: cluster.total(ITEMS_ENCODED) - num_encoded >= LEAST_ANEW * num_media, 20)
    for question, reply, other in zip(outcome.questions, outcome.replies, again.replies, strict=True):
        assert reply.text == other.text, f"{question.kind}: not what it says when it is quiet"
        assert len(reply.logprobs) == len(other.logprobs) > 0
        far = max(abs(one - two) for one, two in zip(reply.logprobs, other.logprobs, strict=True))
        assert far <= TOLERANCE, f"{question.kind}: {reply.text!r} was {far:g} more or less likely"


def kill_at_work(cluster: ClusterProcess, kind: str) -> str:
    """Sends SIGKILL to a member of the kind while it holds work, and returns its name. Raises AssertionError if none
    holds work within 60 s.

    A report is a little older than the state of its member, which may have ended its work since. So the member is
    first stopped: its reports arrive, and it ends nothing more. It is killed only if its last report says that it holds
    work that outlasts this delay (see `KIND_TO_LASTING_WORK`); otherwise it goes on."""
    name_to_pid = pids(cluster, kind)
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        for name, pid in name_to_pid.items():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(FROZEN_S)
            gauge = f'weft_{kind}_{KIND_TO_LASTING_WORK[kind]}{{{kind}="{name}"}}'
            is_at_work = cluster.metrics().get(gauge, 0) > 0
            os.kill(pid, signal.SIGKILL if is_at_work else signal.SIGCONT)
            if is_at_work:
                return name
    raise AssertionError(f"no {kind} was ever at work")
