"""Converts text to token ids and back, and conversations to prompts, without torch or transformers.

Text from a client never becomes a control token (`<|im_end|>`, `<|image_pad|>`). A conversation that spells no control
token is tokenised exactly as by transformers' `apply_chat_template`. `TextCodec` combines three things for this: the
checkpoint's tokenizer, its `ChatTemplate`, which renders the conversation, and its `ControlTokens`, which mark
texts from outside before the rendering and cut the result at the marks before it is tokenised.

This module knows nothing of media: a placeholder is one token here. It knows nothing of a checkpoint's files, which
`tokenizer_files` reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import Tokenizer

from fabric.contracts import ConfigError, ContextLengthExceeded, InvalidRequest
from modalities.text.control_tokens import ControlTokens, strings, unused_mark, with_strings
from modalities.text.token_decoding import decoding_of
from modalities.text.tokenizer_files import (
    chat_template,
    eos_token_ids,
    has_processor,
    load_tokenizer,
    special_token_names,
)
from modalities.text.tokenizer_parts import added_ids, continuing, is_spelled_by_model, matching_raw_text

MAX_CHARS_PER_TOKEN = 64
"""Limits the average number of characters per token over a whole context; longer texts are refused untokenised.

English has 4 or 5 characters per token, code has up to 8; only runs of blanks or dashes have more."""
TRIED_CHARS_PER_TOKEN = 8
"""A text with more characters than this per permitted token is first tokenised in part: if a beginning is already too
long, the rest is not tokenised."""


class TextCodec:
    """Holds the tokenizer and chat template of one checkpoint. Its methods change nothing; threads may share it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        eos_token_ids: Sequence[int],
        is_beginning_added: bool = False,
    ) -> None:
        """Combines the parts. With `is_beginning_added`, a conversation gets what the tokenizer puts before a raw
        prompt if the template has not written it. Raises ConfigError for a tokenizer whose decoder is not supported
        (`token_decoding` says which are) and for a control token that can't be guarded."""
        self.decoding = decoding_of(tokenizer)
        control_tokens = _control_tokens(tokenizer, template.literal_text)
        tokenizer = matching_raw_text(tokenizer, control_tokens)
        self._tokenizer = tokenizer
        self._continuing_tokenizer = continuing(tokenizer)
        self._spelled_ids = frozenset(
            tokenizer.token_to_id(token) for token in control_tokens if is_spelled_by_model(tokenizer, token)
        )
        """Holds the ids of control tokens that the model may make out of letters which do not spell them."""
        self._added_ids = added_ids(tokenizer)
        self._chat_prefix = self._added_ids.before if is_beginning_added else ()
        self._template = template
        self._control_tokens = ControlTokens(control_tokens)
        self._special_tokens = ControlTokens(_control_tokens(tokenizer, ""))
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        """Counts the tokens that have a text; the model's logits may be wider because of padding."""
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(id for id, token in added.items() if token.special)
        """Holds the ids that `decode` leaves out by default."""
        self._id_to_bytes: dict[int, bytes] = {}
        self._id_to_piece: dict[int, str | int] = {}

    @classmethod
    def load(cls, model_dir: Path, *, now: Callable[[], datetime] = datetime.now) -> TextCodec:
        """Loads the codec from a model directory. A template's `strftime_now` reads the time from `now`. Raises
        ConfigError for files that can't be used."""
        tokenizer = load_tokenizer(model_dir)
        names = special_token_names(model_dir)
        template = ChatTemplate(chat_template(model_dir), names, now)
        return cls(tokenizer, template, eos_token_ids(model_dir), is_beginning_added=has_processor(model_dir))

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Returns the conversation's token ids, with one placeholder token per medium.

        `messages` are JSON-like: `content` is a string or a list of parts (`{"type": "text", "text": ...}`, `{"type":
        "image"}`). Parts that are all texts are joined by new lines if the template takes only strings, as that of
        Llama-2 does. `template_kwargs` are variables of the template and are untrusted too. With
        `continue_final_message`, the ids end where the content of the last message ends, and `add_generation_prompt`
        changes nothing. Raises InvalidRequest for messages that the template refuses (such as an unknown role) and for
        text that is not Unicode. Raises ContextLengthExceeded for text of far more than `most_tokens` tokens, as soon
        as that is certain, which limits the work for a text that can't fit. A text of only slightly more tokens is
        returned.
        """
        self.check_template()
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        if not self._template.takes_parts:
            messages = [_with_joined_text(message) for message in messages]
        variables = template_kwargs or {}
        try:
            texts = list(strings([messages, variables]))
        except RecursionError as error:
            raise InvalidRequest("messages are nested too deeply", param="messages") from error
        if most_tokens is not None and sum(len(text) for text, _ in texts) > MAX_CHARS_PER_TOKEN * most_tokens:
            raise _too_long(most_tokens)
        render = partial(self._template.render, add_generation_prompt=add_generation_prompt)
        if continue_final_message:
            render = partial(self._template.render_open)
        if all(self._control_tokens.is_harmless(text, is_structural) for text, is_structural in texts):
            return self._begun(self._encode_pieces([render(messages, variables=variables)], most_tokens))
        literals = [self._template.literal_text, *self._control_tokens.tokens]
        mark = unused_mark([*(text for text, _ in texts), *literals])
        free = partial(self._control_tokens.marked, mark=mark)
        structural = partial(self._control_tokens.marked_inside, mark=mark)
        marked_messages = with_strings(messages, free, structural)
        marked_variables = with_strings(variables, free, structural)
        assert isinstance(marked_messages, list)
        assert isinstance(marked_variables, dict)
        rendered = render(marked_messages, variables=marked_variables)
        return self._begun(self._encode_pieces(self._control_tokens.pieces(rendered, mark), most_tokens))

    def _begun(self, ids: list[int]) -> list[int]:
        """Returns the ids of a conversation with its beginning-of-sequence token, if it must have one and has none."""
        num = len(self._chat_prefix)
        return ids if tuple(ids[:num]) == self._chat_prefix else [*self._chat_prefix, *ids]

    def encode(self, text: str, *, is_start: bool = True) -> list[int]:
        """Returns the token ids of text from outside. Characters that spell a control token become ordinary tokens;
        `token_id` returns the id of a control token. Without `is_start`, the text goes on in the middle of another one,
        so that a SentencePiece-like tokenizer puts no blank before it. Raises InvalidRequest for text that is not
        Unicode."""
        return self._encode_guarded(text, self._control_tokens, is_start=is_start)

    def encode_inside(self, text: str, behind: int | None = None) -> list[int]:
        """Returns the token ids of a text of the model's own that stands inside a prompt: behind the control token with
        the id `behind`, or else behind other text. Some SentencePiece-like tokenizers put a blank before a text that
        follows a control token, and some put none."""
        control = None if behind is None else self.token_text(behind)
        if control is not None:
            ids = self._token_ids(control + text, is_continued=False, param="messages")
            if ids[0] == behind:
                return ids[1:]
        return self.encode(text, is_start=False)

    def encode_output(self, text: str) -> list[int]:
        """Returns the token ids with which a model writes this text inside an answer: a mark such as `<tool_call>`,
        which the chat template writes too, is one token. Characters that spell a special token become ordinary
        tokens."""
        return self._encode_guarded(text, self._special_tokens, is_start=False)

    def encode_text_prompt(
        self, text: str, *, add_special_tokens: bool = True, most_tokens: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Returns the token ids of a raw prompt from a client, in which control tokens are text.

        With `add_special_tokens`, the prompt has the ids that the tokenizer's own post-processor puts before and after
        a text, such as the beginning-of-sequence token. Raises InvalidRequest, which names `param`, for text that is
        not Unicode, and ContextLengthExceeded as `render` does."""
        if most_tokens is not None and len(text) > MAX_CHARS_PER_TOKEN * most_tokens:
            raise _too_long(most_tokens, param)
        ids = self._encode_guarded(text, self._control_tokens, most_tokens=most_tokens, param=param)
        return [*self._added_ids.before, *ids, *self._added_ids.after] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True, *, follows_text: bool = False) -> str:
        """Returns the text of the ids. Bytes that are not UTF-8 become U+FFFD; ids without a token become nothing.

        The decoder of a SentencePiece-like tokenizer removes the blank at the start of the text, which such a tokenizer
        puts before every text. This is right for an assistant's message, which is a text of its own: templates trim it
        and write a blank before it themselves (`[/INST] Sure`). With `follows_text`, the ids continue a text, such as
        the prompt of a raw completion, and the blank is kept: the prompt and the result together are then what the
        model wrote."""
        tokenizer = self._continuing_tokenizer if follows_text else self._tokenizer
        return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def shown_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to a text of a byte-level tokenizer; special tokens add none."""
        found = self._id_to_bytes.get(token_id)
        if found is None:
            token = None if token_id in self.special_token_ids else self.token_text(token_id)
            if token is None:
                return b""
            found = self._id_to_bytes[token_id] = self.decoding.token_bytes(token)
        return found

    def shown_piece(self, token_id: int) -> str | int | None:
        """Returns the text or the byte that the token adds inside a text of a SentencePiece-like tokenizer. Special
        tokens and ids without a token add nothing, for which it returns None."""
        found = self._id_to_piece.get(token_id)
        if found is None:
            token = None if token_id in self.special_token_ids else self.token_text(token_id)
            if token is None:
                return None
            found = self._id_to_piece[token_id] = self.decoding.piece(token)
        return found

    def check_template(self) -> None:
        """Raises InvalidRequest if the checkpoint has no chat template, so that it takes no conversations."""
        if not self._template.source.strip():
            message = "the model has no chat template, so it takes no conversations; send a text to /v1/completions"
            raise InvalidRequest(message, param="messages")

    @property
    def template_source(self) -> str:
        """Returns the source of the chat template."""
        return self._template.source

    def token_text(self, token_id: int) -> str | None:
        """Returns the token's entry in the vocabulary, or None if there is none. In a byte-level vocabulary, the entry
        of an ordinary token consists of byte-level letters; in SentencePiece's it has "▁" for blanks."""
        return self._tokenizer.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """Returns the id of the token with this exact text, or None. The token may be a control token."""
        return self._tokenizer.token_to_id(token)

    def _encode_guarded(
        self,
        text: str,
        guarded: ControlTokens,
        *,
        most_tokens: int | None = None,
        param: str = "messages",
        is_start: bool = True,
    ) -> list[int]:
        """Returns the token ids of a text in which no guarded token becomes itself."""
        pieces = [text]
        if guarded.is_contained(text):
            mark = unused_mark([text])
            pieces = guarded.pieces(guarded.marked_inside(text, mark), mark)
        return self._encode_pieces(pieces, most_tokens, param=param, is_start=is_start)

    def _encode_pieces(
        self, pieces: Sequence[str], most_tokens: int | None = None, *, param: str = "messages", is_start: bool = True
    ) -> list[int]:
        """Returns the token ids of a text that is cut inside control tokens. With `most_tokens`, it raises
        ContextLengthExceeded as soon as there are more than twice that many."""
        ids: list[int] = []
        for part, is_continued in self._parts(pieces, is_start):
            ids += self._encode_part(part, is_continued, most_tokens, param)
            if most_tokens is not None and len(ids) > 2 * most_tokens:
                raise _too_long(most_tokens, param)
        return ids

    def _parts(self, pieces: Sequence[str], is_start: bool) -> Iterator[tuple[str, bool]]:
        """Yields the parts of a text that are tokenised one by one, each with whether it continues the part before it.

        A piece after a cut goes on in the middle of a text only up to its first control token. The tokenizer decides
        for itself what it puts before the text after a control token."""
        for index, piece in enumerate(pieces):
            if (index == 0 and is_start) or self._continuing_tokenizer is self._tokenizer:
                yield piece, False
                continue
            end = self._control_tokens.first_start(piece)
            yield piece[:end], True
            if end < len(piece):
                yield piece[end:], False

    def _encode_part(self, part: str, is_continued: bool, most_tokens: int | None, param: str) -> list[int]:
        """Returns the token ids of one part. With `most_tokens`, it first tokenises beginnings of growing length and
        raises ContextLengthExceeded if one has more than twice that many tokens.

        A beginning alone may have more tokens than the same characters have in the whole part, because its last word
        is cut, but never twice as many."""
        if most_tokens is not None:
            tried = TRIED_CHARS_PER_TOKEN * most_tokens
            while tried < len(part):
                if len(self._token_ids(part[:tried], is_continued, param)) > 2 * most_tokens:
                    raise _too_long(most_tokens, param)
                tried *= 4
        return self._token_ids(part, is_continued, param)

    def _token_ids(self, text: str, is_continued: bool, param: str) -> list[int]:
        tokenizer = self._continuing_tokenizer if is_continued else self._tokenizer
        try:
            # A batch (here of one) releases the interpreter's lock; `encode` would hold it for a second with some MB.
            ids = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:  # The library refuses lone surrogates in this way.
            message = "the text is not valid Unicode: it contains a lone surrogate"
            raise InvalidRequest(message, param=param) from error
        if self._spelled_ids.isdisjoint(ids):
            return ids
        parts = self._misspelled_parts(tokenizer, text)
        if len(parts) == 1:
            return ids
        first = self._token_ids(parts[0], is_continued, param)
        rest = [pair for part in parts[1:] for pair in self._parts([part], is_start=False)]
        return first + [token_id for part, goes_on in rest for token_id in self._token_ids(part, goes_on, param)]

    def _misspelled_parts(self, tokenizer: Tokenizer, text: str) -> list[str]:
        """Returns the text, cut inside each part that became a control token without spelling it. Raises InvalidRequest
        if such a part has only one character."""
        encoding = tokenizer.encode_batch([text], add_special_tokens=False)[0]
        cuts = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._spelled_ids and text[start:end].strip() != (token := tokenizer.id_to_token(token_id)):
                if end - start < 2:
                    raise InvalidRequest(f"the character {text[start:end]!r} must not stand for the token {token}")
                cuts.append(start + 1)
        return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _too_long(most_tokens: int, param: str = "messages") -> ContextLengthExceeded:
    message = f"this model's context is {most_tokens} tokens, and the prompt has many more"
    return ContextLengthExceeded(message, param=param)


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
            raise ConfigError(
                f"the control token {text!r} can't be distinguished from ordinary text: it must have at least two "
                "characters, and no white space at its ends"
            )
        tokens.append(text)
    return tokens


# ------------------------------------------------------------ chat templates

# A client may not set these names: they hold the conversation and the template itself (CVE-2025-62426).
RESERVED_VARIABLES = frozenset({"add_generation_prompt", "chat_template", "messages", "self"})
PROBE = "0123456789"
"""Is the text by which `ChatTemplate` finds out what the template takes; no template changes digits."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """Renders one chat template (Jinja in a sandbox) as transformers' `apply_chat_template` renders it.
    `special_tokens` are variables of the template (`eos_token`). Threads may share it.

    The environment (options, filters, globals, the `generation` tag) follows transformers/utils/chat_template_utils.py
    of 5.23; a parity test compares the two. The class knows nothing of token ids."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        """Compiles the template. Raises ConfigError if the source is no template."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template can't be compiled: {error}") from error
        literals = {data.data for data in tree.find_all(nodes.TemplateData)}
        literals |= {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}
        self.literal_text = "\0".join(sorted(literals))
        """Holds all text that the template can write by itself: its literals, joined by NUL."""
        parts = [{"type": "text", "text": PROBE}]
        self.takes_parts = self._shows_probe(parts) or not self._shows_probe(PROBE)
        """Is false if the template shows a content that is a string and not one that is a list of parts."""

    def render(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool, variables: Mapping[str, object]
    ) -> str:
        """Returns the rendered conversation. Raises InvalidRequest if the template refuses the messages or fails on
        them, and for a reserved variable."""
        if reserved := sorted((RESERVED_VARIABLES | self._special_tokens.keys()) & variables.keys()):
            message = f"a request can't set {reserved[0]}, because the chat template uses it itself"
            raise InvalidRequest(message, param="chat_template_kwargs")
        prepared = [_with_reasoning_names(message) for message in messages]
        defaults: dict[str, object] = {"tools": None, "documents": None, **self._special_tokens}
        context = {**defaults, **variables, "messages": prepared, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(context)
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}", param="messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # The template computes with the client's data, so these type errors come from the request, not from Weft.
            kind = type(error).__name__
            raise InvalidRequest(f"the chat template can't render the messages ({kind})", param="messages") from error

    def render_open(self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]) -> str:
        """Returns the rendered conversation up to the end of the last message's content, so that a model continues that
        message. Raises InvalidRequest as `render` does, and if the template does not show the content as it is.

        The rules are those of transformers' `continue_final_message`: a tag behind the content shows where it ends, and
        if the template trims the content, the white space at its end is gone. The tag here is one unused character, so
        that no text can contain it, and a template that shows the content twice shows it without the tag."""
        literals = (self.literal_text, *self._special_tokens.values())
        tag = unused_mark([*(text for text, _ in strings([messages, variables])), *literals])
        content, tagged = _with_tag(messages[-1], tag)
        rendered = self.render([*messages[:-1], tagged], False, variables)
        *shown, rest = rendered.split(tag)
        if not shown or content.strip() not in rendered:
            message = "the chat template does not show the last message's content as it is, so it can't be continued"
            raise InvalidRequest(message, param="continue_final_message")
        return "".join(_before_tags([*shown, rest]))

    def _shows_probe(self, content: object) -> bool:
        """Returns true if the template shows the text of this content, and not its parts as Python or JSON writes
        them."""
        try:
            rendered = self.render([{"role": "user", "content": content}], True, {})
        except InvalidRequest:
            return False
        return PROBE in rendered and f"'{PROBE}'" not in rendered and f'"{PROBE}"' not in rendered


def _with_joined_text(message: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the message with its parts as one string if all of them are texts, else the message itself."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    strings_only = [text for text in texts if isinstance(text, str)]
    return message if len(strings_only) != len(content) else {**message, "content": "\n".join(strings_only)}


def _with_tag(message: Mapping[str, object], tag: str) -> tuple[str, dict[str, object]]:
    """Returns the last text of a message's content, and the message with `tag` and a blank behind that text. Raises
    InvalidRequest if the message has no text."""
    content = message.get("content")
    if isinstance(content, str):
        return content, {**message, "content": f"{content}{tag} "}
    parts = list(content) if isinstance(content, Sequence) else []
    for index, part in reversed(list(enumerate(parts))):
        text = part.get("text") if isinstance(part, Mapping) else None
        if isinstance(text, str):
            parts[index] = {**part, "text": f"{text}{tag} "}
            return text, {**message, "content": parts}
    raise InvalidRequest("the last message has no text that could be continued", param="continue_final_message")


def _before_tags(pieces: Sequence[str]) -> Iterator[str]:
    """Yields the pieces of a text that was split at its tags, but not the last one. The blank behind a tag is left out
    too. If the template has trimmed that blank, it would have trimmed the white space before the tag."""
    is_blank_left = False
    for piece, following in pairwise(pieces):
        shown = piece[1:] if is_blank_left else piece
        is_blank_left = following.startswith(" ")
        yield shown if is_blank_left else shown.rstrip()


def _with_reasoning_names(message: Mapping[str, object]) -> dict[str, object]:
    """Returns the message without None fields, and with its reasoning under the two names that templates read."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in REASONING_FIELDS if key in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Writes plain JSON; Jinja's own `tojson` escapes it for HTML."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        return now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], undefined=jinja2.Undefined
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _GenerationTag(Extension):
    """Renders `{% generation %}`, which marks the assistant's text for training, as if the tag were not there."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """Replaces `dict` in templates, without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """Replaces `namespace` in templates, without underscore attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # This lets `namespace(self=...)` work, as in jinja2.
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template can't store {name!r} in a namespace")
