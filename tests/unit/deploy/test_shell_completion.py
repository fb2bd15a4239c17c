"""Tests the completion of commands and options in shells: what bash offers, and that each script is whole."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.commands.command_line import SHELLS, build_parser
from deploy.commands.shell_completion import SHELL_TO_PLACE, all_actions, script

COMPLETE = """
source {script}
COMP_WORDS=({words}) COMP_CWORD={last}
spec=$(complete -p weft) && function=${{spec#*-F }} && "${{function%% *}}" weft "{word}" "{before}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def offered(folder: Path, *words: str) -> list[str]:
    """Returns what bash offers after these words; the last one is being written."""
    file = folder / "weft.bash"
    file.write_text(script("bash", build_parser()))
    quoted = " ".join(f"'{word}'" for word in ("weft", *words))
    before = ("weft", *words)[-2]
    program = COMPLETE.format(script=file, words=quoted, last=len(words), word=words[-1], before=before)
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=folder, check=True)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def test_bash_offers_commands_options_values_and_files(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("")
    (tmp_path / "models").mkdir()
    assert offered(tmp_path, "stat") == ["status"]
    assert set(offered(tmp_path, "c")) == {"check", "chat", "completion"}
    assert offered(tmp_path, "serve", "--mod") == ["--model"]
    assert offered(tmp_path, "serve", "--log-level", "w") == ["warning"]
    assert offered(tmp_path, "key", "n") == ["new"]
    assert offered(tmp_path, "check", "clu") == ["cluster.yaml"]
    assert offered(tmp_path, "init", "--model", "mo") == ["models"]
    assert offered(tmp_path, "bench", "engi") == ["engine"]
    assert offered(tmp_path, "trace", "--modality", "vi") == ["video"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_every_command_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell in SHELL_TO_PLACE
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    commands = build_parser().commands()
    assert all(name in printed for name in commands)
    for _, action in all_actions(build_parser()):
        longest = max(action.option_strings, key=len, default="")
        is_hidden = action.help == "==SUPPRESS=="
        assert is_hidden or longest.lstrip("-") in printed, f"{shell} lacks {longest}"
    program = shutil.which(shell)
    if program is not None:
        checked = subprocess.run([program, "-n"], input=printed, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_offers_the_same(tmp_path: Path) -> None:
    file = tmp_path / "weft.fish"
    file.write_text(script("fish", build_parser()))
    asked = ("weft stat", "weft trace --mod", "weft bench eng", "weft serve --log-level w")
    program = "; ".join([f"source {file}", *(f"complete -C '{words}'" for words in asked)])
    done = subprocess.run(["fish", "--no-config", "-c", program], capture_output=True, text=True, check=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["status", "--modality", "engine", "warning"]
