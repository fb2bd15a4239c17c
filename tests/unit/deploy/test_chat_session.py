"""Tests `weft chat` against a real router over fake members: in a pipe, and on a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from pseudo_terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, on_terminal
from router_chats import image
from served_fakes import ServedFakes, served_fakes

from deploy.cli import main
from deploy.commands.chat_session import COMMANDS, _first_word
from fabric.contracts import ConfigError

Captured = pytest.CaptureFixture[str]


class NoTerminal(io.StringIO):
    """`NoTerminal` is standard input of a pipe."""


def piped(text: str, *words: str, fakes: ServedFakes, patch: pytest.MonkeyPatch) -> int:
    patch.setattr("sys.stdin", NoTerminal(text))
    return main(["chat", *words, "--url", fakes.url])


def picture(folder: Path) -> Path:
    import base64

    file = folder / "a picture.png"
    file.write_bytes(base64.b64decode(image()["image_url"]["url"].partition(",")[2]))
    return file


def test_a_pipe_gets_the_answer_and_nothing_else(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served_fakes() as fakes:
        fakes.cluster.workers[0].script.reply = "a red fox"
        assert main(["chat", "what", "is", "it?", "--url", fakes.url]) == 0
        assert capsys.readouterr() == ("a red fox\n", "")
        assert piped("two\nlines\n", fakes=fakes, patch=monkeypatch) == 0
        assert capsys.readouterr() == ("a red fox\n", "")
        file = picture(tmp_path)
        saved = tmp_path / "c.md"
        script = f'/system be brief\n/image "{file}"\nwhat is\nin it?\n'
        assert piped(script, "--max-tokens", "9", fakes=fakes, patch=monkeypatch) == 0
        printed = capsys.readouterr()
        assert printed.out == "a red fox\n"
        assert "goes with the next question" in printed.err
        assert len(fakes.cluster.encoders[0].requests) == 1
        assert piped(f"/image {file}\n/save {saved}\n", fakes=fakes, patch=monkeypatch) == 0


def test_what_fails_in_a_pipe_is_status_1(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    with served_fakes() as fakes:
        for script, words, said in (
            ("", (), "there is no question; write it behind the command"),
            ("/nope\nhello", (), "there is no command /nope; /help lists"),
            ("/image\nhello", (), "write /image FILE [QUESTION]"),
            (f"/image {tmp_path}/none\nhello", (), "can't be read: No such file"),
            ("/retry", (), "nothing was asked yet"),
            ("hello", ("--model", "other"), "the model `other` does not exist"),
            ("hello", ("--audio", str(picture(tmp_path))), "answers 400"),
        ):
            assert piped(script, *words, fakes=fakes, patch=monkeypatch) == 1
            printed = capsys.readouterr()
            assert printed.out == ""
            assert said in printed.err
        assert piped("/help\n/stats\n", fakes=fakes, patch=monkeypatch) == 0
        said = capsys.readouterr().err
        assert all(f"{name} " in said for name in COMMANDS)
        assert "there was no answer yet" in said


@pytest.mark.parametrize(
    ("text", "word", "rest"),
    [
        ("a.png", "a.png", ""),
        ("a.png What's this?", "a.png", "What's this?"),
        ('"a b.png" what?', "a b.png", "what?"),
        ("'a b.png'", "a b.png", ""),
        (r"a\ b.png what?", "a b.png", "what?"),
        ('"a.png', '"a.png', ""),
    ],
)
def test_names_of_files_are_written_as_on_a_command_line(text: str, word: str, rest: str) -> None:
    assert _first_word(text, "/image FILE") == (word, rest)


def test_a_missing_name_is_told() -> None:
    with pytest.raises(ConfigError, match="write /save FILE"):
        _first_word("", "/save FILE")


def awaits_input(screen: str) -> bool:
    return screen.rstrip().endswith("\n>")


def test_a_conversation_on_a_terminal(tmp_path: Path) -> None:
    with served_fakes() as fakes:
        worker = fakes.cluster.workers[0]
        worker.script.reply = "a red fox"
        with on_terminal("chat", "--url", fakes.url, home=tmp_path) as terminal:
            terminal.shows(awaits_input)
            terminal.send(f"/image {str(picture(tmp_path)).replace(' ', chr(92) + ' ')}{ENTER}")
            terminal.shows("goes with the next question")
            terminal.shows(awaits_input)
            terminal.send(f"first line{ALT_ENTER}second line{ENTER}")
            terminal.shows("a red fox")
            assert len(worker.requests) == 1
            assert len(fakes.cluster.encoders[0].requests) == 1
            terminal.shows(awaits_input)
            terminal.send(f"\x1b[200~pasted\ntext\x1b[201~{ENTER}")
            terminal.shows(lambda text: text.count("a red fox") == 2 and awaits_input(text))
            terminal.send(f"/stats{ENTER}")
            terminal.shows(lambda text: "first token" in text and awaits_input(text))
            terminal.send(CTRL_D)
            assert terminal.ended() == 0
        kept = tmp_path / ".local" / "state" / "weft" / "chat_history"
        assert "+second line" in kept.read_text()
        assert kept.stat().st_mode & 0o077 == 0


def test_ctrl_c_stops_an_answer_and_a_second_one_leaves(tmp_path: Path) -> None:
    with served_fakes() as fakes:
        worker = fakes.cluster.workers[0]
        worker.script.pause_at = 2
        with on_terminal("chat", "--url", fakes.url, home=tmp_path) as terminal:
            terminal.shows(awaits_input)
            terminal.send(f"hello{ENTER}")
            while not fakes.do(
                lambda: any(t.stage == "generating" for t in fakes.cluster.service.traces._traces.values())
            ):
                terminal.pump(0.01)
            terminal.send(CTRL_C)
            terminal.shows("stopped; Ctrl-C again leaves")
            while not fakes.do(lambda: list(worker.aborted)):
                terminal.pump(0.01)
            terminal.shows(awaits_input)
            terminal.send(CTRL_C)
            assert terminal.ended() == 0


def test_what_a_model_says_can_not_drive_the_terminal(tmp_path: Path) -> None:
    with served_fakes() as fakes:
        fakes.cluster.workers[0].script.reply = "a\x1b]0;title\x07\tb"
        with on_terminal("chat", "--url", fakes.url, home=tmp_path) as terminal:
            terminal.shows(awaits_input)
            terminal.send(f"hello{ENTER}")
            terminal.shows("a\\x1b]0;title\\x07")
            terminal.send(f"/quit{ENTER}")
            assert terminal.ended() == 0
