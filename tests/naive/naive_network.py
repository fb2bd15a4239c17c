"""Declares naive implementations of the cluster's own network and of serving connections."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

from naive_plugin import Guards
from naive_variant import naive

# ------------------------------------------------------------ the cluster's own network


@naive(
    "Bytes on a socket of the cluster run code.",
    "CVE-2025-32444",
    "fabric/contracts/messages.py",
    "unit/fabric/contracts/test_messages.py::test_a_pickle_runs_nothing",
    "assert",
)
def unpickles_messages(guards: Guards) -> None:
    """Reads messages of other members as pickles."""
    guards.replace("fabric.contracts.messages:decode_message", pickle.loads)


@naive(
    "A stranger sends messages to a worker.",
    "",
    "fabric/transport/zmq_plane.py",
    "contract/test_fabric_plane_access.py::test_nothing_of_a_stranger_comes_in[no keys]",
    "nobody turned the stranger away",
)
def trusts_the_network(guards: Guards) -> None:
    """Takes messages of everyone who reaches the port."""
    guards.replace("fabric.transport.zmq_plane:PlaneKeys.secure_receiver", lambda self, socket: None)
    guards.replace("test_fabric_plane_access:PATIENCE_MS", 1000)


@naive(
    "Ray's dashboard takes jobs from everybody who reaches it.",
    "CVE-2023-48022",
    "deploy/ray/runtime.py",
    "contract/test_own_ray.py::test_a_ray_of_its_own_has_no_dashboard_and_listens_on_the_loopback",
    "KeyError: 'include_dashboard'",
)
def starts_ray_as_it_is(guards: Guards) -> None:
    """Starts Ray with its defaults."""
    import ray

    @contextlib.contextmanager
    def started(*_: object) -> Iterator[None]:
        ray.init(address="local")
        yield

    guards.replace("deploy.ray.runtime:_ray", started)


# ------------------------------------------------------------ connections

HTTP = "contract/test_http_attacks.py::"


def serve_plainly(guards: Guards) -> None:
    """Serves HTTP with uvicorn's own protocol, and waits only shortly for what it does not do."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    def connection(*arguments: Any, guard: object, **options: Any) -> HttpToolsProtocol:
        return HttpToolsProtocol(*arguments, **options)

    guards.replace("deploy.http_server:GuardedProtocol", connection)
    guards.replace("test_http_attacks:PATIENCE_S", 2.0)


@naive(
    "A request has megabytes of headers.",
    "CVE-2025-48956",
    "deploy/http_protocol.py",
    f"{HTTP}test_floods_of_headers_are_refused_by_their_name[data7-431]",
    "assert",
)
def takes_all_headers(guards: Guards) -> None:
    """Keeps all headers of a request."""
    serve_plainly(guards)


@naive(
    "Headers come byte by byte (slow loris).",
    "",
    "deploy/http_protocol.py",
    f"{HTTP}test_a_client_that_does_not_finish_its_headers_is_disconnected[POST /v1/chat]",
    "TimeoutError",
)
def waits_for_headers(guards: Guards) -> None:
    """Waits for the headers of a request as long as they take."""
    serve_plainly(guards)


@naive(
    "A body comes byte by byte (slow loris).",
    "",
    "deploy/http_protocol.py",
    f"{HTTP}test_a_body_that_stops_is_ended_and_its_request_released",
    "TimeoutError",
)
def waits_for_bodies(guards: Guards) -> None:
    """Waits for the body of a request as long as it takes."""
    serve_plainly(guards)


@naive(
    "A body consists of chunks of one byte.",
    "",
    "deploy/http_protocol.py",
    f"{HTTP}test_abused_chunks_are_refused[tiny chunks]",
    "assert",
)
def takes_tiny_chunks(guards: Guards) -> None:
    """Reads chunks of any size."""
    serve_plainly(guards)


@naive(
    "Idle connections take all files of the process.",
    "",
    "deploy/http_protocol.py",
    f"{HTTP}test_connections_beyond_the_limit_make_the_oldest_silent_ones_go",
    "TimeoutError",
)
def keeps_every_connection(guards: Guards) -> None:
    """Keeps every connection until its client closes it."""
    guards.replace("deploy.http_protocol:ConnectionGuard.admit", lambda self, connection: True)
    guards.replace("test_http_attacks:PATIENCE_S", 2.0)


@naive(
    "A client asks for a long answer and does not read it.",
    "",
    "router/edge/paced_writer.py",
    "unit/router/test_paced_writer.py::test_a_write_that_waits_too_long_ends_the_stream",
    "assert not True",
)
def writes_without_backpressure(guards: Guards) -> None:
    """Writes the pieces of an answer as they come, and waits for no client."""

    @guards.method("router.edge.paced_writer:PacedWriter.write")
    async def write(self: Any, data: bytes, is_last: bool = False) -> None:
        sent = asyncio.ensure_future(self._send({"type": "http.response.body", "body": data, "more_body": not is_last}))
        await asyncio.sleep(0)
        self.unsent = [*getattr(self, "unsent", ()), sent]


WHOLE = "unit/router/test_whole_answers.py::"


@naive(
    "Many clients ask for large answers and take none of them.",
    "",
    "router/edge/whole_answer.py",
    f"{WHOLE}test_a_large_answer_is_in_flight_until_its_client_has_taken_it",
    "assert 0 == 1",
)
def forgets_what_it_answers(guards: Guards) -> None:
    """Counts a request until its answer is made, and hands the answer to the server as a whole."""
    from starlette.responses import Response

    def whole(self: Any, content: bytes, media_type: str, opened: Any) -> Response:
        return Response(content, media_type=media_type, headers=opened.headers)

    guards.replace("router.edge.app:HttpEdge._whole", whole)


@naive(
    "A client takes a large answer byte by byte.",
    "",
    "router/edge/paced_writer.py",
    f"{WHOLE}test_a_whole_answer_must_be_taken_at_a_least_rate[20-False]",
    "assert",
)
def waits_while_bytes_are_taken(guards: Guards) -> None:
    """Begins the time limit again whenever the client takes something."""
    init: Any = None

    def without_limit(self: Any, *arguments: Any) -> None:
        init(self, *arguments[:4])

    init = guards.replace("router.edge.paced_writer:PacedWriter.__init__", without_limit)


@naive(
    "Many clients leave a little of their answers with the server.",
    "",
    "deploy/http_protocol.py",
    "unit/deploy/test_connection_guard.py::test_the_connections_for_which_most_waits_are_closed_until_the_rest_fits",
    "assert",
)
def limits_each_connection_alone(guards: Guards) -> None:
    """Looks at what waits for each client, and not at the sum."""

    def check(self: Any, now: float) -> None:
        for connection in list(self.connections):
            connection.check(now)

    guards.replace("deploy.http_protocol:ConnectionGuard.check", check)
