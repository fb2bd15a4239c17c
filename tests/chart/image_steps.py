"""Runs the steps of deploy/Dockerfile without Docker, as root on Linux:

    .venv/bin/python tests/chart/image_steps.py cpu FOLDER --arg TORCH_INDEX=URL

Each stage is an overlay over its parent, and the lowest one is this machine's own root, in place of the base image; so
`RUN` steps really run, but with this machine's Python and Debian. At the end it starts the image as its user, on a
read-only root with writable /tmp, /home/weft and /dev/shm, and runs `weft version`, a cluster, and the health check.

The module knows the instructions that this Dockerfile uses, and refuses others.
"""

from __future__ import annotations

import argparse
import fnmatch
import grp
import json
import os
import pwd
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


class Step(NamedTuple):
    """A `Step` is one instruction."""

    line: int
    name: str
    text: str


@dataclass
class Stage:
    """A `Stage` is what stands between one FROM and the next."""

    name: str
    parent: str
    steps: list[Step] = field(default_factory=list)


def parse(text: str) -> tuple[list[Step], dict[str, Stage]]:
    """Returns the ARG steps before the first stage, and the stages by name in their order."""
    before: list[Step] = []
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for step in _steps(text):
        if step.name == "FROM":
            parent, _, name = step.text.partition(" AS ")
            current = stages[name] = Stage(name, parent)
        elif current is None:
            before.append(step)
        else:
            current.steps.append(step)
    return before, stages


def _steps(text: str) -> Iterator[Step]:
    begun, parts = 0, []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun or number
        parts.append(line.strip().removesuffix("\\").strip())
        if not line.rstrip().endswith("\\"):
            name, _, rest = " ".join(parts).partition(" ")
            yield Step(begun, name, rest)
            begun, parts = 0, []


def lineage(stages: Mapping[str, Stage], target: str) -> list[Stage]:
    """Returns the stages that a stage is made of, the lowest first."""
    found: list[Stage] = []
    while target in stages:
        found.insert(0, stages[target])
        target = stages[target].parent
    return found


def context_files() -> list[Path]:
    """Returns what `COPY . .` copies: the files of the checkout that .dockerignore leaves."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in tracked.split("\0") if name and not is_ignored(name, rules)]


def is_ignored(name: str, rules: list[str]) -> bool:
    ignored = False
    for rule in rules:
        pattern = rule.removeprefix("!").removeprefix("**/")
        parts = name.split("/")
        heads = ["/".join(parts[: index + 1]) for index in range(len(parts))]
        matches = any(fnmatch.fnmatch(head, pattern) for head in heads)
        if rule.removeprefix("!").startswith("**/"):
            matches = matches or pattern in parts
        if matches:
            ignored = not rule.startswith("!")
    return ignored


# ------------------------------------------------------------ running


class Builder:
    """A `Builder` runs stages in a folder. It must be in a mount namespace of its own."""

    def __init__(self, folder: Path, arguments: Mapping[str, str]) -> None:
        self._folder = folder
        self._given = arguments
        self._uppers: dict[str, Path] = {"": Path("/")}
        self.environment: dict[str, str] = {}
        self.user = "0:0"
        self.workdir = "/"
        self.texts: dict[str, str] = {}

    def build(self, stages: Mapping[str, Stage], target: str) -> Path:
        """Builds a stage and returns its root."""
        self.environment = {"PATH": os.environ["PATH"]}
        self.user, self.workdir, lowers = "0:0", "/", [Path("/")]
        merged = Path("/")
        for stage in lineage(stages, target):
            upper, is_done = self._folder / "layers" / stage.name, stage.name in self._uppers
            merged = self._mounted(stage.name, upper, lowers)
            values = dict(self._given)
            for step in stage.steps:
                self._run(step, stages, merged, values, is_done)
            self._uppers[stage.name] = upper
            lowers.insert(0, upper)
        return merged

    def _mounted(self, name: str, upper: Path, lowers: list[Path]) -> Path:
        merged, work = self._folder / "merged" / name, self._folder / "work" / name
        for each in (upper, work, merged):
            each.mkdir(parents=True, exist_ok=True)
        if not os.path.ismount(merged):
            options = f"lowerdir={':'.join(map(str, lowers))},upperdir={upper},workdir={work}"
            subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, merged], check=True)
            for each in ("proc", "dev", "sys"):
                (merged / each).mkdir(exist_ok=True)
                subprocess.run(["mount", "--rbind", f"/{each}", merged / each], check=True)
        if lowers == [Path("/")]:
            (merged / "root").chmod(0o755)  # This machine's Python may lie there.
            # This machine's own users are not in the base image.
            for table in ("passwd", "group", "shadow", "gshadow"):
                path = merged / "etc" / table
                lines = path.read_text().splitlines(keepends=True)
                path.write_text("".join(each for each in lines if each.split(":")[0] not in _local_names()))
        return merged

    def _run(
        self, step: Step, stages: Mapping[str, Stage], merged: Path, values: dict[str, str], is_done: bool
    ) -> None:
        if step.name == "ARG":
            name, _, default = step.text.partition("=")
            values.setdefault(name, default)
        elif step.name == "ENV":
            for pair in shlex.split(step.text):
                name, _, value = pair.partition("=")
                self.environment[name] = value.replace("$PATH", self.environment["PATH"])
        elif step.name == "WORKDIR":
            self.workdir = step.text
            (merged / step.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif step.name == "USER":
            self.user = step.text
        elif step.name in ("HEALTHCHECK", "CMD", "EXPOSE"):
            self.texts[step.name] = step.text
        elif step.name in ("RUN", "COPY"):
            if is_done:
                return
            print(f"line {step.line}: {step.name} {step.text[:100]}", flush=True)
            if step.name == "RUN":
                self.inside(merged, ["/bin/sh", "-c", step.text], values)
            else:
                self._copy(step.text, stages, merged)
        else:
            raise SystemExit(f"line {step.line}: the instruction {step.name} is unknown here")

    def inside(self, merged: Path, command: list[str], more: Mapping[str, str] | None = None) -> None:
        change = f'cd {shlex.quote(self.workdir)} && exec "$@"'
        full = ["chroot", str(merged), "/bin/sh", "-c", change, "sh", *command]
        passed = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "http", "https"))}
        subprocess.run(full, env=passed | self.environment | dict(more or {}), check=True)

    def _copy(self, text: str, stages: Mapping[str, Stage], merged: Path) -> None:
        *sources, target = text.split()
        destination = merged / os.path.join(self.workdir, target).lstrip("/")
        if sources[0].startswith("--from="):
            saved = self.environment, self.user, self.workdir
            origin = self.build(stages, sources.pop(0).removeprefix("--from="))
            self.environment, self.user, self.workdir = saved
            for source in sources:
                shutil.copytree(origin / source.lstrip("/"), destination, symlinks=True, dirs_exist_ok=True)
            return
        files = context_files() if sources == ["."] else [Path(source) for source in sources]
        for file in files:
            into = destination / file
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, into)


def _local_names() -> set[str]:
    """Returns the users and groups of this machine that are no part of Debian."""
    users = {each.pw_name for each in pwd.getpwall() if 1000 <= each.pw_uid < 60_000}
    return users | {each.gr_name for each in grp.getgrall() if 1000 <= each.gr_gid < 60_000}


def show(builder: Builder, merged: Path) -> None:
    """Runs the image as its user on a read-only root."""
    subprocess.run(["mount", "-o", "remount,ro", merged], check=True)
    for path in ("tmp", "home/weft", "dev/shm"):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", merged / path], check=True)
    uid, gid = builder.user.split(":")
    environment = builder.environment | {"HOME": "/home/weft"}

    def command(*arguments: str) -> list[str]:
        as_user = [
            "setpriv",
            f"--reuid={uid}",
            f"--regid={gid}",
            "--clear-groups",
            "--no-new-privs",
            "--bounding-set=-all",
        ]
        return ["chroot", str(merged), *as_user, "/bin/sh", "-c", 'cd /home/weft && exec "$@"', "sh", *arguments]

    subprocess.run(
        command("sh", "-c", "id -u; ! touch /opt/weft/a 2>/dev/null && echo read-only"), env=environment, check=True
    )
    subprocess.run(command("weft", "version"), env=environment, check=True)
    check = json.loads(builder.texts["HEALTHCHECK"].partition("CMD ")[2])
    started = time.monotonic()
    server = subprocess.Popen(command(*json.loads(builder.texts["CMD"])), env=environment)
    try:
        while subprocess.run(command(*check), env=environment, stderr=subprocess.DEVNULL).returncode:
            if server.poll() is not None or time.monotonic() - started > 600:
                raise SystemExit("the cluster did not become healthy")
            time.sleep(2)
        print(f"the health check succeeds after {time.monotonic() - started:.0f} s", flush=True)
        subprocess.run(command("weft", "demo"), env=environment, check=True)
    finally:
        server.terminate()
        server.wait(timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arg", action="append", default=[])
    options = parser.parse_args()
    if os.environ.get("IMAGE_STEPS_INSIDE") != "1":
        os.environ["IMAGE_STEPS_INSIDE"] = "1"
        os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv])
    _, stages = parse(DOCKERFILE.read_text())
    # Overlays take no layer that lies in another, and the lowest is this machine's root: so the layers are in memory.
    options.folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", options.folder], check=True)
    builder = Builder(options.folder.absolute(), dict(each.split("=", 1) for each in options.arg))
    show(builder, builder.build(stages, options.target))


if __name__ == "__main__":
    main()
