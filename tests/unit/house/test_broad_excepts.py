"""Holds every place of the product that catches an error of any kind to a list, which says why the place may do so.

Such a handler stands at the loop of a process or thread, or at the top of a task of its own. It logs the error, with
the ids of the requests where it knows them, and it ends these requests; or it raises a typed error, which the caller
handles. Everywhere else a handler names the errors that it expects.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from textwrap import indent
from typing import NamedTuple

import pytest
from house import ROOT, source_files

REASONS = {
    "encoder_pool/decode_process.py:decode_item": "one job of the loop of a decode process",
    "encoder_pool/forward.py:fail_alone": "one batch of the loop of the forward thread",
    "encoder_pool/pipeline.py:Pipeline._decode": "the top of a job's task, for which calls wait",
    "fabric/transport/message_plane.py:deliver": "the loop of the message plane, one message at a time",
    "fabric/transport/pulling.py:PullingSink._run": "the loop of the transfer thread",
    "fabric/transport/zmq_plane.py:ZmqPlane._run": "the loop of the I/O thread",
    "llm_workers/engine.py:Engine._run": "the loop of the engine's thread",
    "llm_workers/engine.py:Engine._add": "one command of that loop: a request that can't be added must end alone",
    "llm_workers/engine.py:Engine._try": "one step of that loop: the request that spoils the step must end alone",
    "llm_workers/vllm_engine/core_engine.py:VllmEngine._is_opened": "the top of the engine's thread",
    "llm_workers/vllm_engine/core_engine.py:VllmEngine._run": "the loop of the engine's thread",
    "llm_workers/vllm_engine/core_engine.py:VllmEngine._load_adapters": "vLLM raises many classes; ours is raised",
    "llm_workers/vllm_engine/core_engine.py:VllmEngine._add": "one command of that loop, which must end alone",
    "llm_workers/features/receiver.py:Receiver._pulled": "a callback of the event loop; else readers would wait",
    "llm_workers/stages/chunk_adapter.py:ChunkTransferAdapter.save": "a pipeline's function; its request ends",
    "llm_workers/stages/stage_engine.py:StageEngine._run": "the loop of the engine's thread",
    "llm_workers/stages/stage_engine.py:StageEngine._try": "one call of the model in that loop",
    "llm_workers/stages/stage_service.py:StageService._apply": "a callback of the event loop; else calls would not end",
    "llm_workers/stages/transfer_adapter.py:TransferAdapter._receive_loop": "the loop of a receive thread",
    "llm_workers/stages/transfer_adapter.py:TransferAdapter._try": "one save of the loop of the save thread",
    "llm_workers/tensor_parallel/rank_group.py:RankGroup.step": "one step of that loop, on all ranks together",
    "llm_workers/tensor_parallel/rank_model.py:follow": "the loop of a rank process",
    "llm_workers/worker_service.py:WorkerService._apply": "a callback of the event loop; else calls would not end",
    "llm_workers/worker_service.py:WorkerService.generate": "the top of a call's task",
    "modalities/probing.py:_probe": "one job of the loop of a helper process",
    "modalities/registry.py:Registry._call_plugins": "a plugin is code of other people; the error names the plugin",
    "modalities/text/tokenizer_files.py:load_tokenizer": "the library `tokenizers` raises Exception itself",
    "router/edge/connection.py:AccessLog.__call__": "the top of an HTTP exchange; the error is raised again",
    "router/observe/span_export.py:SpanExport._spans_of": "one record in the loop of the thread that sends spans",
    "router/fetch/url_fetcher.py:UrlFetcher._run": "the top of a fetch's task, for which requests wait",
    "router/edge/app.py:HttpEdge._open_each": "the top of an answer's requests; the error is raised again",
    "router/run/request_run.py:RequestRun._run": "the top of a request's task",
    "router/run/request_run.py:RequestRun.on_frame": "one frame in the loop of the message plane",
    "router/run/speech_calls.py:SpeechCalls._ended": "the end of a call's task, which no one awaits",
    "router/service.py:RouterService.open": "the top of a request that has no task yet; the error is raised again",
}
"""Maps each place, as `path:function`, to the reason for which it catches every error."""
BROAD = {"Exception", "BaseException"}
LOGS = {"exception", "_break"}
"""Lists the calls that log the error which is being handled: `Logger.exception`, and `RequestRun._break`, which calls
it."""


class BroadHandler(NamedTuple):
    place: str
    """Holds `path:function`."""
    is_answered: bool
    """This is True if the handler logs the error or raises one."""


def broad_handlers(source: str, path: str) -> Iterator[BroadHandler]:
    """Yields the handlers of a module that catch every error, those of `contextlib.suppress` among them."""
    stack: list[tuple[ast.AST, str]] = [(ast.parse(source), "")]
    while stack:
        node, scope = stack.pop()
        place = f"{path}:{scope}"
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            scope = f"{scope}.{node.name}".removeprefix(".")
        if isinstance(node, ast.ExceptHandler) and (node.type is None or is_broad(node.type)):
            yield BroadHandler(place, is_answered(node))
        if isinstance(node, ast.Call) and name_of(node.func) == "suppress" and any(map(is_broad, node.args)):
            yield BroadHandler(place, is_answered=False)
        stack += [(child, scope) for child in ast.iter_child_nodes(node)]


def is_broad(caught: ast.expr) -> bool:
    each = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(name_of(one) in BROAD for one in each)


def is_answered(handler: ast.ExceptHandler) -> bool:
    inner = [node for statement in handler.body for node in ast.walk(statement)]
    return any(isinstance(one, ast.Raise) or (isinstance(one, ast.Call) and name_of(one.func) in LOGS) for one in inner)


def name_of(node: ast.expr) -> str:
    """Returns the last part of a dotted name, or an empty string."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@pytest.fixture(scope="module")
def found() -> list[BroadHandler]:
    return [each for path in source_files() for each in broad_handlers((ROOT / path).read_text(), str(path))]


def test_every_broad_handler_has_a_reason(found: list[BroadHandler]) -> None:
    assert Counter(each.place for each in found) == Counter(REASONS.keys())


def test_every_broad_handler_logs_or_raises(found: list[BroadHandler]) -> None:
    assert [each.place for each in found if not each.is_answered] == []


def test_every_broad_handler_has_a_comment_beside_it() -> None:
    """A reader of the handler learns the reason where it stands."""
    bare: list[str] = []
    for path in {place.partition(":")[0] for place in REASONS}:
        lines = (ROOT / path).read_text().splitlines()
        for number, line in enumerate(lines):
            is_handler = line.strip().startswith(("except Exception", "except (Exception"))
            if is_handler and "#" not in line and not lines[number + 1].strip().startswith("#"):
                bare.append(f"{path}:{number + 1}")
    assert bare == []


@pytest.mark.parametrize(
    ("handler", "is_answered"),
    [
        ("except Exception:\n    pass", False),
        ("except:\n    pass", False),
        ("except BaseException as error:\n    found.append(error)", False),
        ("except (OSError, builtins.Exception):\n    logger.warning('it failed')", False),
        ("except Exception:\n    logger.exception('it failed')", True),
        ("except Exception as error:\n    if error.args:\n        raise ConfigError('x') from error", True),
        ("except ValueError:\n    pass\nexcept Exception as error:\n    self._break(error)", True),
    ],
)
def test_broad_handlers_are_found(handler: str, is_answered: bool) -> None:
    body = indent(f"try:\n    g()\n{handler}\n", " " * 8)
    source = f"class A:\n    def f(self):\n{body}"
    assert list(broad_handlers(source, "a.py")) == [BroadHandler("a.py:A.f", is_answered)]


@pytest.mark.parametrize("suppress", ["suppress(Exception)", "contextlib.suppress(OSError, BaseException)"])
def test_suppressing_every_error_is_found(suppress: str) -> None:
    source = f"def f():\n with {suppress}:\n  g()\n"
    assert list(broad_handlers(source, "a.py")) == [BroadHandler("a.py:f", is_answered=False)]


def test_handlers_that_name_what_they_expect_are_not_found() -> None:
    handlers = "except (OSError, ExceptionGroup):\n    pass\nexcept errors.Broken:\n    pass\n"
    source = f"try:\n    g()\n{handlers}with suppress(OSError):\n    g()\n"
    assert list(broad_handlers(source, "a.py")) == []
