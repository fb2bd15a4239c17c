"""Separates a model's reasoning, which stands in marks at the beginning of its answer, from the answer itself.

The line breaks between the marks and the text around them are dropped, as chat templates drop them when they write an
earlier answer into a prompt. The module knows nothing of calls, but `answer_parser` combines both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from modalities.answers.call_grammars import marker_terminal
from modalities.answers.json_scanner import WHITESPACE
from modalities.answers.pieces import AnswerParser, AnswerPiece, PieceSink, ToolFormat, ToolSpec
from modalities.answers.text_source import CallsAloneParser, Reading, StreamedParser, TextSource, read_plain_text

_STRINGS = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A `ReasoningFormat` says between which marks a model reasons."""

    start: str = "<think>"
    end: str = "</think>"
    begins_inside: bool = False
    """Says whether the chat template usually writes `start` itself, so that the output begins with reasoning."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Names the control tokens whose text the parser must see, if the tokenizer has them as special tokens."""
        return (self.start, self.end)

    def is_open_after(self, prompt: str) -> bool:
        """Returns whether output that follows this rendered prompt begins inside the reasoning. This is exact, also for
        templates that open or close the reasoning by a variable."""
        return prompt.rstrip(WHITESPACE).endswith(self.start)

    def is_open_in(self, answer: str) -> bool:
        """Returns whether an answer that was written up to here is still inside its reasoning."""
        return answer.lstrip(WHITESPACE).startswith(self.start) and self.end not in answer


def find_reasoning_format(template_text: str, special_tokens: Collection[str] = ()) -> ReasoningFormat | None:
    """Returns the marks of reasoning that the source of a chat template writes, or that are special tokens of the
    tokenizer, or None."""
    literals = [(one or other).replace("\\n", "\n") for one, other in _STRINGS.findall(template_text)]
    for start, end in _MARKS:
        if end in template_text or (start in special_tokens and end in special_tokens):
            opened = [text for text in literals if text.rstrip("\n").endswith(start)]
            begins_inside = any(text.rstrip("\n").removesuffix(start).strip() for text in opened)
            return ReasoningFormat(start, end, begins_inside or f"{start}\n" in opened)
    return None


def after_reasoning(
    grammar: str, reasoning: ReasoningFormat, begins_inside: bool, special_token_ids: Mapping[str, int]
) -> str:
    """Returns a grammar in which free reasoning may come before what `grammar` allows; if `begins_inside`, the text
    begins with the rest of the reasoning and its end mark. `grammar` is Lark, or llguidance's JSON for another kind of
    structured output. The empty grammar stays empty."""
    if not grammar:
        return ""
    start, end = marker_terminal(reasoning.start, special_token_ids), marker_terminal(reasoning.end, special_token_ids)
    thought = f"REASONING? {end}" if reasoning.end in special_token_ids else f"REASONING {end}"
    rules = f"reasoned{'' if reasoning.end in special_token_ids else '[lazy]'}: {thought}\n"
    rules += "REASONING: /(.|\\n)*/\nREASONED_BREAK: /\\n{1,4}/\n"
    if begins_inside:
        opening = "reasoned REASONED_BREAK?"
    else:
        opening = "(reasoning_start reasoned REASONED_BREAK?)?"
        lazy = "" if reasoning.start in special_token_ids else "[lazy]"
        rules += f"reasoning_start{lazy}: {start}\n"
    if not grammar.lstrip().startswith("{"):
        return f"start: {opening} answer\n{rules}" + re.sub(r"^start:", "answer:", grammar, count=1, flags=re.MULTILINE)
    first, *others = json.loads(grammar)["grammars"]
    wrapper = {"name": "reasoned_answer", "lark_grammar": f"start: {opening} @answer\n{rules}"}
    return json.dumps({"grammars": [wrapper, {**first, "name": "answer"}, *others]})


def answer_parser(
    reasoning: ReasoningFormat | None,
    tools: ToolFormat | None,
    specs: Sequence[ToolSpec],
    begins_inside: bool,
    must_call: bool = False,
) -> AnswerParser:
    """Returns a parser for one choice: first the reasoning, and calls of tools in what is left. `must_call` says that
    the grammar allows nothing but calls there."""
    rest: AnswerParser = StreamedParser(read_plain_text) if tools is None else tools.parser(specs)
    if must_call:
        rest = CallsAloneParser(rest)
    return rest if reasoning is None else ReasonedAnswerParser(replace(reasoning, begins_inside=begins_inside), rest)


class ReasonedAnswerParser:
    """Reads reasoning and leaves all text behind it to another parser.

    Reasoning stands at the beginning of an answer only; a mark that comes later is text. A model that writes `start`
    although its template did so already is understood."""

    def __init__(self, reasoning: ReasoningFormat, rest: AnswerParser) -> None:
        self._source, self._sink, self._rest = TextSource(), PieceSink(), rest
        self._place = _Place()
        self._reading: Reading[str] | None = _read_reasoning(self._source, self._sink, reasoning, self._place)

    @property
    def num_held(self) -> int:
        return self._rest.num_held if self._reading is None else self._source.num_kept

    @property
    def reasoning_range(self) -> tuple[int, int]:
        start, end = self._place.start, self._place.end
        if start is None:
            return 0, 0
        return start, self._source.num_read - self._source.num_kept if end is None else end

    def push(self, text: str) -> list[AnswerPiece]:
        if self._reading is None:
            return self._rest.push(text)
        self._source.refill(text)
        return self._read()

    def flush(self) -> list[AnswerPiece]:
        self._source.is_ended = True
        pieces = self._read()
        return pieces + self._rest.flush()

    def _read(self) -> list[AnswerPiece]:
        if self._reading is None:
            return []
        try:
            next(self._reading)
        except StopIteration as stopped:
            self._reading = None
            rest = str(stopped.value) + self._source.take(len(self._source.text))
            return self._sink.take() + (self._rest.push(rest) if rest else [])
        return self._sink.take()


class _Place:
    """Says where the reasoning begins and ends in the text, as far as this is known."""

    def __init__(self) -> None:
        self.start: int | None = None
        self.end: int | None = None


def _read_reasoning(source: TextSource, sink: PieceSink, reasoning: ReasoningFormat, place: _Place) -> Reading[str]:
    """Reads up to the answer, and notes the place of the reasoning. Returns what was read of the answer, which is
    something only if there is no reasoning."""
    source.keep()
    yield from source.skip_all(WHITESPACE)
    marks = (reasoning.start, reasoning.end) if reasoning.begins_inside else (reasoning.start,)
    mark = yield from source.skip_one_of(marks)
    begun = source.take_kept()
    if not mark and not reasoning.begins_inside:
        return begun
    place.start = source.num_read if mark == reasoning.start else 0
    if mark == reasoning.end:
        place.end = source.num_read - len(mark)
    if mark != reasoning.start:
        sink.reasoning(begun.removesuffix(mark).strip("\n") if mark else begun.lstrip("\n"))
    if mark or not begun.strip("\n"):
        yield from source.skip_all("\n")
    if mark == reasoning.end:
        return ""
    breaks_or_end = re.compile(f"[\\n{re.escape(reasoning.end[0])}]")
    while (yield from source.more()):
        found = breaks_or_end.search(source.text, source.position)
        sink.reasoning(source.take(found.start() if found else len(source.text)))
        if found:
            source.keep()
            yield from source.skip_all("\n")
            if (yield from source.skip(reasoning.end)):
                source.forget()
                place.end = source.num_read - len(reasoning.end)
                yield from source.skip_all("\n")
                return ""
            sink.reasoning(source.take_kept())
    return ""
