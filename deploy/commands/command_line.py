"""Defines the commands of `weft` and their options.

Each command has a function here that imports its module and calls it, so that the parser alone costs little: reading
the command line imports neither the config nor any model.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from deploy.commands.weft_parser import WeftParser
from loadtest.simulator import add_options, simulate

VERSION = "0.1.0"
SHELLS = ("bash", "zsh", "fish")
DEFAULT_URL = "http://127.0.0.1:8000"


Commands = argparse._SubParsersAction


def build_parser() -> WeftParser:
    """Returns the parser of the whole command line. A parsed command has its function in `run`."""
    parser = WeftParser(prog="weft", description="Serves multimodal models, with encoders on devices of their own.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_node(commands)
    _add_checks(commands)
    _add_measurements(commands)
    _add_init(commands)
    _add_status(commands)
    _add_top(commands)
    _add_trace(commands)
    _add_chat(commands)
    demo = commands.add_parser("demo", help="asks a running cluster ten questions about media that it draws")
    _add_cluster_options(demo)
    demo.add_argument("--seed", type=int, default=0, help="seeds the random numbers; other seeds draw other media")
    demo.add_argument(
        "--speak",
        nargs="?",
        const="",
        metavar="FILE",
        help="has some questions answered in speech, and plays it, or writes it to this WAV file",
    )
    demo.set_defaults(run=_demo)
    completion = commands.add_parser(
        "completion", help="prints a script with which a shell completes the commands and options of weft"
    )
    completion.add_argument("shell", choices=SHELLS, help="names the shell")
    completion.set_defaults(run=_completion)
    version = commands.add_parser("version", help="prints the version")
    version.set_defaults(run=_version)
    return parser


def _add_serve(commands: Commands[WeftParser]) -> None:
    serve = commands.add_parser("serve", help="starts a cluster on this machine and serves until it is interrupted")
    serve.add_argument(
        "--config", type=Path, help="reads the config from this YAML file (default: deploy/configs/laptop.yaml)"
    )
    serve.add_argument(
        "--model", help="serves the transformers model in this directory, or at this URL (default: the demo model)"
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
    serve.add_argument("--speech", action="store_true", help="answers in speech too, if the model has a voice")
    serve.add_argument("--in-process", action="store_true", help="runs the whole cluster in one process, without Ray")
    # The supervisor passes this option to the server that it starts.
    serve.add_argument("--supervised", type=int, help=argparse.SUPPRESS)
    # The supervisor runs this command after a server that was killed or failed.
    serve.add_argument("--remove-left", action="store_true", help=argparse.SUPPRESS)
    serve.set_defaults(run=_serve)


def _add_node(commands: Commands[WeftParser]) -> None:
    node = commands.add_parser("node", help="makes this machine a node of a Ray, and removes models from it")
    actions = node.add_subparsers(required=True, metavar="COMMAND")
    clean = actions.add_parser("clean", help="lists the models that were downloaded, and removes those that may go")
    clean.add_argument("--config", type=Path, help="reads model.cache_dir from this YAML file")
    clean.add_argument("--cache-dir", type=Path, help="is the folder of the models, if no config says it")
    clean.add_argument("--max-bytes", metavar="SIZE", help="removes models until the others take at most this: 200GB")
    clean.add_argument("--unused-days", type=float, help="removes models that no process has opened for so many days")
    clean.add_argument("--dry-run", action="store_true", help="says what would be removed, and removes nothing")
    clean.set_defaults(run=_clean_node)
    start = actions.add_parser(
        "start", help="runs `ray start` with the switches, the token and the fixed ports that Weft needs"
    )
    role = start.add_mutually_exclusive_group(required=True)
    role.add_argument("--head", action="store_true", help="starts the first node, which the others join")
    role.add_argument("--address", metavar="HOST:PORT", help="joins the head at this address")
    start.add_argument("--config", type=Path, help="reads the network of the nodes from this YAML file")
    start.add_argument("--node-address", metavar="ADDRESS", help="is this node's own address")
    start.add_argument("--first-port", type=int, default=6379, help="is the first of ten ports (default: 6379)")
    start.add_argument("--num-gpus", type=int, help="is the number of GPUs (default: those that Ray finds)")
    start.add_argument("--resources", metavar="JSON", help="are custom resources, such as '{\"weft_worker\": 8}'")
    start.add_argument("--labels", metavar="NAME=VALUE,...", help="are labels of the node")
    start.add_argument("--token-file", type=Path, help="has Ray's token (default: ~/.ray/auth_token)")
    start.add_argument("--print", action="store_true", help="prints the command and its variables, and starts nothing")
    start.add_argument(
        "ray_options", nargs="*", metavar="-- OPTION", help="are further options of `ray start`, after a --"
    )
    start.set_defaults(run=_start_node)


def _add_checks(commands: Commands[WeftParser]) -> None:
    check = commands.add_parser(
        "check",
        help="checks a config file: names every problem with its line and key, and prints the memory of each process",
    )
    check.add_argument("file", type=Path, help="is the YAML file to check")
    check.add_argument(
        "--gpus",
        metavar="LIST",
        help="says which GPUs the cluster has, for example 8x80GB or 2xL40S (default: those here)",
    )
    check.set_defaults(run=_check)

    key = commands.add_parser("key", help="makes API keys for the file that access.keys_file names")
    new_key = key.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "new", help="prints a new random key to standard error, once, and its line for the file to standard output"
    )
    new_key.add_argument("tenant", nargs="?", help="names the tenant of the key, as in the config")
    new_key.add_argument("--name", help="names the key in metrics (default: a part of its digest)")
    new_key.add_argument("--operator", action="store_true", help="lets the key read /metrics and /weft")
    new_key.set_defaults(run=_new_key)


def _add_measurements(commands: Commands[WeftParser]) -> None:
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


def _add_status(commands: Commands[WeftParser]) -> None:
    status = commands.add_parser(
        "status", help="says whether a cluster is ready (exit status 0) or not (1), and what its members do"
    )
    _add_cluster_options(status)
    status.add_argument("--json", action="store_true", help="prints everything as JSON")
    status.add_argument(
        "--wait",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="waits until the cluster is ready, for this many seconds at most",
    )
    status.set_defaults(run=_status)


def _add_trace(commands: Commands[WeftParser]) -> None:
    trace = commands.add_parser(
        "trace", help="shows where the time of one request went: its parts, its timeline, and the router's choice"
    )
    which = trace.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "request", nargs="?", metavar="ID", help="is the id of the request, from x-weft-request-id or from its answer"
    )
    which.add_argument(
        "--last",
        nargs="?",
        type=int,
        const=True,
        default=False,
        metavar="SECONDS",
        help="shows the latest request; with a number, and --perfetto, takes all requests of the last seconds",
    )
    which.add_argument("--slowest", action="store_true", help="shows the one whose first token took longest")
    trace.add_argument("--modality", help="lets --last and --slowest choose among requests of this class")
    trace.add_argument("--outcome", help="lets them choose among requests that ended so, for example overloaded")
    form = trace.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="prints the whole record as JSON")
    form.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="writes the spans to this file, for Perfetto or chrome://tracing"
    )
    _add_cluster_options(trace)
    trace.set_defaults(run=_trace)


def _add_chat(commands: Commands[WeftParser]) -> None:
    chat = commands.add_parser("chat", help="talks with the model in the terminal, or asks it one question in a pipe")
    chat.add_argument("message", nargs="*", metavar="QUESTION", help="is asked; then the command ends")
    for modality, what in (("image", "a picture"), ("video", "a video"), ("audio", "a sound")):
        chat.add_argument(
            f"--{modality}", action="append", metavar="FILE", help=f"attaches {what}, a file or a URL, to the question"
        )
    chat.add_argument("--system", metavar="TEXT", help="tells the model how to answer")
    chat.add_argument("--model", metavar="NAME", help="asks for this model (default: the one that the cluster serves)")
    chat.add_argument("--temperature", type=float, help="sets how freely words are drawn; 0 takes the likeliest")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="ends each answer after this many tokens")
    chat.add_argument("--seed", type=int, help="seeds the random numbers of answers")
    _add_cluster_options(chat)
    chat.set_defaults(run=_chat)


def _add_init(commands: Commands[WeftParser]) -> None:
    init = commands.add_parser(
        "init", help="writes a config for the GPUs of this machine: how many encoders and workers, and how large"
    )
    which = init.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, metavar="DIR", help="is the transformers model that the cluster serves")
    which.add_argument("--demo", action="store_true", help="serves the demo model")
    init.add_argument(
        "--output",
        type=Path,
        default=Path("weft.yaml"),
        metavar="FILE",
        help="writes here (default: weft.yaml); - prints",
    )
    init.add_argument("--force", action="store_true", help="replaces a file that is there")
    init.add_argument(
        "--gpus", metavar="LIST", help="plans for these instead, for example 8x80GB, or for a machine with none"
    )
    init.set_defaults(run=_init)


def _add_top(commands: Commands[WeftParser]) -> None:
    top = commands.add_parser("top", help="shows rates, members and requests of a cluster, and goes on doing so")
    top.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="reads the cluster so often (default: 1)"
    )
    top.add_argument(
        "--window", type=_seconds, default=15.0, metavar="SECONDS", help="averages rates over so long (default: 15)"
    )
    _add_cluster_options(top)
    top.set_defaults(run=_top)


def _seconds(text: str) -> float:
    """Reads a time of zero or more seconds."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a time in seconds")
    return value


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every command that asks a running cluster."""
    group = parser.add_argument_group("cluster")
    group.add_argument("--url", default=DEFAULT_URL, help=f"is the URL of the cluster (default: {DEFAULT_URL})")
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="names a file with the API key, if the cluster asks for one"
    )
    group.add_argument(
        "--ca-file", type=Path, metavar="FILE", help="trusts the certificates of the authorities in this PEM file"
    )
    group.add_argument(
        "--client-cert-file",
        type=Path,
        metavar="FILE",
        help="shows the certificate in this PEM file, which has its key too, if the cluster asks for one",
    )


# ------------------------------------------------------------ what runs a command


def _serve(arguments: argparse.Namespace) -> int:
    from deploy.commands.serve_cluster import serve

    return serve(arguments)


def _start_node(arguments: argparse.Namespace) -> int:
    from deploy.commands.ray_node import start_node

    return start_node(arguments)


def _clean_node(arguments: argparse.Namespace) -> int:
    from deploy.commands.node_models import clean_node

    return clean_node(arguments, time.time())


def _check(arguments: argparse.Namespace) -> int:
    from deploy.commands.config_checks import check

    return check(arguments)


def _new_key(arguments: argparse.Namespace) -> int:
    from deploy.commands.config_checks import make_key

    return make_key(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    from loadtest.benches import run_benches

    options = [option for option in arguments.options if option != "--json"]
    # argparse puts a `--json` that follows the name into `options`.
    as_json = arguments.json or len(options) < len(arguments.options)
    return run_benches(arguments.name, as_json=as_json, options=options)


def _demo(arguments: argparse.Namespace) -> int:
    from deploy.commands.cluster_client import ClusterClient, ClusterOptions
    from deploy.demo.ask import run_demo
    from deploy.demo.hear import run_spoken_demo

    options = ClusterOptions.of(arguments)
    with ClusterClient(options) as client:
        client.model()  # It says what to do if the cluster can't be asked.
    if arguments.speak is not None:
        out = Path(arguments.speak) if arguments.speak else None
        return run_spoken_demo(options.url, arguments.seed, out, options.api_key, options.tls())
    return run_demo(options.url, arguments.seed, options.api_key, options.tls())


def _status(arguments: argparse.Namespace) -> int:
    from deploy.commands.cluster_status import status

    return status(arguments)


def _trace(arguments: argparse.Namespace) -> int:
    from deploy.commands.request_waterfall import trace

    return trace(arguments)


def _chat(arguments: argparse.Namespace) -> int:
    from deploy.commands.chat_session import chat

    return chat(arguments)


def _init(arguments: argparse.Namespace) -> int:
    from deploy.commands.config_writer import init

    return init(arguments)


def _top(arguments: argparse.Namespace) -> int:
    from deploy.commands.cluster_top import top

    return top(arguments)


def _completion(arguments: argparse.Namespace) -> int:
    from deploy.commands.shell_completion import completion

    return completion(arguments.shell, build_parser())


def _version(_: argparse.Namespace) -> int:
    print(f"weft {VERSION}")
    return 0
