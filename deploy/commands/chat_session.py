"""Implements `weft chat`: a conversation with the model in the terminal, or one question in a pipe.

On a terminal, `TerminalInput` reads lines with prompt_toolkit: it keeps pasted texts of several lines together, has a
history and completes commands and file names. Ctrl-C stops an answer, and the cluster sees that the client has left; a
second one leaves. If standard input or output is no terminal, everything that is read is one question, after lines at
the beginning that are commands, and only the answer goes to standard output. The module knows nothing of how messages
are made (`chat_history`).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from deploy.commands.chat_history import AnswerFigures, AnswerStream, ChatHistory, attach
from deploy.commands.cluster_client import ClusterClient, ClusterOptions
from deploy.printable import escaped
from fabric.contracts import ConfigError, WeftError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History

ANSWER_TIMEOUT_S = 600.0
"""The next part of an answer may take this long. A request in a full cluster waits for room before its first token."""
COMMANDS = {
    "/image": "FILE|URL [QUESTION]  attaches a picture to the next question, or asks the question at once",
    "/video": "FILE|URL [QUESTION]  attaches a video",
    "/audio": "FILE|URL [QUESTION]  attaches a sound",
    "/system": "TEXT  tells the model how to answer; without a text it tells nothing",
    "/retry": "asks the last question again",
    "/reset": "forgets the conversation",
    "/save": "FILE  writes the conversation, as messages of the API if the file ends with .json",
    "/stats": "says how fast the last answer came",
    "/help": "shows this",
    "/quit": "leaves; so do Ctrl-D, and Ctrl-C twice",
}
FILE_COMMANDS = ("/image", "/video", "/audio", "/save")
KEYS = "Enter sends; Alt-Enter begins a new line; a pasted text stays together; Ctrl-C stops an answer."


def chat(arguments: argparse.Namespace) -> int:
    """Runs the conversation, and returns 0, or 1 if an answer in a pipe failed."""
    fields = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens, "seed": arguments.seed}
    options = {name: value for name, value in fields.items() if value is not None}
    media = [
        attach(modality, name)
        for modality in ("image", "video", "audio")
        for name in getattr(arguments, modality) or ()
    ]
    with ClusterClient(ClusterOptions.of(arguments)) as client:
        history = ChatHistory(arguments.model or client.model(), arguments.system or "", options)
        history.attached += media
        session = ChatSession(client, history, sys.stdout, sys.stderr)
        if arguments.message:
            return session.ask_once(" ".join(arguments.message))
        if sys.stdin.isatty() and sys.stdout.isatty():
            return session.converse(TerminalInput(), client.options.url)
        return session.run_script(sys.stdin.read())


class TerminalInput:
    """A `TerminalInput` reads what the user writes on a terminal."""

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

        keys = KeyBindings()

        # What is typed while an answer comes has line feeds in place of carriage returns.
        @keys.add("enter")
        @keys.add("c-j")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        @keys.add("escape", "c-j")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            history=kept_history(),
            multiline=True,
            key_bindings=keys,
            completer=completer(),
            complete_while_typing=False,
        )

    def read(self, prompt: str) -> str:
        """Returns a text of one or more lines. Raises EOFError or KeyboardInterrupt as the keys say."""
        return self._session.prompt(prompt, prompt_continuation="  ")


def kept_history() -> History:
    """Returns the history of former sessions, in a file that only the user may read. If that file can't be written, the
    history lives as long as the session."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "weft"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(folder / "chat_history", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(folder / "chat_history"))


def completer() -> Completer:
    """Returns what completes the names of commands, and names of files after the commands that take one."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    files = PathCompleter(expanduser=True)

    class CommandCompleter(Completer):
        """Completes the commands of a chat."""

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            word, has_rest, rest = document.text_before_cursor.partition(" ")
            if has_rest and word in FILE_COMMANDS:
                yield from files.get_completions(Document(rest), complete_event)
            elif not has_rest and word.startswith("/"):
                yield from (Completion(name, -len(word)) for name in COMMANDS if name.startswith(word))

    return CommandCompleter()


class Heard(NamedTuple):
    """Says what became of one input: whether the session goes on, and whether it failed."""

    goes_on: bool = True
    has_failed: bool = False


class ChatSession:
    """A `ChatSession` reads questions and commands, and writes answers to `out` and all else to `notes`."""

    def __init__(
        self,
        client: ClusterClient,
        history: ChatHistory,
        out: TextIO,
        notes: TextIO,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.history = history
        self._client = client
        self._out, self._notes = out, notes
        self._clock = clock
        self._figures: AnswerFigures | None = None
        self._was_interrupted = False

    # ------------------------------------------------------------ ways to run

    def ask_once(self, text: str) -> int:
        return 1 if self._question(text).has_failed else 0

    def run_script(self, text: str) -> int:
        """Runs the commands at the beginning of a text and asks the rest of it. Returns 1 if something failed."""
        lines = text.splitlines()
        num_commands = next((at for at, line in enumerate(lines) if not line.startswith("/")), len(lines))
        for line in lines[:num_commands]:
            heard = self.hear(line)
            if heard.has_failed or not heard.goes_on:
                return 1 if heard.has_failed else 0
        rest = "\n".join(lines[num_commands:]).strip()
        if rest:
            return self.ask_once(rest)
        if not num_commands:
            raise ConfigError("there is no question; write it behind the command, or into its standard input")
        return 0

    def converse(self, source: TerminalInput, url: str) -> int:
        """Reads what a user writes on a terminal, and answers it, until the user leaves."""
        self._note(f"{self.history.model} at {url}. /help lists commands. {KEYS}")
        while True:
            try:
                text = source.read("> ")
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if self._was_interrupted:
                    return 0
                self._was_interrupted = True
                self._note("Ctrl-C again leaves")
                continue
            self._was_interrupted = False
            if text.strip() and not self.hear(text.strip()).goes_on:
                return 0

    def hear(self, text: str) -> Heard:
        """Runs a command or asks a question, and says on `notes` what fails."""
        try:
            return self._command(text) if text.startswith("/") else self._question(text)
        except WeftError as error:
            self._note(f"weft: {error.message}")
            return Heard(has_failed=True)

    # ------------------------------------------------------------ commands

    def _command(self, text: str) -> Heard:
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        match name:
            case "/image" | "/video" | "/audio":
                return self._attach(name[1:], rest)
            case "/system":
                self.history.system = rest
                self._note("the model is told so" if rest else "the model is told nothing")
            case "/reset":
                self.history.reset()
                self._note("the conversation is forgotten")
            case "/retry":
                return self._answer(self.history.ask_again())
            case "/save":
                self.history.save(Path(_first_word(rest, "/save FILE")[0]).expanduser())
                self._note("saved")
            case "/stats":
                self._note("\n".join(self._figures.lines()) if self._figures else "there was no answer yet")
            case "/help":
                self._note("\n".join([*(f"{name:8} {said}" for name, said in COMMANDS.items()), KEYS]))
            case "/quit" | "/exit":
                return Heard(goes_on=False)
            case _:
                raise ConfigError(f"there is no command {name}; /help lists what there is")
        return Heard()

    def _attach(self, modality: str, rest: str) -> Heard:
        name, question = _first_word(rest, f"/{modality} FILE [QUESTION]")
        if question and Path(rest).expanduser().is_file():
            name, question = rest, ""  # The name has spaces.
        medium = attach(modality, name)
        self.history.attached.append(medium)
        if question:
            return self._question(question)
        size = "" if medium.num_bytes is None else f" ({medium.num_bytes:,} bytes)"
        self._note(f"{name}{size} goes with the next question")
        return Heard()

    # ------------------------------------------------------------ answers

    def _question(self, text: str) -> Heard:
        return self._answer(self.history.ask(text))

    def _answer(self, body: dict[str, object]) -> Heard:
        """Writes an answer while it comes. An interrupt ends it, and what has come of it stays in the conversation."""
        asked_s, answer = self._clock(), None
        try:
            with self._client.stream("/v1/chat/completions", body, ANSWER_TIMEOUT_S) as response:
                answer = AnswerStream(response.headers.get("x-weft-request-id", ""), self._clock, asked_s)
                self._write_pieces(answer, response.iter_lines())
        except KeyboardInterrupt:
            if not self._out.isatty():
                raise
            self._was_interrupted = True
            self._note("\nstopped; Ctrl-C again leaves")
        except WeftError as error:
            self._note(f"weft: {error.message}")
            return Heard(has_failed=True)
        finally:
            self.history.answered("" if answer is None else answer.text)
            self._figures = self._figures if answer is None else answer.figures()
        if self._figures is not None and self._figures.finish_reason == "length":
            self._note("the answer was cut: it reached the most tokens that it may have (--max-tokens)")
        return Heard()

    def _write_pieces(self, answer: AnswerStream, lines: Iterable[str]) -> None:
        is_terminal, was_reasoning = self._out.isatty(), False
        for piece in answer.pieces(lines):
            if piece.is_reasoning and not is_terminal:
                continue  # A program that reads the answer does not want what was thought before it.
            if was_reasoning and not piece.is_reasoning:
                self._out.write("\n\n")
            was_reasoning = piece.is_reasoning
            # A terminal obeys control characters, so a model may not send it any.
            self._out.write(escaped(piece.text.replace("\r", ""), "\n\t") if is_terminal else piece.text)
            self._out.flush()
        if answer.text or was_reasoning:
            self._out.write("\n")
            self._out.flush()

    def _note(self, text: str) -> None:
        print(escaped(text, "\n"), file=self._notes, flush=True)


FIRST_WORD = re.compile(r""" *(?:"([^"]*)"|'([^']*)'|((?:\\.|[^\s\\])+))""")


def _first_word(text: str, usage: str) -> tuple[str, str]:
    """Returns the name of a file at the beginning of a text, and what follows it. The name may stand in quotes, or have
    a backslash before each space, as terminals write files that are dragged onto them. Raises ConfigError if there is
    none."""
    found = FIRST_WORD.match(text)
    if found is None:
        raise ConfigError(f"write {usage}")
    quoted = found[1] if found[1] is not None else found[2]
    word = quoted if quoted is not None else re.sub(r"\\(.)", r"\1", found[3])
    return word, text[found.end() :].strip()
