"""mutmut's command line, with time limits that reach the mutant they are meant for and nothing else.

mutmut 3.8 keeps the process number of each mutant until its time is over, and signals it then, also where the mutant
has long ended and another process has that number: clusters under test were ended so. A handle on a process (`pidfd`)
stays that process's own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from threading import Timer


def limit_time(pid: int, timeout_s: float) -> None:
    """Ends a child of this process by SIGXCPU when so much time has passed; harmless if it has ended by then."""
    handle = os.pidfd_open(pid)
    timer = Timer(timeout_s, out_of_time, (handle,))
    timer.daemon = True
    timer.start()


def out_of_time(handle: int) -> None:
    """Signals the process of a handle, if it is still there, and closes the handle."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGXCPU)
    os.close(handle)


def main() -> None:
    # As `python -m mutmut` would have it: mutmut imports what lies in the working directory, not beside this file.
    sys.path[0] = os.getcwd()
    from mutmut.__main__ import cli
    from mutmut.workers import isolation

    assert isolation.register_timeout, "the function that mutmut's runner calls has another name"
    isolation.register_timeout = limit_time
    cli()


if __name__ == "__main__":
    main()
