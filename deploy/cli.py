"""Implements the console script `weft` with its commands serve, check, key, bench, simulate, demo and
version."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from deploy.config import ClusterConfig
from deploy.config_file import check_config, load_config
from deploy.limit_table import check_files, limit_lines
from deploy.logs import configure_logs, where_logs_are, with_run_folder
from deploy.process_setup import freeze_what_lives, new_event_loop, set_switches
from deploy.sizing import budget_lines, check_budget
from deploy.supervisor import FOLDER_PREFIX, Lifeline, supervise
from fabric.contracts import ConfigError, WeftError
from loadtest.simulator import add_options, simulate
from router.run import NO_TENANT, new_key

VERSION = "0.1.0"
STOP_S = 30.0
"""Every process must have ended this many seconds after the end of the drain; the supervisor kills those that have
not."""


def main(argv: list[str] | None = None) -> int:
    """Runs the console script. Returns the exit status: 0, 1 for a failure, 130 for an interrupt, or the status of the
    command. For wrong usage, argparse exits with status 2. If whatever reads the output has ended, as `head` does, the
    command ends too, with status 1 and without a traceback."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # Here an error can be handled; when Python exits, it can't.
    except BrokenPipeError:
        if not _drop_output():
            raise
        return 1


def _run(argv: list[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    arguments.argv = sys.argv[1:] if argv is None else argv
    set_switches()
    try:
        return int(arguments.run(arguments))
    except WeftError as error:
        print(f"weft: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _drop_output() -> bool:
    """Returns whether nothing reads the output any more. If so, what is left of it is dropped when Python exits."""
    output, reading = sys.stdout.fileno(), select.poll()
    reading.register(output, 0)
    if not any(state & (select.POLLERR | select.POLLHUP) for _, state in reading.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft", description="Serves multimodal models, with encoders on devices of their own."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    _add_serve(commands)
    check = commands.add_parser(
        "check",
        help="checks a config file: names every problem with its line and key, and prints the memory of each process",
    )
    check.add_argument("file", type=Path, help="is the YAML file to check")
    check.set_defaults(run=_check)

    key = commands.add_parser("key", help="makes API keys for the file that access.keys_file names")
    new_key = key.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "new", help="prints a new random key to standard error, once, and its line for the file to standard output"
    )
    new_key.add_argument("tenant", nargs="?", default=NO_TENANT, help="names the tenant of the key, as in the config")
    new_key.add_argument("--name", help="names the key in metrics (default: a part of its digest)")
    new_key.add_argument("--operator", action="store_true", help="lets the key read /metrics and /weft")
    new_key.set_defaults(run=_new_key)

    bench = commands.add_parser("bench", help="runs a benchmark")
    bench.add_argument("name", help="names the benchmark; 'all' runs every one, and 'list' lists them")
    bench.add_argument(
        "--json", action="store_true", help="prints only the bars, as JSON; the table goes to standard error"
    )
    bench.add_argument(
        "options", nargs=argparse.REMAINDER, help="are passed to the benchmark; `weft bench NAME --help` lists them"
    )
    bench.set_defaults(run=_bench)

    simulation = commands.add_parser("simulate", help="simulates a cluster on a virtual clock")
    add_options(simulation)
    simulation.set_defaults(run=simulate)

    demo = commands.add_parser("demo", help="asks a running cluster ten questions about media that it draws")
    demo.add_argument("--url", default="http://127.0.0.1:8000", help="is the URL of the cluster")
    demo.add_argument("--api-key-file", type=Path, help="names a file with the API key, if the cluster asks for one")
    demo.add_argument("--seed", type=int, default=0, help="seeds the random numbers; other seeds draw other media")
    demo.set_defaults(run=_demo)

    version = commands.add_parser("version", help="prints the version")
    version.set_defaults(run=_version)
    return parser


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser("serve", help="starts a cluster on this machine and serves until it is interrupted")
    serve.add_argument(
        "--config", type=Path, help="reads the config from this YAML file (default: deploy/configs/laptop.yaml)"
    )
    serve.add_argument(
        "--model", type=Path, help="serves the transformers model in this directory (default: the demo model)"
    )
    serve.add_argument("--host", help="listens on this address")
    serve.add_argument("--port", type=int, help="listens on this port; 0 picks a free one")
    serve.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], help="logs lines from this level on"
    )
    serve.add_argument(
        "--log-format", choices=["text", "json"], help="writes log lines for people (text) or for machines (json)"
    )
    serve.add_argument(
        "--log-to",
        choices=["files", "terminal"],
        help="writes one log file for each process, or all lines to this terminal",
    )
    serve.add_argument("--log-dir", type=Path, help="makes the folder for the log files of this run here")
    serve.add_argument("--in-process", action="store_true", help="runs the whole cluster in one process, without Ray")
    # The supervisor passes this option to the server that it starts.
    serve.add_argument("--supervised", type=int, help=argparse.SUPPRESS)
    # The supervisor runs this command after a server that was killed or failed.
    serve.add_argument("--remove-left", action="store_true", help=argparse.SUPPRESS)
    serve.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    config = apply_overrides(
        load_config(arguments.config),
        {
            ("model", "path"): arguments.model,
            ("server", "host"): arguments.host,
            ("server", "port"): arguments.port,
            ("logging", "level"): arguments.log_level,
            ("logging", "format"): arguments.log_format,
            ("logging", "to"): arguments.log_to,
            ("logging", "dir"): arguments.log_dir,
        },
    )
    if arguments.remove_left:
        from deploy.ray.runtime import remove_left

        remove_left(config)
        return 0
    if arguments.supervised is None:
        # With -P, Python imports nothing from the current directory.
        command = [sys.executable, "-P", "-m", "deploy.cli", *arguments.argv]
        is_joined = config.ray.address is not None and not arguments.in_process
        clean_up = [*command, "--remove-left"] if is_joined else []
        return supervise([*command, "--supervised"], config.server.drain_s + STOP_S, clean_up)
    config = with_run_folder(config)
    configure_logs(config.logging, "serve", terminal_level=logging.WARNING)
    lifeline = Lifeline(arguments.supervised)
    # Some service managers signal every process of a service. The handler calls `stop` in a thread because `stop` takes
    # a lock that `wait` may hold in the main thread, where handlers run.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=lifeline.stop).start())
    try:
        if arguments.in_process:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(_serve_in_process(config, lifeline))
        else:
            _serve_on_ray(config, lifeline)
    finally:
        folder = Path(os.environ.get("TMPDIR", ""))
        # The supervisor made this folder for this process.
        if lifeline.is_cut and folder.name.startswith(FOLDER_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _serve_on_ray(config: ClusterConfig, lifeline: Lifeline) -> None:
    from deploy.ray.runtime import run_cluster

    print(f"weft: the cluster is starting; {where_logs_are(config.logging)} ...", flush=True)
    with run_cluster(config, temp_dir=Path(tempfile.gettempdir())) as cluster:
        lifeline.tell_ready()
        print(banner(cluster.url, cluster.model_name), flush=True)
        lifeline.wait()
        _say_stopping(config)
        if lifeline.is_cut:
            cluster.drain(0.0)


async def _serve_in_process(config: ClusterConfig, lifeline: Lifeline) -> None:
    from deploy.local import serving

    print(f"weft: the cluster is starting in one process; {where_logs_are(config.logging)} ...", flush=True)
    async with serving(config) as (cluster, port):
        freeze_what_lives()
        lifeline.tell_ready()
        scheme = "http" if config.server.tls_cert_file is None else "https"
        print(banner(f"{scheme}://{config.server.host}:{port}", cluster.model.name), flush=True)
        await asyncio.to_thread(lifeline.wait)
        _say_stopping(config)
        if lifeline.is_cut:
            await cluster.router.stop()


def _say_stopping(config: ClusterConfig) -> None:
    limit = f"for at most {config.server.drain_s:g} s"
    print(f"weft: the cluster finishes its requests {limit}; a second signal ends it at once ...", flush=True)


def apply_overrides(config: ClusterConfig, key_to_value: Mapping[tuple[str, str], object]) -> ClusterConfig:
    """Returns the config with the values of the command line (all that are not None) in place of its own. Validates the
    result again."""
    data = config.model_dump()
    for (section, key), value in key_to_value.items():
        if value is not None:
            data[section][key] = value
    return ClusterConfig.model_validate(data)


def banner(url: str, model_name: str) -> str:
    """Returns the text that a user sees when the cluster is ready: the URL of the cluster and one command to try."""
    body = f'{{"model": "{model_name}", "max_tokens": 32, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return (
        f"weft: the cluster is ready at {url} (model {model_name})\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{body}'\n"
    )


def _check(arguments: argparse.Namespace) -> int:
    try:
        text = arguments.file.read_text()
    except OSError as error:
        print(f"weft: the config file {arguments.file} can't be read: {error.strerror}", file=sys.stderr)
        return 1
    config, problems = check_config(text)
    for problem in problems:
        print(f"{arguments.file}: {problem}", file=sys.stderr)
    if config is None:
        return 1
    parts = {"router": config.router.replicas, "encoder": config.encoders.replicas, "worker": config.workers.replicas}
    print("\n".join(limit_lines(config)))
    held, flaws = check_files(config)
    for line in held:
        print(line)
    for flaw in flaws:
        print(f"{arguments.file}: {flaw}", file=sys.stderr)
    if flaws:
        return 1
    counts = ", ".join(f"{replicas} {name}" for name, replicas in parts.items())
    print(config.media.fetch.summary())
    budget, why_not = check_budget(config)
    if budget is None:
        print(f"{arguments.file}: the config is valid ({counts} replicas)")
        print(f"the memory is not computed, because the model can't be read: {why_not}")
        return 0
    print("\n".join(budget_lines(budget)))
    for shortfall in budget.problems:
        print(f"{arguments.file}: {shortfall}", file=sys.stderr)
    if not budget.problems:
        print(f"{arguments.file}: the config is valid ({counts} replicas)")
    return 1 if budget.problems else 0


def _new_key(arguments: argparse.Namespace) -> int:
    if arguments.tenant == NO_TENANT and not arguments.operator:
        print("weft: name the tenant of the key, or make a key of an operator with --operator", file=sys.stderr)
        return 2
    key, line = new_key(arguments.tenant, arguments.name, arguments.operator)
    print(f"weft: this is the key; it is shown only now, and can't be computed from its line\n{key}", file=sys.stderr)
    print(line, flush=True)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from loadtest.benches import run_benches

    options = [option for option in arguments.options if option != "--json"]
    # argparse puts a `--json` that follows the name into `options`.
    as_json = arguments.json or len(options) < len(arguments.options)
    return run_benches(arguments.name, as_json=as_json, options=options)


def _demo(arguments: argparse.Namespace) -> int:
    from deploy.demo.ask import run_demo

    key, path = None, arguments.api_key_file
    if path is not None:
        try:
            key = path.read_text().strip()
        except OSError as error:
            raise ConfigError(f"the file of the API key {path} can't be read: {error.strerror}") from error
    return run_demo(arguments.url, arguments.seed, key)


def _version(_: argparse.Namespace) -> int:
    print(f"weft {VERSION}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
