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

from deploy.commands.weft_parser import WeftParser

SHELL_TO_PLACE = {
    "bash": "~/.local/share/bash-completion/completions/weft",
    "zsh": "a folder of $fpath, as _weft",
    "fish": "~/.config/fish/completions/weft.fish",
}
MODALITIES = ("text", "image", "video", "audio")


def completion(shell: str, parser: WeftParser) -> int:
    """Prints the script for a shell. On a terminal, a note says where it belongs."""
    print(script(shell, parser))
    if sys.stdout.isatty():
        print(f"weft: write this to {SHELL_TO_PLACE[shell]}: weft completion {shell} > FILE", file=sys.stderr)
    return 0


def script(shell: str, parser: WeftParser) -> str:
    """Returns the script for a shell. Side effect: it writes to the actions of the parser what completes their values,
    because shtab reads it there."""
    from loadtest.benches import BENCHES

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
