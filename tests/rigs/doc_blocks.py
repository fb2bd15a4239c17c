"""Reads the fenced blocks of the documents, and the marks in front of them.

Blocks of `sh` and `bash` are commands that a reader runs. A test runs each of them, unless a comment of HTML in front
of its fence says why it can't. A reader of the page does not see the comment:

    <!-- not run: needs Kubernetes -->

The reason is one of `REASON_TO_SIGN`, or the path of the test or program that runs the commands instead
(`<!-- not run: tests/clients/run_clients.py runs it -->`). A reason must fit: a block that contains nothing of what its
reason speaks of can run, so its mark is a flaw, and so is a mark without a block. A second mark names the file in which
a reader saves a block, so that later commands of the page find it:

    <!-- file: cluster.yaml -->

The module knows nothing of how commands are run.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("sh", "bash")
PAST = ("docs/adr/", "CHANGELOG.md")
"""Begins the paths of documents that speak of the past, whose commands need not work any more."""

REASON_TO_SIGN = {
    "needs Kubernetes": r"\b(kubectl|helm (install|upgrade|rollback|test|uninstall))\b",
    "needs Docker": r"\bdocker\b",
    "needs several machines": r"\b10\.\d+\.\d+\.\d+|--master|FIRST-MACHINE|weft node start|\bssh\b",
    "needs a Ray that runs already": r"\b(ray|serve) (status|stop|deploy|start)\b",
    "needs a GPU": r"nvidia-smi|device: cuda|--gpus|\bcuda\b",
    "needs RDMA devices": r"\b(ibstat|ibv_\w+|ib_\w+|ucx_info|show_gids|infiniband)\b",
    "needs a model of your own": r"/models/|--model DIR",
    "needs a terminal": r"\bweft (chat|top)\b",
    "needs root": r"/etc/|\bsysctl\b|\bulimit -l unlimited|\bprlimit\b|\bapt-get\b",
    "needs names of your own": r"\b(PID|HOST|POD|DIR|KEY)\b",
    "removes files of yours": r"\brm -rf ~/",
    "targets of make": r"\A((?:[A-Z]+=\w+ )?make [\w-]+[^\n]*\n)+\Z",
    "takes minutes": r"\b(weft (bench|simulate)|pip install)\b",
}
"""Maps each reason for which a block is not run to a pattern that such a block contains."""

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```[ ]*$", re.DOTALL | re.MULTILINE
)
MARK = re.compile(r"<!-- (not run|file): (.+?) -->")
MARK_IN_FRONT = re.compile(r"(?:<!-- (?:not run|file): .+? -->\s*)+\Z")
RUNS_IT = re.compile(r"(\S+) runs it")


@dataclass(frozen=True, slots=True)
class DocBlock:
    """A `DocBlock` is one fenced block of a document."""

    document: str
    """Names the document by its path from the root."""
    line: int
    """Counts the line of the fence from 1."""
    language: str
    text: str
    """Holds the block without the indentation of its fence."""
    not_run: str | None
    """Holds the reason for which no test runs the block."""
    file: str | None
    """Names the file in which a reader saves the block."""

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def is_command(self) -> bool:
        return self.language in COMMANDS

    @property
    def is_run(self) -> bool:
        return self.is_command and self.not_run is None


@cache
def documents() -> tuple[str, ...]:
    """Returns the paths of all documents that describe the present."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return tuple(path for path in sorted(listed) if not path.startswith(PAST) and (ROOT / path).is_file())


@cache
def blocks_of(document: str) -> tuple[DocBlock, ...]:
    return tuple(blocks_in((ROOT / document).read_text(), document))


def all_blocks() -> list[DocBlock]:
    return [block for document in documents() for block in blocks_of(document)]


def blocks_in(text: str, document: str) -> Iterator[DocBlock]:
    """Yields the fenced blocks of a text."""
    for fence in FENCE.finditer(text):
        marks = dict(MARK.findall(_marks_before(text, fence.start())))
        indent = len(fence["indent"])
        lines = [line[indent:] for line in fence["text"].splitlines(keepends=True)]
        body = "".join(line or "\n" for line in lines)
        line = text.count("\n", 0, fence.start()) + 1
        yield DocBlock(document, line, fence["language"], body, marks.get("not run"), marks.get("file"))


def _marks_before(text: str, position: int) -> str:
    found = MARK_IN_FRONT.search(text, 0, position)
    return found[0] if found else ""


def stray_marks(text: str) -> list[str]:
    """Returns the marks of a text that do not stand in front of a fence. Marks inside of fences are shown to a reader,
    so they are none."""
    outside = FENCE.sub(lambda fence: "```\n", text)
    in_front = sum(
        len(MARK.findall(_marks_before(outside, each.start()))) for each in re.finditer("^```$", outside, re.M)
    )
    found = [mark[0] for mark in MARK.finditer(outside)]
    return found if in_front != len(found) else []


def flaw_of(block: DocBlock) -> str | None:
    """Returns what is wrong with the marks of a block, or None."""
    if block.not_run is None:
        return None
    if not block.is_command:
        return "only commands are run"
    runs_it = RUNS_IT.fullmatch(block.not_run)
    if runs_it is not None:
        return _flaw_of_substitute(block, runs_it[1])
    sign = REASON_TO_SIGN.get(block.not_run)
    if sign is None:
        return f"the reason {block.not_run!r} is none of {', '.join(REASON_TO_SIGN)}"
    if re.search(sign, block.text) is None:
        return f"the block contains nothing that {block.not_run!r} speaks of, so it can run"
    return None


def _flaw_of_substitute(block: DocBlock, path: str) -> str | None:
    """Returns what is wrong with the claim that `path` runs the commands: it must exist and name each program."""
    if not (ROOT / path).exists():
        return f"there is no {path}"
    files = [ROOT / path] if (ROOT / path).is_file() else sorted((ROOT / path).rglob("*.py"))
    known = "".join(file.read_text() for file in files)
    names = {Path(words[0]).name for words in commands_in(block.text)}
    missing = sorted(name for name in names if name not in known)
    return f"{path} does not speak of {', '.join(missing)}" if missing else None


def commands_in(text: str) -> list[list[str]]:
    """Returns the words of each command of a script: pipes, lists and substitutions are taken apart, and redirections
    and assignments are left out."""
    one_line = re.sub(r"\\\n\s*", " ", text)
    lexer = shlex.shlex(re.sub(r"\n|\$\(", " ; ", _without_comments(one_line)), posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    is_target = False
    for word in lexer:
        if is_target:
            is_target = False
        elif word in (">", ">>", "<", ">&", "&>"):
            is_target = True
        elif set(word) <= set("();|&"):
            found.append([])
        elif found[-1] or not re.match(r"[A-Za-z_]\w*=", word):
            found[-1].append(word)
    return [words for words in found if words]


def _without_comments(text: str) -> str:
    return re.sub(r"(^|\s)#[^\n\"']*$", r"\1", text, flags=re.MULTILINE)
