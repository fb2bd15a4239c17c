"""Converts text to token ids and back, and conversations to prompts, without torch or transformers.

Text from a client never becomes a control token. A conversation that spells no control token is tokenised exactly as by
transformers' `apply_chat_template`. This module knows nothing of media: a placeholder is one token here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from fabric.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from modalities.text import checkpoint
from modalities.text.control_tokens import ControlTokens, strings, unused_mark, with_strings
from modalities.text.template import ChatTemplate
from modalities.text.tokenizer_files import load_tokenizer

MAX_CHARS_PER_TOKEN = 64
"""Limits the average number of characters per token over a whole context; longer texts are refused untokenised.

English has 4 or 5 characters per token, code has up to 8; only runs of blanks or dashes have more."""
TRIED_CHARS_PER_TOKEN = 8
"""A text with more characters than this per permitted token is first tokenised in part: if a beginning is already too
long, the rest is not tokenised."""


class TextCodec:
    """Holds the tokenizer and chat template of one checkpoint. Its methods change nothing; threads may share it."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, eos_token_ids: Sequence[int]) -> None:
        """Raises ConfigError for a tokenizer that is not byte-level and for a control token that can't be guarded."""
        if not isinstance(tokenizer.decoder, ByteLevel):
            raise ConfigError("the tokenizer's decoder is not byte-level; only byte-level ones are supported")
        self._tokenizer = tokenizer
        self._template = template
        self._control_tokens = ControlTokens(_control_tokens(tokenizer, template.literal_text))
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        """Counts the tokens that have a text; the model's logits may be wider because of padding."""
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(id for id, token in added.items() if token.special)
        """Holds the ids that `decode` leaves out by default."""

    @classmethod
    def load(cls, model_dir: Path, *, now: Callable[[], datetime] = datetime.now) -> TextCodec:
        """Loads the codec from a model directory. A template's `strftime_now` reads the time from `now`. Raises
        ConfigError for files that can't be used."""
        tokenizer = load_tokenizer(model_dir)
        names = checkpoint.special_token_names(model_dir)
        template = ChatTemplate(checkpoint.chat_template(model_dir), names, now)
        return cls(tokenizer, template, checkpoint.eos_token_ids(model_dir))

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Returns the conversation's token ids, with one placeholder token per medium.

        `messages` are JSON-like: `content` is a string or a list of parts (`{"type": "text", "text": ...}`,
        `{"type": "image"}`). `template_kwargs` are variables of the template and are untrusted too. Raises
        InvalidRequest for messages that the template refuses (such as an unknown role) and for text that is not
        Unicode. Raises ContextLengthExceeded for text of far more than `most_tokens` tokens, as soon as that is
        certain, which limits the work for a text that can't fit. A text of only slightly more tokens is returned.
        """
        if not messages:
            raise InvalidRequest("messages can't be empty", param="messages")
        variables = template_kwargs or {}
        try:
            texts = list(strings([messages, variables]))
        except RecursionError as error:
            raise InvalidRequest("messages are nested too deeply", param="messages") from error
        if most_tokens is not None and sum(len(text) for text, _ in texts) > MAX_CHARS_PER_TOKEN * most_tokens:
            raise _too_long(most_tokens)
        render = partial(self._template.render, add_generation_prompt=add_generation_prompt)
        if all(self._control_tokens.is_harmless(text, is_structural) for text, is_structural in texts):
            return self._encode_pieces([render(messages, variables=variables)], most_tokens)
        literals = [self._template.literal_text, *self._control_tokens.tokens]
        mark = unused_mark([*(text for text, _ in texts), *literals])
        free = partial(self._control_tokens.marked, mark=mark)
        structural = partial(self._control_tokens.marked_inside, mark=mark)
        marked_messages = with_strings(messages, free, structural)
        marked_variables = with_strings(variables, free, structural)
        assert isinstance(marked_messages, list)
        assert isinstance(marked_variables, dict)
        rendered = render(marked_messages, variables=marked_variables)
        return self._encode_pieces(self._control_tokens.pieces(rendered, mark), most_tokens)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of text from outside. Characters that spell a control token become ordinary tokens;
        `token_id` returns the id of a control token. Raises InvalidRequest for text that is not Unicode."""
        if not self._control_tokens.is_contained(text):
            return self._encode_pieces([text])
        mark = unused_mark([text])
        return self._encode_pieces(self._control_tokens.pieces(self._control_tokens.marked_inside(text, mark), mark))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of the ids. Bytes that are not UTF-8 become U+FFFD; ids without a token become nothing."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str | None:
        """Returns the token's entry in the vocabulary, or None if there is none. An ordinary token's entry consists of
        byte-level letters."""
        return self._tokenizer.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """Returns the id of the token with this exact text, or None. The token may be a control token."""
        return self._tokenizer.token_to_id(token)

    def _encode_pieces(self, pieces: Iterable[str], most_tokens: int | None = None) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            ids += self._encode_piece(piece, most_tokens)
            if most_tokens is not None and len(ids) > 2 * most_tokens:
                raise _too_long(most_tokens)
        return ids

    def _encode_piece(self, piece: str, most_tokens: int | None) -> list[int]:
        """Returns the token ids of one piece. With `most_tokens`, it first tokenises beginnings of growing length and
        raises ContextLengthExceeded if one has more than twice that many tokens.

        A beginning alone may have more tokens than the same characters have in the whole piece, because its last word
        is cut, but never twice as many."""
        if most_tokens is not None:
            tried = TRIED_CHARS_PER_TOKEN * most_tokens
            while tried < len(piece):
                if len(self._token_ids(piece[:tried])) > 2 * most_tokens:
                    raise _too_long(most_tokens)
                tried *= 4
        return self._token_ids(piece)

    def _token_ids(self, text: str) -> list[int]:
        try:
            # A batch (here of one) releases the interpreter's lock; `encode` would hold it for a second with some MB.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:  # The library refuses lone surrogates in this way.
            raise InvalidRequest("the text is not valid Unicode (a lone surrogate)", param="messages") from error


def _too_long(most_tokens: int) -> ContextLengthExceeded:
    message = f"this model's context is {most_tokens} tokens; the prompt has many more"
    return ContextLengthExceeded(message, param="messages")


def _control_tokens(tokenizer: Tokenizer, template_text: str) -> list[str]:
    """Returns the control tokens: special tokens and other added tokens that the template itself writes (`<think>`).

    The rule is that of transformers' `sanitize_control_tokens`. White space that was added as a token is ordinary text.
    Raises ConfigError for a control token that can't be guarded."""
    tokens = []
    for token in tokenizer.get_added_tokens_decoder().values():
        text = token.content
        if text.isspace() or not (token.special or text in template_text):
            continue
        if len(text) < 2 or text != text.strip():
            raise ConfigError(f"the control token {text!r} can't be told from text")
        if token.normalized and tokenizer.normalizer is not None:
            raise ConfigError(f"the control token {text!r} is matched after normalisation, which can't be guarded")
        tokens.append(text)
    return tokens
