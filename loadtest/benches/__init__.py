"""Runs benchmarks: `weft bench NAME`. Each prints a table, or with --json its bars and nothing else. Tests never
measure speed.

One module or folder runs each bench: `path_bench`, `engine_bench`, `encoder_bench`, `memory_bench`, `router_bench`,
`index_bench`, `cost_bench`, `figures_bench`, `scale`, `front_end` (HTTP), and `cluster_bench`, whose processes are in
`cluster_members` and `cluster_routers`. The folder `served` runs four benches of a whole cluster whose stages take
given times (overlap, prediction, isolation and serve), and one of clusters that speak (speech).
`engine_parts`, `engine_host` and `engine_pictures` measure parts of the engine bench; `encoder_towers`, `encoder_wait`,
`encoder_batching` and `encoder_attention` do so for the encoder bench. `chat_load` puts load on a worker or a server,
`synthetic` makes their models and media, and `peer_process` runs the alternatives to Weft, whose scripts are in
`peers`. `commit_comparison` runs one of the benches on two commits. `path_hosts` runs the path bench on several
hosts, which `namespaced_hosts` makes out of one machine.

The command line imports `run_benches` and the names (`BENCHES`), and a bench's own module is imported when it runs.
The folder knows nothing of how Weft is deployed beyond what `deploy` offers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from fabric.contracts import ConfigError
from loadtest.bench_result import BenchResult, publish

__all__ = ["BENCHES", "run_benches"]


def _take_no_options(name: str, options: Sequence[str]) -> None:
    """Parses the options of a bench that has none: it prints the help if asked to, and exits for any other option."""
    argparse.ArgumentParser(prog=f"weft bench {name}").parse_args(options)


def _path(options: Sequence[str]) -> BenchResult:
    parser = argparse.ArgumentParser(prog="weft bench path", allow_abbrev=False)
    parser.add_argument(
        "--hosts", type=int, choices=[1, 2], default=1, help="runs the cluster on two hosts too (network namespaces)"
    )
    if parser.parse_args(options).hosts == 2:
        from loadtest.benches.path_hosts import run_hosts

        return run_hosts()
    from loadtest.benches.path_bench import run

    return run()


def _engine(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.engine_bench import run

    return run(options)


def _encoder(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.encoder_bench import run

    return run(options)


def _memory(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.memory_bench import run

    return run(options)


def _scale(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.scale import run

    return run(options)


def _router(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.router_bench import run

    return run(options)


def _costs(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.cost_bench import run

    return run(options)


def _cluster(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.cluster_bench import run

    return run(options)


def _overlap(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.served import run_overlap

    return run_overlap(options)


def _prediction(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.served import run_prediction

    return run_prediction(options)


def _isolation(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.served import run_isolation

    return run_isolation(options)


def _serve(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.served import run_serve

    return run_serve(options)


def _speech(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.served import run_speech

    return run_speech(options)


def _figures(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.figures_bench import run

    _take_no_options("figures", options)
    return run()


def _index(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.index_bench import run

    return run(options)


def _http(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.front_end import run

    return run(options)


def _compare(options: Sequence[str]) -> BenchResult:
    from loadtest.benches.commit_comparison import run

    return run(options)


BENCHES: dict[str, Callable[[Sequence[str]], BenchResult]] = {
    "path": _path,
    "engine": _engine,
    "encoder": _encoder,
    "memory": _memory,
    "scale": _scale,
    "router": _router,
    "costs": _costs,
    "cluster": _cluster,
    "overlap": _overlap,
    "prediction": _prediction,
    "isolation": _isolation,
    "serve": _serve,
    "speech": _speech,
    "figures": _figures,
    "index": _index,
    "http": _http,
    "compare": _compare,
}


@contextmanager
def _standard_output_to_error() -> Iterator[None]:
    """Redirects standard output to standard error, for this process and for the processes that it starts, because the
    output of a bench or of its servers is for people."""
    sys.stdout.flush()
    kept = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, sys.stdout.fileno())
        os.close(kept)


def run_benches(name: str, *, as_json: bool, options: Sequence[str] = ()) -> int:
    """Runs one bench, or all but `compare` with their defaults. Returns 0 even when a bar is missed, because a miss is
    a result. Raises ConfigError for an unknown name."""
    if name == "list":
        print("\n".join(BENCHES))
        return 0
    chosen = [each for each in BENCHES if each != "compare"] if name == "all" else [name]
    for each in chosen:
        if each not in BENCHES:
            raise ConfigError(f"there is no benchmark {each!r}; the benchmarks are {', '.join(BENCHES)} and all")
        with _standard_output_to_error() if as_json else nullcontext():
            result = BENCHES[each](options)
        publish(each, result, as_json=as_json)
    return 0
