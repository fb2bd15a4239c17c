"""Checks that, whichever frames are lost, repeated or out of order over several attempts, a choice's text is the text
of its tokens, none twice and none missing, cut where it is cut when the tokens come one by one."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.testing import tiny_codec
from deploy.testing.tiny_family import EOS
from fabric.contracts import TokenLogprobs
from modalities.text import IncrementalDetokenizer
from router.run import ChoiceOutput
from router.run.request_output import TokenOrder

CODEC = tiny_codec()
ENDINGS = frozenset({EOS, ord("z")})

texts = st.text(alphabet=st.sampled_from("abcz –é🙂"), max_size=24)
stop_lists = st.lists(st.text(alphabet=st.sampled_from("abc –é"), min_size=1, max_size=3), max_size=3)
lists_of_ids = st.lists(st.integers(0, 255) | st.just(EOS), max_size=40) | texts.map(CODEC.encode)


def output(stops: list[str]) -> ChoiceOutput:
    return ChoiceOutput(IncrementalDetokenizer(CODEC), stops, ENDINGS)


def one_by_one(ids: list[int], reason: str, stops: list[str]) -> tuple[str, str | None, int]:
    choice = output(stops)
    text = "".join(choice.push(index, (token_id,), None) for index, token_id in enumerate(ids))
    return text + choice.end(len(ids), reason), choice.finish_reason, choice.num_tokens


def plain(ids: list[int], reason: str, stops: list[str]) -> tuple[str, int]:
    """Returns the same by definition: it decodes every prefix and takes the first that contains a stop string."""
    shown = ids[:-1] if reason == "stop" and ids and ids[-1] in ENDINGS else ids
    for count in range(1, len(shown) + 1):
        text = CODEC.decode(shown[:count]).rstrip("\ufffd") if count < len(shown) else CODEC.decode(shown)
        hits = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        if hits:
            return text[: min(hits)[1]], count
    return CODEC.decode(shown), len(ids)


@settings(deadline=None, max_examples=150)
@given(words=texts, reason=st.sampled_from(["stop", "length"]), stops=stop_lists, cut=st.booleans())
def test_one_by_one_is_what_decoding_everything_gives(words: str, reason: str, stops: list[str], cut: bool) -> None:
    ids = [*CODEC.encode(words), EOS] if reason == "stop" else CODEC.encode(words)
    text, finish_reason, num_tokens = one_by_one(ids, reason, stops)
    expected_text, expected_count = plain(ids, reason, stops)
    assert text == expected_text
    assert num_tokens == expected_count
    assert finish_reason is not None


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[int], str, list[tuple[int, int, int, bool]]]:
    """Draws ids, the reason of their end, and frames `(attempt, start, end, says_the_end)` of up to three attempts:
    each later attempt starts where the contiguous tokens of the former ended, and only the last delivers everything."""
    ids = draw(lists_of_ids)
    reason = draw(st.sampled_from(["stop", "length"]))
    num_attempts = draw(st.integers(1, 3))
    frames: list[tuple[int, int, int, bool]] = []
    for attempt in range(num_attempts):
        cuts = sorted({0, len(ids), *draw(st.lists(st.integers(0, len(ids)), max_size=8))})
        pieces = [(attempt, start, end, False) for start, end in pairwise(cuts)]
        is_last = attempt == num_attempts - 1
        some = pieces if is_last else draw(st.lists(st.sampled_from(pieces), max_size=6)) if pieces else []
        repeated = draw(st.lists(st.sampled_from(some), max_size=4)) if some else []
        end = [(attempt, len(ids), len(ids), True)] if is_last else []
        frames += draw(st.permutations([*some, *repeated, *end]))
    return ids, reason, frames


@settings(deadline=None, max_examples=300)
@given(delivery=deliveries(), stops=stop_lists)
def test_delivery_never_changes_the_text(
    delivery: tuple[list[int], str, list[tuple[int, int, int, bool]]], stops: list[str]
) -> None:
    ids, reason, frames = delivery
    choice, text, current = output(stops), "", 0
    for attempt, start, end, says_end in frames:
        if attempt > current:
            current = attempt
            choice.order.restart()
            assert list(choice.emitted) == ids[: len(choice.emitted)]
        text += choice.push(start, ids[start:end], reason if says_end else None)
    assert (text, choice.finish_reason, choice.num_tokens) == one_by_one(ids, reason, stops)
    assert choice.order.token_ids == ids[: len(choice.order.token_ids)]
    assert choice.push(0, ids, reason) == ""


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(0, 9), max_size=30), data=st.data())
def test_order_gives_each_token_once_and_counts_what_is_missing(ids: list[int], data: st.DataObject) -> None:
    order, out, known = TokenOrder(), [], set()
    scores = [TokenLogprobs(-float(index)) for index in range(len(ids))]
    for _ in range(data.draw(st.integers(0, 12))):
        start = data.draw(st.integers(0, len(ids)))
        end = data.draw(st.integers(start, len(ids)))
        out += order.push(start, ids[start:end], scores[start:end])
        known |= set(range(start, end))
        contiguous = next((index for index in range(len(ids) + 1) if index not in known), len(ids))
        assert out == ids[:contiguous] == order.token_ids
        assert order.logprobs == scores[:contiguous]
        last = max(known, default=-1) + 1
        assert order.num_missing == last - len(known)
        assert order.reached is None
    order.end(len(ids), "length")
    out += order.push(0, ids, scores)
    assert out == ids
    assert order.logprobs == scores
    assert order.reached is not None
    assert order.push(len(ids), [1, 2]) == []
