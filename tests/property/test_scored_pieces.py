"""Checks that each token of an answer is given to the text that it belongs to, however the answer mixes text, reasoning
and calls, and however tokens and frames cut it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from fabric.contracts import RequestId, TokenLogprobs
from modalities.answers import ReasoningFormat, TextPiece, ToolChoice, ToolSpec, find_tool_format
from router.edge.answers import PieceReader
from router.edge.scored_pieces import ScoredPieces
from router.prompt import AnswerPlan
from router.run import ChoiceOutput, JoinedStreams, RequestStream

STOP = "STOP"
END_ID = 10_000
SPECS = (ToolSpec("f", "", {}),)
PLAN = AnswerPlan(
    find_tool_format("hermes", ""), SPECS, SPECS, ToolChoice("auto"), True, ReasoningFormat(), begins_inside=False
)
PARTS = st.sampled_from(
    [
        "Hello",
        " \n",
        "<",
        "<tool",
        "ä€",
        "ST",
        '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>',
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        '<tool_call>\n{"name": "f"',
        "STOP",
    ]
)
ANSWERS = st.tuples(st.sampled_from(["", "<think>\nwhy\n</think>\n\n", "<think>STOP"]), st.lists(PARTS, max_size=6))


class ListedTexts:
    """Detokenises ids that number the texts of a list."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self._texts[each] for each in token_ids if each != END_ID)

    def flush(self) -> str:
        return ""


@given(answer=ANSWERS, data=st.data(), longest=st.sampled_from([1, 1, 4]), has_stops=st.booleans())
def test_text_gets_its_tokens_and_no_others(
    answer: tuple[str, list[str]], data: st.DataObject, longest: int, has_stops: bool
) -> None:
    whole = answer[0] + "".join(answer[1])
    texts: list[str] = []
    while len("".join(texts)) < len(whole):
        begin = len("".join(texts))
        texts.append(whole[begin : begin + data.draw(st.integers(0 if texts[-1:] != [""] else 1, longest))])
    choice = ChoiceOutput(ListedTexts(texts), [STOP] if has_stops else [], frozenset({END_ID}), keeps_ends=True)
    stream = RequestStream(RequestId("r"), [choice], lambda: None)
    stream.answer = PLAN
    scored = ScoredPieces(choice, PieceReader(JoinedStreams([stream], asyncio.Event())))
    token_ids = [*range(len(texts)), END_ID]
    found = []
    while token_ids and not choice.is_finished:
        frame = token_ids[: data.draw(st.integers(1, 5))]
        first, token_ids = choice.num_tokens, token_ids[len(frame) :]
        logprobs = [TokenLogprobs(-1.0, ())] * len(frame)
        stream.write(0, choice.push(first, frame, None if token_ids else "stop", logprobs))
        for delta in stream.take_new():
            found += scored.read(delta)
    given_ids = [token.token_id for each in found for token in each.tokens]
    assert given_ids == sorted(set(given_ids))
    assert all(not each.tokens for each in found if not isinstance(each.piece, TextPiece))
    pieces = [each for each in found if isinstance(each.piece, TextPiece)]
    for piece, tokens in pieces:
        joined = "".join(texts[token.token_id] for token in tokens if token.token_id != END_ID)
        assert isinstance(piece, TextPiece)
        if longest == 1:
            assert joined == piece.text
        elif len(pieces) == 1:
            assert piece.text in joined
            assert len(joined) - len(piece.text) <= 2 * (longest - 1)
