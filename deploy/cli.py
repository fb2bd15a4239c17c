"""Implements the console script `weft`: reads the command line, runs the command, and turns errors into messages.

The commands are in `commands/`. The module knows nothing of what they do.
"""

from __future__ import annotations

import os
import select
import sys

from deploy.commands import build_parser
from deploy.process_setup import set_switches
from fabric.contracts import WeftError


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
    words = sys.argv[1:] if argv is None else argv
    arguments = build_parser().read(words)
    arguments.argv = words
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


if __name__ == "__main__":
    sys.exit(main())
