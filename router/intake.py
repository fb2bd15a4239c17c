"""From a chat request to a prompt: checked, media probed and planned, tokenised, expanded, hashed.

Cheap checks first; what costs (base64, hashing, tokenising) runs in a thread. Decodes no pixels. Knows no worker.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from fabric.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    UnsupportedModality,
)
from fabric.messages import MediaItem, SamplingParams, StopConditions
from kv_index.block_hashing import prompt_block_hashes
from modalities.family import Family, ItemPlan
from modalities.identify import plan_media
from modalities.plugin import ModalityPlugin
from modalities.registry import Registry
from router.api.content import PART_TYPE_TO_MODALITY, MediaPart, Part, TextPart, parts_of
from router.api.request import ChatRequest
from router.config import RouterConfig
from router.prompt import Prompt
from router.structured import grammar_of


class Codec(Protocol):
    """See modalities.text.codec.TextCodec."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def render(
        self,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Intake:
    """Stateless; one per router."""

    def __init__(self, config: RouterConfig, family: Family, codec: Codec, registry: Registry) -> None:
        self._config = config
        self._family = family
        self._codec = codec
        self._registry = registry

    async def prepare(self, chat: ChatRequest) -> Prompt:
        """Raises a RequestRefused, `param` naming the offending part of the request."""
        self._check_limits(chat)
        contents = [parts_of(message, index) for index, message in enumerate(chat.messages)]
        media = [
            part
            for content in contents
            if not isinstance(content, str)
            for part in content
            if isinstance(part, MediaPart)
        ]
        plugins = self._check_media(media)
        return await asyncio.to_thread(self._build, chat, contents, media, plugins)

    # ------------------------------------------------------------ cheap checks

    def _check_limits(self, chat: ChatRequest) -> None:
        config = self._config
        if chat.model != config.model_name:
            raise ModelNotFound(f"the model `{chat.model[:128]}` does not exist", param="model")
        if chat.num_choices > config.max_num_choices:
            raise InvalidRequest(f"n may be at most {config.max_num_choices}, not {chat.num_choices}", param="n")
        if len(chat.messages) > config.max_messages:
            raise InvalidRequest(f"at most {config.max_messages} messages", param="messages")
        self._check_stops(chat)

    def _check_stops(self, chat: ChatRequest) -> None:
        config = self._config
        stops, stop_ids = chat.stop or [], chat.stop_token_ids or []
        if len(stops) > config.max_stop_strings:
            raise InvalidRequest(f"at most {config.max_stop_strings} stop strings", param="stop")
        if any(not stop or len(stop) > config.max_stop_chars for stop in stops):
            raise InvalidRequest(f"a stop string has 1 to {config.max_stop_chars} characters", param="stop")
        if len(stop_ids) > config.max_stop_token_ids:
            raise InvalidRequest(f"at most {config.max_stop_token_ids} stop token ids", param="stop_token_ids")
        if any(not 0 <= token_id < self._family.shape.vocab_size for token_id in stop_ids):
            raise InvalidRequest("a stop token id is not in the vocabulary", param="stop_token_ids")

    def _check_media(self, media: Sequence[MediaPart]) -> list[ModalityPlugin]:
        """The plugin of each part. Only types and counts: nothing is decoded yet."""
        if len(media) > self._config.max_media_items:
            raise InvalidRequest(f"at most {self._config.max_media_items} media in one request", param="messages")
        counts: Counter[str] = Counter()
        plugins = [self._plugin(part) for part in media]
        for part, plugin in zip(media, plugins, strict=True):
            counts[plugin.modality] += 1
            most = self._family.max_items[plugin.modality]
            if counts[plugin.modality] > most:
                raise InvalidRequest(f"at most {most} {plugin.modality} items in one request", param=part.param)
        return plugins

    def _plugin(self, part: MediaPart) -> ModalityPlugin:
        plugin = self._registry.modality_of_part(part.part_type)
        if plugin is None or self._family.max_items.get(plugin.modality, 0) < 1:
            modality = PART_TYPE_TO_MODALITY[part.part_type] if plugin is None else plugin.modality
            raise UnsupportedModality(f"{self._config.model_name} takes no {modality} input", param=part.param)
        return plugin

    # ------------------------------------------------------------ what costs (in a thread)

    def _build(
        self,
        chat: ChatRequest,
        contents: Sequence[str | list[Part]],
        media: Sequence[MediaPart],
        plugins: Sequence[ModalityPlugin],
    ) -> Prompt:
        salt = chat.cache_salt or ""
        grammar = grammar_of(chat)
        items: list[MediaItem] = []
        plans: list[ItemPlan] = []
        files: list[bytes] = []
        for index, (part, plugin) in enumerate(zip(media, plugins, strict=True)):
            data = plugin.parse(part.fields, part.param, self._config.media_limits)
            header = plugin.probe(data, part.param)
            plugin.validate(header, self._config.media_limits, part.param)
            planned = plan_media(self._family, data, header, index, part.param, salt)
            items.append(planned.item)
            plans.append(planned.plan)
            files.append(data)
        rendered = self._codec.render(self._messages(chat, contents))
        self._check_context(len(rendered) - len(plans) + sum(sum(plan.unit_tokens) for plan in plans), chat)
        expanded = self._family.expand(rendered, plans, self._codec.encode)
        self._check_context(len(expanded.token_ids), chat)
        hashes = prompt_block_hashes(expanded.token_ids, self._config.block_size, expanded.placeholders, items, salt)
        return Prompt(
            token_ids=tuple(expanded.token_ids),
            placeholders=expanded.placeholders,
            media=tuple(items),
            media_bytes=tuple(files),
            block_hashes=tuple(hashes),
            sampling=sampling_of(chat, self._family.shape.vocab_size, grammar),
            stop=self._stop_conditions(chat, len(expanded.token_ids)),
            stop_strings=tuple(chat.stop or ()),
            num_choices=chat.num_choices,
            cache_salt=salt,
            priority=chat.priority or 0,
            ignored_fields=tuple(chat.ignored_fields),
        )

    def _messages(self, chat: ChatRequest, contents: Sequence[str | list[Part]]) -> list[dict[str, object]]:
        """Input of the chat template. `developer` is what `system` is called now; templates know the old name."""
        messages: list[dict[str, object]] = []
        for message, content in zip(chat.messages, contents, strict=True):
            role = "system" if message.role == "developer" else message.role
            entry: dict[str, object] = {
                "role": role,
                "content": content if isinstance(content, str) else self._parts(content),
            }
            entry |= {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None}
            messages.append(entry)
        return messages

    def _parts(self, content: Sequence[Part]) -> list[dict[str, str]]:
        return [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": self._plugin(part).modality}
            for part in content
        ]

    def _check_context(self, num_prompt_tokens: int, chat: ChatRequest) -> None:
        longest = self._family.shape.max_model_len
        if num_prompt_tokens >= longest:
            raise ContextLengthExceeded(
                f"this model's context is {longest} tokens; the prompt has {num_prompt_tokens}, "
                "and room for one more is needed",
                param="messages",
            )
        wanted = chat.token_limit
        if wanted is not None and num_prompt_tokens + wanted > longest:
            raise ContextLengthExceeded(
                f"this model's context is {longest} tokens, but {num_prompt_tokens + wanted} were asked for "
                f"({num_prompt_tokens} in the prompt, {wanted} to generate)",
                param="max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens",
            )

    def _stop_conditions(self, chat: ChatRequest, num_prompt_tokens: int) -> StopConditions:
        room = self._family.shape.max_model_len - num_prompt_tokens
        max_tokens = room if chat.token_limit is None else chat.token_limit
        min_tokens = chat.min_tokens or 0
        if min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens ({min_tokens}) is above the limit of {max_tokens} tokens", param="min_tokens"
            )
        return StopConditions(
            max_tokens=max_tokens,
            eos_token_ids=tuple(self._codec.eos_token_ids),
            stop_token_ids=tuple(chat.stop_token_ids or ()),
            ignore_eos=bool(chat.ignore_eos),
            min_tokens=min_tokens,
        )


def sampling_of(chat: ChatRequest, vocab_size: int, grammar: str = "") -> SamplingParams:
    """OpenAI's defaults. A request without a seed gets one here, so that a migration draws the same. Raises
    InvalidRequest for a bias on what is no token."""
    return SamplingParams(
        temperature=1.0 if chat.temperature is None else chat.temperature,
        top_p=1.0 if chat.top_p is None else chat.top_p,
        top_k=max(0, chat.top_k or 0),
        seed=secrets.randbits(63) if chat.seed is None else chat.seed,
        min_p=chat.min_p or 0.0,
        repetition_penalty=1.0 if chat.repetition_penalty is None else chat.repetition_penalty,
        presence_penalty=chat.presence_penalty or 0.0,
        frequency_penalty=chat.frequency_penalty or 0.0,
        num_top_logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        grammar=grammar,
        logit_bias=tuple(_biases(chat.logit_bias or {}, vocab_size).items()),
    )


def _biases(logit_bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    biases: dict[int, float] = {}
    for name, bias in logit_bias.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocab_size):
            raise InvalidRequest(f"logit_bias: {name[:32]!r} is no token id of this model", param="logit_bias")
        biases[int(name)] = bias
    return biases
