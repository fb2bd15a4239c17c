"""Says in which folders of the project a process spends its CPU time, by looking at its main thread now and then.

The kernel sends a signal after each millisecond of CPU time, or each tick of its own if that is longer. The sample
counts for the innermost function of the project that runs then, so that a folder has the time of the libraries that it
calls. Time of other threads counts for what the main thread does meanwhile. The module knows nothing of what is
measured.
"""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from types import FrameType

INTERVAL_S = 0.001
ROOT = Path(__file__).parents[3]
ELSEWHERE = "event loop and libraries"
"""Names samples during which no function of the project runs."""


class CpuSampler:
    """A `CpuSampler` counts samples of its process between `start` and `stop`. It takes the signal SIGPROF, and must be
    used in the main thread."""

    def __init__(self) -> None:
        self._folder_to_count: Counter[str] = Counter()
        self._code_to_folder: dict[str, str] = {}

    def start(self) -> None:
        self._folder_to_count.clear()
        signal.signal(signal.SIGPROF, self._count)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def stop(self) -> dict[str, int]:
        """Returns how often each folder was seen since `start`."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        return dict(self._folder_to_count)

    def _count(self, _: int, frame: FrameType | None) -> None:
        while frame is not None and not (folder := self._folder_of(frame.f_code.co_filename)):
            frame = frame.f_back
        self._folder_to_count[ELSEWHERE if frame is None else folder] += 1

    def _folder_of(self, file: str) -> str:
        """Returns the folder of a file below the project, with two names at most, or "" for a file of a library."""
        folder = self._code_to_folder.get(file)
        if folder is None:
            path = Path(file)
            is_ours = path.is_relative_to(ROOT) and "site-packages" not in path.parts
            folder = "/".join(path.relative_to(ROOT).parts[:-1][:2]) if is_ours else ""
            self._code_to_folder[file] = folder
        return folder
