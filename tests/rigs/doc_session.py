"""Runs the commands of a page of the documentation as a reader does: one block after the other, in one folder, with the
shell that the page assumes.

A `PageSession` is that folder. It has what a reader has before the first block: the repository's files, `weft` and the
other programs of the virtual environment in `.venv/bin`, a picture, a config and a git repository with a change. The
folder `loadtest` is a copy, because benches write their results into it. Three things differ from the page, so that a
run takes seconds:

- The cluster's address is that of the test's cluster, and not port 8000.
- A block that ends with `weft serve` starts the cluster of its config in one process, without Ray, on a free port. The
  blocks below it ask that cluster, until the page serves another one or ends.
- Durations and numbers of requests are smaller (`SHORTER`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import yaml
from cluster_process import ClusterProcess, start_cluster
from doc_blocks import ROOT, DocBlock, commands_in
from PIL import Image, ImageDraw

ADDRESS = "http://127.0.0.1:8000"
ASKS_A_CLUSTER = re.compile(r"\bweft (demo|chat|status|top|trace)\b(?![^\n|;&]*--url)")
SHORTER = (
    (r"--seconds \d+", "--seconds 2"),
    (r"--run-time \d+[sm]", "--run-time 2s"),
    (r"--requests \d+", "--requests 60"),
)
"""Lists patterns of options that say how long a command takes, with what stands in their place."""
SERVES = re.compile(r"^(?:\.venv/bin/)?weft serve\b[^\n]*\n\Z", re.MULTILINE)
CURL = "silent\nshow-error\nfail-with-body\n"
"""Makes `curl` fail where the answer is an error."""
LIMIT_S = 240.0


class PageSession(contextlib.ExitStack):
    """A `PageSession` runs the blocks of one page. Leaving it stops the clusters that the page has started."""

    def __init__(self, folder: Path, cluster: ClusterProcess) -> None:
        super().__init__()
        self._folder = folder
        self._cluster = cluster
        self._served = self.enter_context(contextlib.ExitStack())
        self._file_to_text: dict[str, str] = {}
        self._furnish()

    def _furnish(self) -> None:
        """Makes the folder in which the page's commands run."""
        for path in ROOT.iterdir():
            if path.name == "loadtest":
                shutil.copytree(path, self._folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif not path.name.startswith(".") and path.name != "build":
                (self._folder / path.name).symlink_to(path)
        (self._folder / ".venv").symlink_to(sys.prefix)
        (self._folder / "my-cluster.yaml").write_text((ROOT / "deploy" / "configs" / "laptop.yaml").read_text())
        (self._folder / ".curlrc").write_text(CURL)
        (self._folder / "tmp").mkdir()
        picture = Image.new("RGB", (224, 224), "white")
        ImageDraw.Draw(picture).ellipse((72, 72, 152, 152), fill="red")
        picture.save(self._folder / "picture.png")
        git = ["git", "-c", "user.name=reader", "-c", "user.email=reader@example.com"]
        (self._folder / "notes.txt").write_text("one\n")
        for arguments in (["init", "-q"], ["add", "notes.txt"], ["commit", "-q", "-m", "notes"]):
            subprocess.run([*git, *arguments], cwd=self._folder, check=True, env=self._environment())
        (self._folder / "notes.txt").write_text("two\n")

    def save(self, block: DocBlock) -> None:
        """Saves a block in the file that its mark names. Commands that run later find the address of the present
        cluster in it."""
        assert block.file is not None
        self._file_to_text[block.file] = block.text

    def run(self, block: DocBlock) -> str:
        """Runs a block, and returns what it wrote to standard output. Raises AssertionError if a command fails."""
        script = block.text
        serves = SERVES.search(script)
        if serves is not None:
            script = script[: serves.start()]
        printed = self._shell(script, block) if script.strip() else ""
        if serves is not None:
            printed += self._serve(serves[0])
        return printed

    def _serve(self, command: str) -> str:
        """Starts the cluster that a `weft serve` describes, in place of the one that the page has started before.
        Returns what it printed until it was ready."""
        (words,) = commands_in(command)
        sections: dict[str, object] = {}
        if "--config" in words:
            self._write_files()
            sections = yaml.safe_load((self._folder / words[words.index("--config") + 1]).read_text())
        sections["server"] = dict(sections.get("server") or {}) | {"port": 0, "host": "127.0.0.1"}
        self._served.close()
        self._cluster = self._served.enter_context(start_cluster(in_process=True, **sections))
        return self._cluster.log.read_text()

    def _shell(self, script: str, block: DocBlock) -> str:
        text = ASKS_A_CLUSTER.sub(rf"weft \1 --url {ADDRESS}", script)
        for pattern, shorter in SHORTER:
            text = re.sub(pattern, shorter, text)
        text = text.replace(ADDRESS, self._cluster.url)
        self._write_files()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self._folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        told = (
            f"{block.place} ended with status {done.returncode}:\n{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
        assert done.returncode == 0, told
        return done.stdout

    def _write_files(self) -> None:
        for name, text in self._file_to_text.items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(ADDRESS, self._cluster.url))

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "GIT_"))}
        search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        python = os.pathsep.join([str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"HOME": str(self._folder), "TMPDIR": str(self._folder / "tmp"), "PATH": search, "PYTHONPATH": python}
        return kept | own | {"ID": self._request_id(), "KEY": "none"}

    def _request_id(self) -> str:
        """Returns the id of a request that the cluster has answered, which pages call `$ID`."""
        body = {"model": self._cluster.model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello!"}]}
        answer = httpx.post(f"{self._cluster.url}/v1/chat/completions", json=body, timeout=120)
        return answer.headers["x-weft-request-id"]
