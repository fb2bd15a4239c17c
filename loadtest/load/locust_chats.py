"""Is the user of locust that sends the chats of a scenario, and what locust reports of them.

With `--rate`, requests arrive at their own moments, however long earlier ones take (an open loop): each user is a
source of random arrivals with its share of the rate, in however many processes locust runs. Without it, each user
sends one request after the other (a closed loop). Locust's own tables show the whole answer (`chat`), the time to first
token (`TTFT`) and the mean time of a further token (`TPOT`) for each kind of request. Processes send their samples to
the one that reports; it writes a page with plots, and prints a table.

Locust replaces Python's blocking calls by gevent's when it starts, so requests are sent by `requests`, with a greenlet
for each that is open. The module knows nothing of what is in a request.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gevent
import msgspec
import requests
from gevent.event import Event
from gevent.pool import Group
from locust import User, constant, events
from locust.env import Environment
from locust.runners import WORKER_REPORT_INTERVAL, MasterRunner, WorkerRunner
from requests.adapters import HTTPAdapter

from fabric.contracts import ConfigError
from loadtest.bench_result import commit, machine, render_table
from loadtest.load.chat_content import LoadChat, content_for
from loadtest.load.load_samples import LoadSample, kind_rows, load_page, summary_json
from loadtest.load.member_series import SeriesWatch
from loadtest.load.scenarios import SCENARIOS, scenario_requests
from loadtest.load.timed_answer import AnswerTimes, TimedAnswer, refusal
from loadtest.simulator import SimRequest

logger = logging.getLogger(__name__)
MOST_CONNECTIONS = 4096
ANSWER_S = 600.0
"""An answer may take this long in all; then it counts as failed."""
STOP_S = 120.0
"""Locust waits this long for open requests when a test ends, unless `--stop-timeout` says otherwise."""
WATCH_S = 2.0
"""The cluster's `/metrics` is read this often."""
IDLE_S = 0.1
END, ENDED = "weft_end", "weft_ended"
"""With these messages, the process that reports tells the others that the test ends, and they answer when none of their
requests is open. Locust itself waits half a second for the last numbers."""


def add_load_options(parser: Any) -> None:
    """Adds the options of a load test to locust's own."""
    group = parser.add_argument_group("weft")
    group.add_argument("--scenario", choices=sorted(SCENARIOS), default="mixed", help="Names the mix of requests")
    group.add_argument(
        "--rate", type=float, default=0.0, help="Requests per second of all users together; 0: one after the other"
    )
    group.add_argument(
        "--content",
        choices=["auto", "drawn", "sized"],
        default="auto",
        help="Draws questions with known answers for the demo model, or makes words and media of a given size",
    )
    group.add_argument("--prompt-words", type=float, help="Mean number of words of a prompt (content: sized)")
    group.add_argument("--output-tokens", type=float, help="Mean number of tokens of an answer (content: sized)")
    group.add_argument("--seed", type=int, default=1, help="Seeds the random numbers")
    group.add_argument("--model", default="", help="Names the model; by default the first that the cluster lists")
    group.add_argument("--api-key-file", default="", help="Names a file with the API key, if the cluster asks for one")
    group.add_argument("--load-report", default="", help="Writes a page with plots, and a JSON file, to this folder")
    group.add_argument(
        "--least-right", type=float, default=0.0, help="Fails if a smaller share of the known answers is right"
    )


def options_of(environment: Environment) -> Any:
    """Returns the parsed options of the command line, which locust sends to its other processes."""
    return environment.parsed_options


class ChatUser(User):
    """Sends the requests of the scenario. It needs `--host`."""

    wait_time = constant(0)
    _num_made = 0

    def on_start(self) -> None:
        options = options_of(self.environment)
        base, self._headers = str(self.host).rstrip("/"), key_headers(options.api_key_file)
        self._url = f"{base}/v1/chat/completions"
        model = options.model or first_model(base, options.api_key_file)
        self._content = content_for(options.content, model)
        self._session = requests.Session()
        self._session.mount(base, HTTPAdapter(pool_connections=1, pool_maxsize=MOST_CONNECTIONS))
        self._is_open_loop = options.rate > 0
        self._requests = self._requests_of(options)
        self._begun_s = time.perf_counter()
        self._open = Group()
        self._session_to_turn: dict[int, Event] = {}

    def _requests_of(self, options: Any) -> Iterator[SimRequest]:
        """Returns this user's requests. No other user of the test, in any process, has the same ones."""
        place = getattr(self.environment.runner, "worker_index", 0)
        sender = f"{place}/{ChatUser._num_made}"
        ChatUser._num_made += 1
        changed = {"mean_prompt": options.prompt_words, "mean_output": options.output_tokens}
        spec = SCENARIOS[options.scenario].spec(options.rate or 1.0, **changed)
        return scenario_requests(spec, options.seed, options.num_users or 1, sender)

    def send_next(self) -> None:
        run = load_of(self.environment)
        if run.is_over:
            gevent.sleep(IDLE_S)
            return
        request = next(self._requests)
        earlier = self._session_to_turn.get(request.session)
        if self._is_open_loop:
            # The chat is written ahead of its moment, unless it has to contain an answer that is not there yet.
            chat = self._content.chat(request) if earlier is None else None
            due_s = self._begun_s + request.arrival_s
            self._session_to_turn[request.session] = over = Event()
            gevent.sleep(max(0.0, due_s - time.perf_counter()))
            if load_of(self.environment).is_over:  # The test may have ended meanwhile.
                return
            self._open.spawn(self._ask_after, earlier, over, request, chat, due_s)
            return
        self._session_to_turn[request.session] = over = Event()
        self._ask_after(earlier, over, request, None, None)

    tasks = [send_next]  # noqa: RUF012 -- locust declares it as an attribute of each user

    def on_stop(self) -> None:
        self._open.join(timeout=self.environment.stop_timeout)
        self._session.close()

    def _ask_after(
        self, earlier: Event | None, over: Event, request: SimRequest, chat: LoadChat | None, due_s: float | None
    ) -> None:
        """Sends the request when the earlier turn of its conversation is over."""
        run = load_of(self.environment)
        run.num_open += 1
        try:
            if earlier is not None:
                earlier.wait(ANSWER_S)
                due_s = None  # A turn that waits for an answer is not late.
            chat = chat or self._content.chat(request)
            self._ask(request, chat, due_s)
        finally:
            run.num_open -= 1
            over.set()
            if self._session_to_turn.get(request.session) is over:
                del self._session_to_turn[request.session]

    def _ask(self, request: SimRequest, chat: LoadChat, due_s: float | None) -> None:
        data = msgspec.json.encode(chat.body)
        epoch_s, sent_s = time.time(), time.perf_counter()
        times, num_bytes = self._stream(data, sent_s)
        if not times.error:
            self._content.answered(request, times.text)
        is_right = None if chat.right_answer is None or times.error else times.text.strip() == chat.right_answer
        sample = LoadSample(
            kind=chat.kind,
            sent_s=epoch_s,
            late_s=0.0 if due_s is None else max(sent_s - due_s, 0.0),
            ttft_s=times.ttft_s,
            tpot_s=times.tpot_s,
            total_s=times.total_s,
            num_prompt=times.num_prompt,
            num_output=times.num_output,
            error=times.error,
            is_right=is_right,
        )
        load_of(self.environment).samples.append(sample)
        self._tell_locust(sample, num_bytes)

    def _stream(self, data: bytes, sent_s: float) -> tuple[AnswerTimes, int]:
        """Sends a body and reads its answer. Returns its times and its size in bytes. Raises nothing: what goes wrong
        with the connection is the error of the answer."""
        stream, num_bytes = TimedAnswer(sent_s), 0
        headers = {"content-type": "application/json", "accept-encoding": "identity", **self._headers}
        try:
            with self._session.post(self._url, data=data, headers=headers, stream=True, timeout=ANSWER_S) as answer:
                if answer.status_code != 200:
                    failed = stream.end(time.perf_counter())
                    return failed._replace(error=refusal(answer.status_code, answer.content)), len(answer.content)
                for chunk in answer.iter_content(chunk_size=None):
                    stream.feed(chunk, time.perf_counter())
                    num_bytes += len(chunk)
        except requests.RequestException as error:
            return stream.end(time.perf_counter())._replace(error=type(error).__name__), num_bytes
        return stream.end(time.perf_counter()), num_bytes

    def _tell_locust(self, sample: LoadSample, num_bytes: int) -> None:
        exception = AnswerFailed(sample.error) if sample.error else None
        whole: dict[str, Any] = {
            "exception": exception,
            "context": {},
            "start_time": sample.sent_s,
            "url": self._url,
            "response": None,
        }
        fire = self.environment.events.request.fire
        fire(
            request_type="chat",
            name=sample.kind,
            response_time=1e3 * sample.total_s,
            response_length=num_bytes,
            **whole,
        )
        if exception is None:
            fire(request_type="TTFT", name=sample.kind, response_time=1e3 * sample.ttft_s, response_length=0, **whole)
            if sample.num_output > 1:
                fire(
                    request_type="TPOT", name=sample.kind, response_time=1e3 * sample.tpot_s, response_length=0, **whole
                )


class AnswerFailed(Exception):
    """Says in locust's table of failures why an answer failed."""


@cache
def key_headers(path: str) -> dict[str, str]:
    """Returns the header with the API key in this file. Raises ConfigError if the file can't be read."""
    if not path:
        return {}
    try:
        key = Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"the file of the API key {path} can't be read: {error.strerror}") from error
    return {"authorization": f"Bearer {key}"}


@cache
def first_model(base: str, key_file: str) -> str:
    """Returns the model that the cluster lists first. Raises ConfigError if it lists none."""
    try:
        answer = requests.get(f"{base}/v1/models", headers=key_headers(key_file), timeout=30)
    except requests.RequestException as error:
        raise ConfigError(f"the cluster at {base} does not answer: {reason_of(error)}") from error
    if answer.status_code != 200:
        raise ConfigError(f"{base}/v1/models answers {refusal(answer.status_code, answer.content)}")
    return str(answer.json()["data"][0]["id"])


def reason_of(error: BaseException) -> str:
    """Returns what the error at the end of a chain of causes says, which names the reason in fewest words."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error) or type(error).__name__


# ------------------------------------------------------------ from processes to the report


class LoadRun:
    """Holds the samples of a process and, in the one that reports, how busy the cluster was."""

    def __init__(self) -> None:
        self.samples: list[LoadSample] = []
        self.num_open = 0
        """Counts the requests without a whole answer."""
        self.is_over = False
        """Says that no request is to be sent any more."""
        self.num_ended = 0
        """Counts the other processes whose part of the test has ended."""
        self.watch = SeriesWatch()
        self.watching: Any = None

    def end(self, limit_s: float) -> None:
        """Sends no request any more, and waits for those that are open."""
        self.is_over = True
        with gevent.Timeout(limit_s, False):
            while self.num_open:
                gevent.sleep(IDLE_S)

    def take_out(self) -> Any:
        """Returns the samples that were not yet sent to the process that reports."""
        samples, self.samples = self.samples, []
        return msgspec.to_builtins(samples)


_RUNS: dict[int, LoadRun] = {}


def load_of(environment: Environment) -> LoadRun:
    """Returns the run of this environment; a process of locust has one environment."""
    return _RUNS.setdefault(id(environment), LoadRun())


def prepare(environment: Environment, **_: Any) -> None:
    """Makes locust wait for open requests at the end of a test, so that none is cut and lost for the numbers. Without
    locust's page, where a host may be named later, it checks first that the cluster answers, and exits if not."""
    environment.stop_timeout = environment.stop_timeout or STOP_S
    options, runner = options_of(environment), environment.runner
    if isinstance(runner, WorkerRunner):
        runner.register_message(END, end_part, concurrent=True)
    elif isinstance(runner, MasterRunner):
        runner.register_message(ENDED, part_has_ended, concurrent=True)
    if options.headless and not isinstance(runner, WorkerRunner):
        try:
            if not environment.host:
                raise ConfigError("name the cluster with --host, for example http://127.0.0.1:8000")
            first_model(str(environment.host).rstrip("/"), options.api_key_file)
        except ConfigError as error:
            sys.exit(f"locust: {error.message}")


def send_samples(client_id: str, data: dict[str, Any]) -> None:
    """Puts the samples since the last report of this process into its next one."""
    for run in _RUNS.values():
        data["weft_samples"] = run.take_out()


def take_samples(client_id: str, data: dict[str, Any]) -> None:
    """Takes the samples of another process."""
    for run in _RUNS.values():
        run.samples += msgspec.convert(data.get("weft_samples", []), list[LoadSample])


def end_part(environment: Environment, msg: Any, **_: Any) -> None:
    """Ends the part of the test that this process runs, and sends the samples that are left."""
    run = load_of(environment)
    run.end(environment.stop_timeout)
    assert environment.runner is not None
    gevent.sleep(WORKER_REPORT_INTERVAL + IDLE_S)  # Locust's own numbers of the last requests go with its next report.
    environment.runner.send_message(ENDED, {"weft_samples": run.take_out()})


def part_has_ended(environment: Environment, msg: Any, **_: Any) -> None:
    take_samples(msg.node_id, msg.data)
    load_of(environment).num_ended += 1


def end_test(environment: Environment, **_: Any) -> None:
    """Waits until no request is open, in any process, before locust stops its users."""
    runner, run = environment.runner, load_of(environment)
    if isinstance(runner, MasterRunner):
        runner.send_message(END)
        with gevent.Timeout(environment.stop_timeout, False):
            while run.num_ended < runner.worker_count:
                gevent.sleep(IDLE_S)
    elif not isinstance(runner, WorkerRunner):
        run.end(environment.stop_timeout)


def begin_test(environment: Environment, **_: Any) -> None:
    """Forgets the samples of an earlier test and begins to watch the cluster."""
    run = load_of(environment)
    run.samples, run.is_over, run.num_ended = [], False, 0
    if not isinstance(environment.runner, WorkerRunner):
        run.watch = SeriesWatch()
        run.watching = gevent.spawn(watch_cluster, environment, run.watch)


def watch_cluster(environment: Environment, watch: SeriesWatch) -> None:
    """Reads the cluster's metrics until it is killed. A cluster that refuses is asked no more."""
    options = options_of(environment)
    base, headers = str(environment.host).rstrip("/"), key_headers(options.api_key_file)
    while True:
        try:
            answer = requests.get(f"{base}/metrics", headers=headers, timeout=30)
        except requests.RequestException:  # The requests of the users say what is wrong.
            gevent.sleep(WATCH_S)
            continue
        if answer.status_code != 200:
            logger.warning(
                "%s/metrics answers %d, so the report does not say how busy it was", base, answer.status_code
            )
            return
        watch.take(answer.text, time.time())
        gevent.sleep(WATCH_S)


def end_watching(environment: Environment, **_: Any) -> None:
    run = load_of(environment)
    if run.watching is not None:
        run.watching.kill()


def report_load(environment: Environment, **_: Any) -> None:
    """Prints the table, writes the page, and fails the run if too few of the known answers were right."""
    if isinstance(environment.runner, WorkerRunner):
        return
    options, run = options_of(environment), load_of(environment)
    print(f"\n{render_table(kind_rows(run.samples))}\n", flush=True)
    summary = summary_json(run.samples)
    if options.load_report:
        folder = Path(options.load_report)
        arrivals = f"{options.rate:g} requests/s" if options.rate else f"{options.num_users} users, one after the other"
        title = f"Load test: {options.scenario}, {arrivals}"
        source = f"{environment.host}, commit {commit()}, {machine()['cpu']}"
        page = load_page(folder, title, run.samples, run.watch.name_to_points, source)
        (folder / "summary.json").write_text(json.dumps({"title": title, "source": source, **summary}, indent=1) + "\n")
        print(f"the report is {page}", flush=True)
    right = summary["right_share"]
    if not run.samples:
        print("no request was sent", flush=True)
        environment.process_exit_code = 1
    elif right is not None and right < options.least_right:
        print(f"{right:.1%} of the known answers are right, which is less than {options.least_right:.1%}", flush=True)
        environment.process_exit_code = 1


def listen() -> None:
    """Registers what this module adds to locust."""
    events.init_command_line_parser.add_listener(add_load_options)
    events.init.add_listener(prepare)
    events.test_start.add_listener(begin_test)
    events.report_to_master.add_listener(send_samples)
    events.worker_report.add_listener(take_samples)
    events.test_stopping.add_listener(end_test)
    events.test_stop.add_listener(end_watching)
    events.quitting.add_listener(report_load)
