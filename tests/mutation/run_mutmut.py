"""Runs mutmut's command line with time limits that affect only the mutant that they are meant for.

mutmut 3.8 keeps the process number of each mutant until its time limit and then signals that number, even if the mutant
has ended and another process has the number: clusters under test were ended in this way. A handle on a process
(`pidfd`) always refers to the same process. This module knows nothing of samples or reports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from threading import Timer


def limit_time(pid: int, timeout_s: float) -> None:
    """Signals SIGXCPU to a child of this process after `timeout_s` seconds. It does nothing if the child has ended by
    then."""
    handle = os.pidfd_open(pid)
    timer = Timer(timeout_s, out_of_time, (handle,))
    timer.daemon = True
    timer.start()


def out_of_time(handle: int) -> None:
    """Signals the process of a handle, if it still exists, and closes the handle."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGXCPU)
    os.close(handle)


def main() -> None:
    # `python -m mutmut` does the same: mutmut imports from the working directory, not from the folder of this file.
    sys.path[0] = os.getcwd()
    from mutmut.__main__ import cli
    from mutmut.workers import isolation

    assert isolation.register_timeout, "the function that mutmut's runner calls has another name"
    isolation.register_timeout = limit_time
    cli()


if __name__ == "__main__":
    main()
