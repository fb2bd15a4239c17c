"""Text to token ids and back, and conversations to prompts, without torch or transformers.

What a client wrote never becomes a control token; a conversation that spells none is tokenised exactly as
transformers' `apply_chat_template` does. Does not know media: a placeholder is one token here.
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
"""On average over a whole context. English has 4 or 5, code up to 8; only runs of blanks or dashes have more."""
TRIED_CHARS_PER_TOKEN = 8
"""Of a text that has more, a beginning is tokenised first: if that is too long, the rest is not looked at."""


class TextCodec:
    """The tokenizer and chat template of one checkpoint. Immutable in use; safe between threads."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, eos_token_ids: Sequence[int]) -> None:
        """Raises ConfigError for a tokenizer that is not byte-level, or a control token that can't be guarded."""
        if not isinstance(tokenizer.decoder, ByteLevel):
            raise ConfigError("the tokenizer's decoder is not byte-level; only byte-level ones are supported")
        self._tokenizer = tokenizer
        self._template = template
        self._control_tokens = ControlTokens(_control_tokens(tokenizer, template.literal_text))
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        """Number of tokens with a text; the model's logits may be wider (padding)."""
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(id for id, token in added.items() if token.special)
        """The ids that `decode` leaves out."""

    @classmethod
    def load(cls, model_dir: Path, *, now: Callable[[], datetime] = datetime.now) -> TextCodec:
        """From a model directory. `now` is what a template's `strftime_now` reads. Raises ConfigError."""
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
        """The conversation's token ids, one placeholder token per medium.

        `messages` are JSON-like: `content` is a string or a list of parts (`{"type": "text", "text": ...}`,
        `{"type": "image"}`). `template_kwargs` are variables of the template, untrusted as well. Raises
        InvalidRequest for what the template refuses (an unknown role) and for text that is not Unicode;
        ContextLengthExceeded for text of far more than `most_tokens`, as soon as that is plain: the work for a text
        that fits nowhere is bounded. One that has only some more is returned.
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
        """Of text from outside: what spells a control token becomes ordinary tokens (see `token_id`). Raises
        InvalidRequest for text that is not Unicode."""
        if not self._control_tokens.is_contained(text):
            return self._encode_pieces([text])
        mark = unused_mark([text])
        return self._encode_pieces(self._control_tokens.pieces(self._control_tokens.marked_inside(text, mark), mark))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Bytes that are not UTF-8 become U+FFFD; ids without a token become nothing."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str | None:
        """As it stands in the vocabulary (byte-level letters for an ordinary token), or None."""
        return self._tokenizer.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """Of a token by its exact text, control tokens too, or None."""
        return self._tokenizer.token_to_id(token)

    def _encode_pieces(self, pieces: Iterable[str], most_tokens: int | None = None) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            ids += self._encode_piece(piece, most_tokens)
            if most_tokens is not None and len(ids) > 2 * most_tokens:
                raise _too_long(most_tokens)
        return ids

    def _encode_piece(self, piece: str, most_tokens: int | None) -> list[int]:
        """A beginning alone may have more tokens than the same characters have in the whole (the last word is cut), but
        never twice as many."""
        if most_tokens is not None:
            tried = TRIED_CHARS_PER_TOKEN * most_tokens
            while tried < len(piece):
                if len(self._token_ids(piece[:tried])) > 2 * most_tokens:
                    raise _too_long(most_tokens)
                tried *= 4
        return self._token_ids(piece)

    def _token_ids(self, text: str) -> list[int]:
        try:
            # A batch of one: unlike `encode`, it releases the interpreter's lock, for a second with some MB of text.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:  # how the library refuses lone surrogates
            raise InvalidRequest("the text is not valid Unicode (a lone surrogate)", param="messages") from error


def _too_long(most_tokens: int) -> ContextLengthExceeded:
    message = f"this model's context is {most_tokens} tokens; the prompt has many more"
    return ContextLengthExceeded(message, param="messages")


def _control_tokens(tokenizer: Tokenizer, template_text: str) -> list[str]:
    """Special tokens, and other added tokens that the template itself writes (`<think>`), as in transformers'
    `sanitize_control_tokens`; white space that was added as a token is ordinary text."""
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
