"""Implements `weft completion SHELL`: prints a script with which a shell completes commands, options and files.

shtab makes the scripts from the parser. They are static, so that a Tab starts no Python: argcomplete, the alternative,
would run `weft` for each. A new version of Weft therefore needs the script again. The module knows nothing of what
the commands do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import shtab

from deploy.commands.command_line import SHELLS, WeftParser, build_parser

SHELL_TO_PLACE = {
    "bash": "~/.local/share/bash-completion/completions/weft",
    "zsh": "a folder of $fpath, as _weft",
    "fish": "~/.config/fish/completions/weft.fish",
}
MODALITIES = ("text", "image", "video", "audio")


def completion(arguments: argparse.Namespace) -> int:
    """Prints the script. On a terminal, a note says where it belongs."""
    assert set(SHELL_TO_PLACE) == set(SHELLS)
    print(script(arguments.shell))
    if sys.stdout.isatty():
        place = SHELL_TO_PLACE[arguments.shell]
        print(f"weft: write this to {place}: weft completion {arguments.shell} > FILE", file=sys.stderr)
    return 0


def script(shell: str) -> str:
    """Returns the script for a shell. The parser is one of its own, because shtab reads what is written to actions."""
    from loadtest.benches import BENCHES

    parser = build_parser()
    for path, action in all_actions(parser):
        if action.type is Path or action.dest in ("image", "video", "audio") or path == ("check",):
            is_folder = action.metavar == "DIR" or action.dest == "log_dir"
            action.complete = shtab.DIRECTORY if is_folder else shtab.FILE  # type: ignore[attr-defined]
        elif path == ("bench",) and action.dest == "name":
            action.choices = [*BENCHES, "all", "list"]
        elif action.dest == "modality":
            action.choices = MODALITIES
    return shtab.complete(parser, shell=shell)


def all_actions(parser: WeftParser, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], argparse.Action]]:
    """Yields the options and arguments of each command after the words that name the command."""
    for action in parser._actions:
        yield path, action
    for name, command in parser.commands().items():
        yield from all_actions(command, (*path, name))
