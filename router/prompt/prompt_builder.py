"""Turns a request into a `Prompt`: `PromptBuilder` checks the request and has its media probed, which gives a
`Draft`, and then plans, tokenises, expands and hashes it.

The work is split in two, because the degradation policy plans a request again: `read` runs once, and `plan` runs again
each time something has to be left out. Cheap checks come first; expensive work (JSON, base64, hashing, tokenising) runs
in threads of its kind (`RequestThreads`, `request_threads.py`). Nothing that a client sends is read in the event loop's
own executor: a few large media would fill it and delay the reading of every other request. The module decodes no pixels
and knows nothing of workers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from fabric.contracts import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    KvScheme,
    MediaItem,
    PlaceholderRange,
    PromptOutputs,
    SamplingParams,
    StopConditions,
)
from kv_index import prompt_block_hashes
from modalities.family import ExpandedPrompt, Family, HasLeastPixels, ImageHeader, MediaOptions
from modalities.registry import Registry
from modalities.text import TextCodec, token_bytes
from router.api import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    MediaPart,
    Part,
    TextPart,
    ToolCall,
    check_context,
    check_generation,
    check_messages,
    parts_of,
    shown,
    video_options,
)
from router.fetch import MediaFetcher
from router.prompt.answer_formats import PLAIN, AnswerFormats, AnswerPlan, called_arguments, check_tools
from router.prompt.generation_options import (
    check_patterns,
    grammar_of,
    sampling_of,
    stop_conditions,
    structure_field,
    too_slow,
)
from router.prompt.given_features import ImageEmbedsReader
from router.prompt.grammar_checks import GrammarChecks
from router.prompt.named_media import NamedMedia
from router.prompt.request_media import (
    NOTHING_LOST,
    VIDEO,
    ItemKey,
    Losses,
    MediaPlanner,
    MediaReader,
    MediaSources,
    MediumFile,
    PlannedItem,
    ProbedMedium,
    Prober,
)
from router.prompt.request_threads import RequestThreads, Work
from router.prompt.speech_options import SpeechOptions, speech_of
from router.prompt.url_media import UNACCOUNTED, FetchAccount, UrlMedia
from router.router_config import RouterConfig

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=GenerationFields)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A `Prompt` is a request as the cluster sees it: ids, media and stops. It is frozen, and is kept until the
    request's terminal event. It knows nothing of the client's format. Its block hashes are computed for the schemes
    that are asked for, each once."""

    token_ids: tuple[int, ...]
    """Holds one id per position, with placeholders expanded."""
    placeholders: tuple[PlaceholderRange, ...]
    media: tuple[MediaItem, ...]
    media_files: tuple[MediumFile, ...]
    """Holds the encoded file of each medium, because an encoding may be needed again at any time."""
    sampling: SamplingParams
    stop: StopConditions
    stop_strings: tuple[str, ...] = ()
    num_choices: int = 1
    cache_salt: str = ""
    priority: int = 0
    ignored_fields: tuple[str, ...] = ()
    prompt_outputs: PromptOutputs = field(default_factory=PromptOutputs)
    """Says what the request wants of its prompt besides generated tokens."""
    speech: SpeechOptions | None = None
    """Says how the answer is spoken; None means that it is text alone."""
    given_answer: tuple[int, ...] = ()
    """Holds the tokens of the answer, and the one that ends it, if the client gives them and wants to hear them."""
    adapter: str = ""
    """Names the LoRA adapter that computes the answer; it is empty for the model itself."""
    _scheme_to_hashes: dict[KvScheme, bytes] = field(default_factory=dict, repr=False, compare=False)

    def block_hashes(self, scheme: KvScheme) -> bytes:
        """Returns the hashes of the prompt's full blocks, side by side. They are computed at the first call."""
        hashes = self._scheme_to_hashes.get(scheme)
        if hashes is None:
            salt, adapter = self.cache_salt, self.adapter
            hashes = prompt_block_hashes(scheme, self.token_ids, self.placeholders, self.media, salt, adapter)
            self._scheme_to_hashes[scheme] = hashes
        return hashes

    def scheme_to_hashes(self, schemes: Iterable[KvScheme]) -> dict[KvScheme, bytes]:
        """Returns the hashes in each of these schemes by which workers find the prompt's blocks. It returns none if
        workers must compute every position: what they have cached does not help then."""
        if self.prompt_outputs.needs_all_positions:
            return {}
        return {scheme: self.block_hashes(scheme) for scheme in schemes}

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Returns the ids that end a choice; the id that ends it adds no text."""
        eos = () if self.stop.ignore_eos else self.stop.eos_token_ids
        return frozenset((*eos, *self.stop.stop_token_ids))

    @property
    def facts(self) -> dict[str, object]:
        """Returns facts for the trace: the length of the prompt, and what each medium became."""
        media = [
            {
                "part": item.part,
                "mm_hash": item.mm_hash,
                "modality": item.modality,
                "num_tokens": item.num_tokens,
                "cost": item.cost,
                "options": item.options,
            }
            for item in self.media
        ]
        return {"num_prompt_tokens": len(self.token_ids), "num_media": len(media), "media": media}

    @property
    def modality_to_tokens(self) -> dict[str, int]:
        """Returns the number of prompt tokens per modality."""
        counts: Counter[str] = Counter()
        for run in self.placeholders:
            counts[self.media[run.item].modality] += run.length
        return dict(counts)


PromptRequest = ChatRequest | CompletionRequest
"""Is a request of which a prompt can be made; a completion has one prompt."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A `Draft` is a request that was read: it holds everything from which the request's prompt is made, once or
    several times. It lives as long as the request, so it holds each medium once, as bytes, and not as the client's
    text."""

    request: PromptRequest
    """This is the request; a chat is without the contents of its messages."""
    contents: tuple[str | list[Part], ...]
    """Holds one entry per message of a chat."""
    media: tuple[ProbedMedium, ...]
    video_options: MediaOptions
    sampling: SamplingParams
    """This is drawn once, so that a prompt that is made again draws the same tokens."""
    answer: AnswerPlan = PLAIN
    speech: SpeechOptions | None = None


PARSE_IN_THREAD_BYTES = 64 * 1024
"""A body of at most this many bytes is parsed in the event loop, because that takes less time than changing threads."""
MAX_TEXT_BYTES = 2**20
"""A larger body is hardly text alone, so it is parsed in threads of its own, and text does not wait behind media."""
CHARS_PER_MESSAGE = 64
"""Each message counts as this many characters more, because the template has work with it."""
SHORT_TEXT_CHARS = 4096
FEW_PICTURES = 8
FEW_PIXELS = 2**22
"""A prompt of at most this many characters, with at most so many pictures of so many pixels together, is made in the
event loop: that takes half a millisecond at most, which is less than changing threads."""
MAX_FITTINGS = 3
"""Limits how often the media are planned for one prompt. Each time after the first, videos get fewer frames, to make
room for the text that a family writes between the frames."""


class PromptBuilder:
    """A `PromptBuilder` makes prompts from requests. It has no state but its threads, the prober and the fetcher, which
    run from `start` to `close`. Each router has one. Without a fetcher it takes only `data:` URLs."""

    def __init__(
        self,
        config: RouterConfig,
        family: Family,
        codec: TextCodec,
        registry: Registry,
        prober: Prober,
        fetcher: MediaFetcher | None = None,
    ) -> None:
        self.family = family
        self.max_items = served_items(family, config.max_items_per_prompt)
        self._started_with = frozenset(self.max_items)
        self._config = config
        self.codec = codec
        self._registry = registry
        self._prober = prober
        self._url_media = UrlMedia(fetcher)
        self._threads = RequestThreads()
        self._reader = MediaReader(
            config.model_name,
            self.max_items,
            config.media_limits,
            registry,
            prober,
            self._in_media_thread,
            MediaSources(
                self._url_media,
                NamedMedia(config.named_media_bytes),
                ImageEmbedsReader(family, config.feature_dtype, is_enabled=config.takes_image_embeds),
            ),
        )
        self._planner = MediaPlanner(family)
        self._formats = AnswerFormats(codec, config.tool_format, config.reads_reasoning)
        self._grammars = GrammarChecks(codec, family.shape.vocab_size, config.grammar)
        self._kv_schemes: tuple[KvScheme, ...] = ()

    async def start(self) -> None:
        """Starts the fetcher, if media are served, and the prober, if a served modality needs it. Raises
        NoCapacity."""
        if self.max_items:
            await self._url_media.start()
        if any(
            self._registry.modality(name).needs_process for name in self.max_items if self._registry.has_modality(name)
        ):
            await self._prober.start()

    def reconfigure(self, config: RouterConfig) -> None:
        """Takes the limits and policies of `config` for the requests that are read from now on. Raises ConfigError, and
        changes nothing, if a modality is served for which nothing was started."""
        max_items = served_items(self.family, config.max_items_per_prompt)
        if missing := sorted(max_items.keys() - self._started_with):
            raise ConfigError(
                f"this router started without {', '.join(missing)} (media.limit_mm_per_prompt), and serves a further "
                "modality only after a restart"
            )
        if config.grammar != self._config.grammar:
            self._grammars = GrammarChecks(self.codec, self.family.shape.vocab_size, config.grammar)
        self.max_items = self._reader.max_items = max_items
        self._config = config

    def use_schemes(self, schemes: Collection[KvScheme]) -> None:
        """Sets the schemes for which later prompts are hashed in the thread that makes them. A prompt computes the
        hashes of any other scheme when it is asked for them."""
        self._kv_schemes = tuple(schemes)

    async def close(self) -> None:
        self._threads.close()
        await asyncio.gather(self._url_media.close(), self._prober.close())

    async def parse(self, read: Callable[[bytes], T], body: bytes) -> T:
        """Returns what `read` makes of a request's body. Raises the InvalidRequest that `read` raises."""
        if len(body) <= PARSE_IN_THREAD_BYTES:
            return read(body)
        return await self._threads.run(Work.BODY if len(body) <= MAX_TEXT_BYTES else Work.LARGE_BODY, read, body)

    async def read(self, request: PromptRequest, account: FetchAccount = UNACCOUNTED) -> Draft:
        """Checks a request, and fetches and probes its media; `account` is told what is fetched. Raises a
        RequestRefused whose `param` names the offending part of the request; raises Busy or Unavailable if a medium
        can't be read now."""
        vocab_size = self.family.shape.vocab_size
        check_generation(request, self._config, vocab_size)
        if isinstance(request, ChatRequest):
            return await self._read_chat(request, account)
        check_token_ids(request.token_ids, vocab_size, self.family.shape.max_model_len, request.prompt_place)
        grammar = await self._compiled(self._completion_grammar, request) if request.is_structured else ""
        sampling = sampling_of(request, vocab_size, grammar)
        return Draft(request, (), (), self._config.video_options, sampling)

    async def _read_chat(self, chat: ChatRequest, account: FetchAccount) -> Draft:
        self.codec.check_template()
        check_messages(chat, self._config)
        speech = speech_of(chat, self._config)
        _check_parts(chat, self._config.max_content_parts)
        salt, is_media = chat.cache_salt or "", self._is_media
        read = (parts_of(message, index, is_media) for index, message in enumerate(chat.messages))
        contents = tuple(self._reader.identified(content, salt) for content in read)
        parts = [part for content in contents if not isinstance(content, str) for part in content]
        media = [part for part in parts if isinstance(part, MediaPart)]
        if len(media) > self._config.max_media_items:
            message = f"a request may have at most {self._config.max_media_items} media, not {len(media)}"
            raise InvalidRequest(message, param="messages")
        kwargs = chat.mm_processor_kwargs
        with_sound_tracks = None if kwargs is None else kwargs.use_audio_in_video
        if kwargs is not None and kwargs.min_pixels is not None:
            check_min_pixels(self.family)
        probed = await self._reader.read(media, with_sound_tracks, salt, account)
        if kwargs is not None:
            probed = [medium.limited_to(kwargs.min_pixels, kwargs.max_pixels) for medium in probed]
        answer, grammar = PLAIN, ""
        if chat.is_structured or chat.tools or self._formats.reasoning is not None:
            answer, grammar = await self._compiled(self._answer, chat)
        sampling = sampling_of(chat, self.family.shape.vocab_size, grammar)
        return Draft(
            request=without_contents(chat),
            contents=tuple(content if isinstance(content, str) else without_fields(content) for content in contents),
            media=tuple(probed),
            video_options=video_options(self._config.video_options, kwargs),
            sampling=sampling,
            answer=answer,
            speech=speech,
        )

    def _answer(self, chat: ChatRequest) -> tuple[AnswerPlan, str]:
        """Returns how the answer is read, and the grammar that it must match. Raises InvalidRequest."""
        limits = self._config.grammar
        check_tools(chat, limits)
        check_patterns([tool.function.parameters for tool in chat.tools or ()], "tools", limits)
        answer = self._formats.plan(chat)
        response = grammar_of(chat, limits)
        grammar = self._formats.checked_grammar(answer, response, limits)
        self._grammars.check(grammar, response.param or "tools")
        return answer, grammar

    def _completion_grammar(self, request: CompletionRequest) -> str:
        """Returns the grammar that a completion must match. Raises InvalidRequest."""
        grammar = grammar_of(request, self._config.grammar)
        self._grammars.check(grammar.text, grammar.param)
        return grammar.text

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, control tokens included. Raises InvalidRequest."""
        shape = self.family.shape
        check_token_ids(token_ids, shape.vocab_size, shape.max_model_len, "tokens")
        return await self._threads.run(Work.PROMPT, self.codec.decode, token_ids, False)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token."""

        def texts() -> list[str]:
            return [token_bytes(self.codec, token_id).decode(errors="replace") for token_id in token_ids]

        return await self._threads.run(Work.PROMPT, texts)

    async def plan(self, draft: Draft, losses: Losses = NOTHING_LOST) -> Prompt:
        """Returns the prompt without what was lost. Raises a RequestRefused."""
        if _is_short(draft) and _has_few_media(draft):
            return self._plan(draft, losses)
        return await self._threads.run(Work.MEDIA_PROMPT if draft.media else Work.PROMPT, self._plan, draft, losses)

    def is_reducible(self, draft: Draft, key: ItemKey, reduction: int) -> bool:
        """Returns whether the item, already reduced `reduction` times, would cost less if it were reduced once more."""
        medium = next(medium for medium in draft.media if medium.part == key.part)
        return self._planner.is_reducible(medium, key, draft.video_options, reduction)

    def shown_token_ids(self, draft: Draft) -> frozenset[int]:
        """Returns the ids of control tokens that an answer's text must show, because its parser reads them."""
        return frozenset() if draft.answer.is_plain else self._formats.shown_token_ids(draft.answer)

    async def _compiled(self, compile_grammar: Callable[[R], T], request: R) -> T:
        """Runs a function that compiles the request's grammar in a thread. Raises InvalidRequest, also if that takes
        longer than the limit, counted from when a thread is free for it."""
        limits, loop = self._config.grammar, asyncio.get_running_loop()
        begun = asyncio.Event()

        def compiled() -> T:
            loop.call_soon_threadsafe(begun.set)
            return compile_grammar(request)

        work = asyncio.ensure_future(self._threads.run(Work.GRAMMAR, compiled))
        try:
            await begun.wait()
            async with asyncio.timeout(limits.compile_timeout_s):
                return await work
        except TimeoutError:
            raise too_slow(structure_field(request) or "tools", limits) from None
        finally:
            work.cancel()

    async def _in_media_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._threads.run(Work.MEDIA, function, *args, **kwargs)

    # ------------------------------------------------------------ planning (in a thread)

    def _plan(self, draft: Draft, losses: Losses) -> Prompt:
        request, longest = draft.request, self.family.shape.max_model_len
        rendered = self._rendered(draft, losses)
        items, expanded = self._fitted(draft, losses, rendered)
        media = tuple(planned.item for planned in items)
        num_tokens = len(expanded.token_ids)
        prompt = Prompt(
            token_ids=tuple(expanded.token_ids),
            placeholders=expanded.placeholders,
            media=media,
            media_files=tuple(planned.file for planned in items),
            sampling=draft.sampling,
            prompt_outputs=request.prompt_outputs,
            stop=stop_conditions(request, num_tokens, longest, self.codec.eos_token_ids),
            stop_strings=tuple(request.stop or ()),
            num_choices=request.num_choices,
            cache_salt=request.cache_salt or "",
            priority=request.priority or 0,
            speech=draft.speech,
            given_answer=self._given_answer(request, num_tokens),
            ignored_fields=tuple(request.ignored_fields),
            adapter=self._config.adapter_of(request.model),
        )
        for scheme in self._kv_schemes:
            prompt.block_hashes(scheme)
        return prompt

    def _fitted(
        self, draft: Draft, losses: Losses, rendered: Sequence[int]
    ) -> tuple[list[PlannedItem], ExpandedPrompt]:
        """Returns items and an expanded prompt that fit into the context. Families may write text between a video's
        frames (times), and its length is known only afterwards; if it takes too much, the video gets fewer frames.
        Raises ContextLengthExceeded."""
        request, longest = draft.request, self.family.shape.max_model_len
        num_text = len(rendered) - _num_placeholders(draft, losses)
        most = longest - self._answer_tokens(request)
        room = most - num_text
        for _ in range(MAX_FITTINGS):
            items = self._planner.plan(draft.media, draft.video_options, room, request.cache_salt or "", losses)
            plans = [planned.plan for planned in items]
            num_video = sum(sum(plan.unit_tokens) for plan in plans if plan.modality == VIDEO)
            num_other = sum(sum(plan.unit_tokens) for plan in plans) - num_video
            check_context(num_text + num_other + num_video, request, longest)
            expanded = self.family.expand(rendered, plans, self.codec.encode_inside)
            taken = len(expanded.token_ids) - num_text - num_other
            if not num_video or len(expanded.token_ids) <= most:
                break
            room = num_other + num_video * max(0, most - num_text - num_other) // taken
        check_context(len(expanded.token_ids), request, longest)
        return items, expanded

    def _given_answer(self, request: PromptRequest, num_prompt_tokens: int) -> tuple[int, ...]:
        """Returns the tokens of an answer that is given. Raises ContextLengthExceeded."""
        text = request.answer_text if isinstance(request, ChatRequest) else None
        if text is None:
            return ()
        token_ids, longest = self.codec.encode_inside(text), self.family.shape.max_model_len
        if num_prompt_tokens + len(token_ids) + 1 > longest:
            message = f"this model's context is {longest} tokens, but the text to read has {len(token_ids)}"
            raise ContextLengthExceeded(message, param=request.prompt_place)
        return (*token_ids, self.codec.eos_token_ids[0])

    def _answer_tokens(self, request: PromptRequest) -> int:
        """Returns the number of tokens of the context that videos must leave to the answer."""
        if request.token_limit is not None:
            return request.token_limit
        return min(self._config.answer_tokens, self.family.shape.max_model_len // 8)

    # ------------------------------------------------------------ messages

    def _is_media(self, part_type: str) -> bool:
        return self._registry.modality_of_part(part_type) is not None

    def _rendered(self, draft: Draft, losses: Losses) -> list[int]:
        """Returns the token ids of the prompt, with one placeholder token per medium."""
        request, longest = draft.request, self.family.shape.max_model_len
        if isinstance(request, ChatRequest):
            messages = self._messages(request, draft.contents, losses)
            return self.codec.render(
                self._formats.tool_messages(messages, draft.answer),
                add_generation_prompt=request.begins_answer,
                continue_final_message=request.continues_text,
                template_kwargs=self._formats.template_variables(request, draft.answer),
                most_tokens=longest,
            )
        return request.token_ids or self.codec.encode_text_prompt(
            request.text,
            add_special_tokens=request.add_special_tokens,
            most_tokens=longest,
            param=request.prompt_place,
        )

    def _messages(
        self, chat: ChatRequest, contents: Sequence[str | list[Part]], losses: Losses
    ) -> list[dict[str, object]]:
        """Returns the input of the chat template. `developer` is the new name of the role `system`; templates know the
        old name."""
        messages: list[dict[str, object]] = []
        for message, content in zip(chat.messages, contents, strict=True):
            role = "system" if message.role == "developer" else message.role
            entry: dict[str, object] = {
                "role": role,
                "content": content if isinstance(content, str) else self._parts(content, losses),
            }
            named = ("name", "tool_call_id", "reasoning_content")
            entry |= {key: value for key in named if (value := getattr(message, key)) is not None}
            if message.tool_calls:
                entry["tool_calls"] = [_template_call(call) for call in message.tool_calls]
            messages.append(entry)
        return messages

    def _parts(self, content: Sequence[Part], losses: Losses) -> list[dict[str, str]]:
        parts: list[dict[str, str]] = []
        for part in content:
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": part.text})
                continue
            modality = self._reader.plugin_of(part).modality
            if ItemKey(part.param, modality) not in losses.removed:
                parts.append({"type": modality})
        return parts


def _template_call(call: ToolCall) -> dict[str, object]:
    function = {"name": call.function.name, "arguments": called_arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def served_items(family: Family, lowered: Mapping[str, int]) -> dict[str, int]:
    """Maps each modality to the most items per prompt: the family's limit, lowered by the deployment. It leaves out
    modalities with a limit of 0."""
    most = {modality: min(count, lowered.get(modality, count)) for modality, count in family.max_items.items()}
    return {modality: count for modality, count in most.items() if count > 0}


def check_token_ids(token_ids: Sequence[int], vocab_size: int, longest: int, param: str = "prompt") -> None:
    """Raises InvalidRequest if an id is no token, and ContextLengthExceeded if there are more than the context has."""
    if len(token_ids) > longest:
        message = f"this model's context is {longest} tokens, but `{param}` has {len(token_ids)}"
        raise ContextLengthExceeded(message, param=param)
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        unknown = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        message = f"a token id of `{param}` must be one of 0 to {vocab_size - 1}, not {shown(unknown)}"
        raise InvalidRequest(message, param=param)


def check_not_empty(prompt: Prompt, request: PromptRequest) -> None:
    """Raises InvalidRequest if a prompt has no token, which a tokenizer makes of an empty text unless it adds one."""
    if prompt.token_ids:
        return
    place = request.prompt_place
    message = f"`{place}` is empty, and the model needs at least one token; its tokenizer adds none to an empty text"
    raise InvalidRequest(message, param=place)


def check_min_pixels(family: Family) -> None:
    """Raises InvalidRequest if the model scales no picture up to a least number of pixels."""
    if not isinstance(family, HasLeastPixels):
        message = "this model has no least number of pixels of a picture, so `min_pixels` has no effect; leave it out"
        raise InvalidRequest(message, param="mm_processor_kwargs.min_pixels")


def without_contents(chat: ChatRequest) -> ChatRequest:
    bare = [message.model_copy(update={"content": None}) for message in chat.messages]
    return chat.model_copy(update={"messages": bare})


def without_fields(content: Sequence[Part]) -> list[Part]:
    """Returns the parts with media parts reduced to their type and place."""
    return [part if isinstance(part, TextPart) else part._replace(fields={}) for part in content]


def _is_short(draft: Draft) -> bool:
    """Tells whether all text of the prompt together is short enough for the event loop."""
    request = draft.request
    if isinstance(request, CompletionRequest):
        return len(request.text) + len(request.token_ids) <= SHORT_TEXT_CHARS
    if request.tools or request.chat_template_kwargs:
        return False
    if any(message.tool_calls or message.reasoning_content for message in request.messages):
        return False
    parts = (part for content in draft.contents if not isinstance(content, str) for part in content)
    num_chars = sum(len(part.text) for part in parts if isinstance(part, TextPart))
    num_chars += sum(len(content) for content in draft.contents if isinstance(content, str))
    return num_chars + CHARS_PER_MESSAGE * len(draft.contents) <= SHORT_TEXT_CHARS


def _has_few_media(draft: Draft) -> bool:
    """Tells whether the prompt has so few media that planning them takes no time. A video is never one of these: it may
    be planned several times, and it has text between its frames."""
    headers = [medium.header for medium in draft.media]
    pixels = [header.width * header.height for header in headers if isinstance(header, ImageHeader)]
    return len(pixels) == len(headers) <= FEW_PICTURES and sum(pixels) <= FEW_PIXELS


def _num_placeholders(draft: Draft, losses: Losses) -> int:
    return sum(ItemKey(medium.part, medium.modality) not in losses.removed for medium in draft.media)


def _check_parts(chat: ChatRequest, most: int) -> None:
    """Raises InvalidRequest if the messages have too many parts, before one of them is looked at."""
    num_parts = sum(len(message.content) for message in chat.messages if isinstance(message.content, list))
    if num_parts > most:
        raise InvalidRequest(f"a request may have at most {most} content parts, not {num_parts}", param="messages")
