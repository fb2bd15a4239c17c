"""Runs jobs on a client's bytes in a process that may be killed.

A hostile or broken file may crash the code that reads it, hang it, or exhaust its memory. A `SandboxProcess` (in
`process`) confines such code to a spawned process of its own: the kernel limits its processor time and memory
(`limits`), a deadline limits its time by the clock, and it ends with its parent. `array_pipe` carries answers without
copying their arrays, and `message_values` reads them without running anything that they name. When the process dies,
`SandboxDied` says whether a job had begun and why the process ended, so that a file's own fault is told apart from a
fault of the machine. Both users, the prober (`modalities/probing.py`) and the decoder (`encoder_pool/decoder.py`), name
the function that the process runs. A process of another kind, such as the one that fetches media (`router/fetch/`),
uses the limits alone. The folder knows nothing of media, and it imports neither torch nor ray.
"""

from fabric.sandbox.limits import bind_to_parent, limit_memory
from fabric.sandbox.process import Death, JobLimits, NotStarted, RunJob, SandboxDied, SandboxProcess

__all__ = [
    "Death",
    "JobLimits",
    "NotStarted",
    "RunJob",
    "SandboxDied",
    "SandboxProcess",
    "bind_to_parent",
    "limit_memory",
]
