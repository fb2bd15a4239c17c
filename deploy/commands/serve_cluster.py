"""Implements `weft serve`: starts a cluster on this machine, on Ray or in one process, and serves until a signal asks
for the end.

The command runs twice: first as the supervisor, which starts the same command again with `--supervised` as the server
(`deploy/supervisor.py` says why). The module knows nothing of how a cluster is built.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from deploy.commands.start_progress import StartProgress
from deploy.config import ClusterConfig
from deploy.config_file import flaws_of, load_config
from deploy.logs import configure_logs, where_logs_are, with_run_folder
from deploy.process_setup import freeze_what_lives, new_event_loop
from deploy.start_phases import LoadedBytes, StartBoard, start_state
from deploy.supervisor import FOLDER_PREFIX, Lifeline, supervise
from fabric.contracts import ConfigError

STOP_S = 30.0
"""Every process must have ended this many seconds after the end of the drain; the supervisor kills those that have
not."""


def serve(arguments: argparse.Namespace) -> int:
    """Runs a cluster until it is interrupted: as the supervisor of a server, or as that server."""
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
        has_speech=arguments.speech,
    )
    if arguments.in_process and any(each.engine == "vllm" for each in config.all_workers):
        raise ConfigError("workers with vLLM have an environment of their own, so serve without --in-process")
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
    progress = StartProgress(sys.stdout)
    with contextlib.ExitStack() as running:
        try:
            folder = Path(tempfile.gettempdir())
            cluster = running.enter_context(run_cluster(config, temp_dir=folder, show=progress.show))
        finally:
            progress.close()
        lifeline.tell_ready()
        print(banner(cluster.url, cluster.model_name, config.access.console), flush=True)
        if cluster.hint:
            print(f"weft: {cluster.hint}", flush=True)
        lifeline.wait()
        _say_stopping(config)
        if lifeline.is_cut:
            cluster.drain(0.0)


async def _serve_in_process(config: ClusterConfig, lifeline: Lifeline) -> None:
    from deploy.local import serving

    print(f"weft: the cluster is starting in one process; {where_logs_are(config.logging)} ...", flush=True)
    progress, board = StartProgress(sys.stdout), StartBoard()
    wanted = {"worker": config.first_workers, "encoder": config.encoders.first_replicas}
    wanted |= {"stage": config.num_stage_replicas}

    def tell(kind: str, name: str, phase: str, loaded: LoadedBytes = LoadedBytes(), /) -> None:  # noqa: B008
        board.tell(kind, name, phase, loaded)
        progress.show(start_state(wanted, (), board.told()))

    async with contextlib.AsyncExitStack() as running:
        try:
            cluster, port = await running.enter_async_context(serving(config, tell))
        finally:
            progress.close()
        freeze_what_lives()
        lifeline.tell_ready()
        scheme = "http" if config.server.tls_cert_file is None else "https"
        print(banner(f"{scheme}://{config.server.host}:{port}", cluster.model.name, config.access.console), flush=True)
        await asyncio.to_thread(lifeline.wait)
        _say_stopping(config)
        if lifeline.is_cut:
            await cluster.router.stop()


def _say_stopping(config: ClusterConfig) -> None:
    limit = f"for at most {config.server.drain_s:g} s"
    print(f"weft: the cluster finishes its requests {limit}; a second signal ends it at once ...", flush=True)


def apply_overrides(
    config: ClusterConfig, key_to_value: Mapping[tuple[str, str], object], has_speech: bool = False
) -> ClusterConfig:
    """Returns the config with the values of the command line (all that are not None) in place of its own. With
    `has_speech`, it has stages that speak. Validates the result again. Raises ConfigError if a value is wrong."""
    data = config.model_dump(by_alias=True)
    if has_speech and config.stages is None:
        data["stages"] = {}
    for (section, key), value in key_to_value.items():
        if value is not None:
            data[section][key] = value
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(flaws_of(error))) from error


def banner(url: str, model_name: str, has_console: bool = True) -> str:
    """Returns the text that a user sees when the cluster is ready: its URL, one command to try, and the address of the
    console if it is on."""
    body = f'{{"model": "{model_name}", "max_tokens": 32, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    page = f"\n  In a browser: {url}/console\n" if has_console else ""
    return (
        f"weft: the cluster is ready at {url} (model {model_name})\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{body}'\n"
        f"{page}"
    )
