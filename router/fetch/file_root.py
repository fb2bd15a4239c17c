"""Opens files under the one folder that `file:` URLs may name.

Links are resolved first, and the result must lie in the folder. The file is then opened from the folder's own
descriptor, one name after the other, without following a link, so a name that is exchanged after the check leads
nowhere. What is not there, what lies outside and what is no regular file give the same error, which names no path.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from urllib.parse import unquote_to_bytes

from fabric.contracts import UrlRefused
from router.fetch.url_policy import FetchUrl

NOT_THERE = "the URL names no file that this server may read"


def open_under(root: Path | None, url: FetchUrl) -> int:
    """Returns a descriptor of the regular file that a `file:` URL names, which the caller closes. Raises UrlRefused."""
    if root is None:
        raise UrlRefused("this server reads no file: URLs")
    path = unquote_to_bytes(url.target)
    if b"\0" in path:
        raise UrlRefused(NOT_THERE)
    try:
        folder = os.path.realpath(os.fsencode(root))
        real = os.path.realpath(path)
        names = os.path.relpath(real, folder).split(b"/")
        if b".." in names:
            raise UrlRefused(NOT_THERE)
        return _open_step_by_step(folder, names)
    except (OSError, ValueError) as error:
        raise UrlRefused(NOT_THERE) from error


def _open_step_by_step(folder: bytes, names: list[bytes]) -> int:
    """Returns a descriptor of the file. Raises OSError if a name on the way is a link, or the file is not a regular
    one."""
    with contextlib.ExitStack() as opened:

        def step(name: bytes, flags: int, parent: int | None) -> int:
            file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, dir_fd=parent)
            opened.callback(os.close, file)
            return file

        at = step(folder, os.O_DIRECTORY, None)
        for name in names[:-1]:
            at = step(name, os.O_DIRECTORY, at)
        # Without O_NONBLOCK, opening a named pipe would wait for its writer.
        file = step(names[-1], os.O_NONBLOCK, at)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("is not a regular file")
        return os.dup(file)
