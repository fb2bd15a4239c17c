"""Tests how the command line is read: what a misspelled word may mean, and what reading it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deploy.cli import main

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sevre"], "weft: error: argument COMMAND: invalid choice: 'sevre'; did you mean serve?\n"),
        (["serve", "--modle", "x"], "weft serve: error: unknown argument: --modle x; did you mean --model?\n"),
        (["serve", "--modle=x"], "weft serve: error: unknown argument: --modle=x; did you mean --model?\n"),
        (
            ["serve", "--log-level", "warn"],
            "weft serve: error: argument --log-level: invalid choice: 'warn'; did you mean warning?\n",
        ),
        (["key", "make"], "invalid choice: 'make'; `weft key --help` lists what there is\n"),
        (["check", "a.yaml", "--zzz"], "unknown argument: --zzz; `weft check --help` lists what there is\n"),
        (["check", "a.yaml", "b.yaml"], "weft check: error: unknown argument: b.yaml\n"),
        (["simulate", "run", "--wokers", "2"], "weft simulate run: error: unknown argument: --wokers 2; did you mean"),
    ],
)
def test_a_misspelled_word_is_answered_with_the_one_that_is_meant(
    words: list[str], said: str, capsys: Captured
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_reading_the_command_line_imports_neither_config_nor_models() -> None:
    heavy = ("deploy.config", "pydantic", "httpx", "torch", "ray", "rich", "textual", "prompt_toolkit", "PIL")
    code = (
        "import sys\nfrom deploy.cli import main\nmain(['version'])\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "weft 0.1.0\n[]\n"
