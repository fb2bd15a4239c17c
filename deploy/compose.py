"""Builds the services of each part from the cluster config, in the same way for one process and for Ray.

The module is the composition root: the only place where the encoder pool, the workers and the router meet.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.compute_dtype import with_dtype
from deploy.config import ClusterConfig, EncoderSection, LinkEndSection
from deploy.http_limits import HttpLimits
from deploy.logs import collect_library_logs
from deploy.lora_adapters import pin_adapters
from deploy.models import ModelUrl, fetch_model
from deploy.process_setup import allow_many_files, ask_for_large_pages, keep_freed_memory
from deploy.request_config import TenantSection
from deploy.speech_parts import speech_settings, thinker_sender, with_talker_rows
from deploy.topology import find_place
from deploy.worker_pools import check_pools, pool_place
from encoder_pool.encoder_config import MODALITY_TO_CPU_S, MODALITY_TO_TIMEOUT_S, DecodeLimits, EncoderConfig
from fabric.contracts import DTYPE_TO_BYTES, ConfigError, KvScheme, Member, MemberId, MemberPlace, SystemClock
from fabric.transport import FeatureSink, FeatureSource, Plane, PortRange, StageConnector
from llm_workers.worker_config import Speculation, WorkerConfig
from modalities.family import Family, LanguageModel, MediaOptions
from modalities.media import MediaLimits
from modalities.registry import REGISTRY
from modalities.speech_traits import read_speech_traits
from modalities.text import CompileLimits, TextCodec
from router.fetch import FetchProcess, FetchSettings, LoopFetcher, MediaFetcher
from router.observe import TracingSettings
from router.planning import LinkOverride, LinkRules, MemberSelector, PlannerSettings
from router.router_config import MODALITY_TO_ENCODE_TIMEOUT_MS, GrammarLimits, RateQuota, RouterConfig, Tenant
from router.run import Pools

if TYPE_CHECKING:
    from encoder_pool.encoder_service import EncoderService
    from llm_workers.worker_service import WorkerService
    from router.service import RouterService

DEMO_TRANSCRIPTION = "Which word is spoken?"
"""Is one of the questions that the demo model was trained on."""
ATTENTION_NAME = "weft_paged"
DECODED_BATCHES = 4
"""An encoder may hold the decoded pixels of this many batches; long videos may fill all but one of them, see
`DecodeRoom`."""


@dataclass(frozen=True, slots=True)
class Model:
    """A `Model` is the checkpoint that a cluster serves."""

    directory: Path
    name: str
    family: Family


def resolve_model_dir(config: ClusterConfig, has_weights: bool = True) -> Path:
    """Returns the configured model directory, or that of the demo model if the config names none. A model with a URL is
    downloaded first if this node lacks it, which may take minutes; without `has_weights`, only its small files are.
    Raises ConfigError, with the name of this node, if the configured one is not a model directory, and as `fetch_model`
    does."""
    return _find_model(config, has_weights)[1]


def _find_model(config: ClusterConfig, has_weights: bool) -> tuple[ClusterConfig, Path]:
    """Returns the directory, and the config with the version of a model that has a URL."""
    named = config.model.path
    if named is None:
        from deploy.demo.build import demo_checkpoint

        return config, demo_checkpoint()
    if isinstance(named, str):
        url, directory = fetch_model(
            ModelUrl.parse(named), config.model.cache_dir, has_weights, config.model.cache_bytes
        )
        model = config.model.model_copy(update={"path": str(url)})
        return config.model_copy(update={"model": model}), directory
    if not (named / "config.json").is_file():
        raise ConfigError(
            f"model.path is {named}, which is not a transformers model directory on {host_name()}: "
            "it has no config.json"
        )
    return config, named


def open_model(config: ClusterConfig, has_weights: bool = False) -> tuple[ClusterConfig, Model]:
    """Returns the config with the dtype that `auto` stands for and the versions of what has a URL, so that every
    process gets the same, and the configured checkpoint. The process that starts a cluster calls it once. Raises
    ConfigError as `resolve_model_dir`, `load_model` and `pin_adapters` do."""
    config, directory = _find_model(config, has_weights)
    config = with_dtype(config, directory)
    model = load_model(config, directory)
    return pin_adapters(config, model.name, directory), model


def load_model(config: ClusterConfig, directory: Path) -> Model:
    """Loads the description of the checkpoint in `directory`; it reads config files only. Raises ConfigError for an
    unknown architecture, for media and for quantised weights that the workers' engine can't take, for KV heads that the
    workers' ranks can't share evenly, and for stages that speak where the checkpoint has no voice."""
    name = config.model.name or model_name(config.model.path)
    family = REGISTRY.load_family(directory)
    check_pools(config, family, directory)
    speech_settings(config, directory)
    return Model(directory, name, family)


def model_name(path: Path | str | None) -> str:
    """Returns the name by which clients know a model without a configured name."""
    if path is None:
        return "weft-demo"
    return ModelUrl.parse(path).name if isinstance(path, str) else path.name


def member(
    kind: str,
    member_id: MemberId,
    address: str,
    host: str,
    modalities: tuple[str, ...] = (),
    kv_scheme: KvScheme | None = None,
    place: MemberPlace | None = None,
) -> Member:
    """Returns the record of a member. Its epoch is the current time, so other members never take a restarted process
    for the previous one."""
    return Member(
        member_id=member_id,
        kind=kind,
        address=address,
        host=host,
        epoch=time.time_ns(),
        modalities=modalities,
        transfer_agent=str(member_id),
        pid=os.getpid(),
        kv_scheme=kv_scheme,
        place=place or MemberPlace(),
    )


def member_place(config: ClusterConfig, kind: str, node_labels: Mapping[str, str] | None = None) -> MemberPlace:
    """Returns what is known of the place of an encoder, or of a worker whose rank 0 is in this process. `node_labels`
    are those that Ray knows."""
    if kind == "encoder":
        return find_place(config.encoders.device, 1, node_labels, config.is_arena_on_device)
    if kind == "worker":
        num_devices = config.workers.tensor_parallel
        found = find_place(config.workers.device, num_devices, node_labels, config.is_inbox_on_device)
        return pool_place(config, found)
    return MemberPlace()


def port_range(config: ClusterConfig) -> PortRange | None:
    """Returns the ports on which members listen, or None if the system chooses them."""
    return None if config.network.ports is None else PortRange.parse(config.network.ports)


def host_name() -> str:
    return platform.node() or "localhost"


def prepare_process(config: ClusterConfig) -> None:
    """Prepares this process for computing. Side effects: it limits the compute threads (replicas on one machine would
    compete), allows it many open files, turns gradients off, keeps freed memory, asks for large pages, sends the lines
    of libraries to our log, and silences the lines that a client's file could make a library print."""
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(config.threads_per_replica)
    torch.set_grad_enabled(False)
    allow_many_files()
    keep_freed_memory()
    ask_for_large_pages()
    transformers_logging.disable_progress_bar()
    collect_library_logs(config.logging)
    warnings.filterwarnings("ignore", module="PIL")


def loaded_modalities(config: ClusterConfig, family: Family) -> tuple[str, ...]:
    """Returns the modalities that each encoder loads."""
    section = config.encoders
    if section.replicas == 0:
        return ()
    return tuple(family.max_items) if section.modalities is None else section.modalities


def mel_device(section: EncoderSection) -> str:
    """Returns the device on which spectrograms are computed, or an empty string if the decode processes compute
    them."""
    is_on_device = section.mel_on_device == "on" or (section.mel_on_device == "auto" and section.device == "cuda")
    return section.device if is_on_device else ""


def build_encoder(
    config: ClusterConfig, model: Model, member_id: MemberId, plane: Plane, source: FeatureSource
) -> EncoderService:
    """Builds an encoder; it loads the encoder weights of the configured modalities, and no others."""
    from encoder_pool.encoder_service import EncoderService

    section = config.encoders
    modalities = loaded_modalities(config, model.family)
    encoder = model.family.load_encoder(model.directory, section.device, config.model.dtype, modalities)
    encoder_config = EncoderConfig(
        modalities=modalities,
        max_batch_cost=section.max_batch_cost,
        max_items_in_flight=section.max_items_in_flight,
        max_decoded_cost=DECODED_BATCHES * section.max_batch_cost,
        max_queue_cost=section.max_queue_cost,
        lease_s=section.feature_lease_s,
        num_decode_processes=section.decode_processes,
        decode_limits=DecodeLimits(
            MODALITY_TO_CPU_S | section.decode_cpu_s,
            MODALITY_TO_TIMEOUT_S | section.decode_timeout_s,
            section.decode_memory_bytes,
            section.max_decode_bytes,
        ),
        device=section.device,
        mel_device=mel_device(section),
        encode_delay_s=section.encode_delay_s,
        encode_delay_s_per_cost=section.encode_delay_s_per_cost,
        model_dir=str(model.directory),
    )
    return EncoderService(member_id, encoder_config, model.family, encoder, plane, source, SystemClock())


def worker_config(config: ClusterConfig) -> WorkerConfig:
    """Returns the config of each worker."""
    section = config.workers
    return WorkerConfig(
        block_size=section.block_size,
        num_blocks=section.stated_blocks(),
        are_blocks_fitted=section.are_blocks_fitted(),
        device_share=min(section.gpus_per_replica, 1.0) or 1.0,
        max_step_tokens=section.max_step_tokens,
        max_sequences=section.max_sequences,
        media_chunk_tokens=section.media_chunk_tokens,
        is_prefix_cache_enabled=section.prefix_cache,
        pull_timeout_s=section.pull_timeout_s,
        unit_wait_s=section.unit_wait_s,
        keep_features=section.keep_features,
        kept_bytes=section.kept_bytes,
        grammar_bytes=section.grammar_bytes,
        num_ranks=section.tensor_parallel,
        speculation=Speculation(**section.speculation.model_dump()),
        cuda_graphs=section.cuda_graphs,
        is_workspace_measured=True,
        is_overlap_enabled=section.overlap,
        step_delay_s=section.step_delay_s,
        step_delay_s_per_token=section.step_delay_s_per_token,
        step_delay_s_per_decode=section.step_delay_s_per_decode,
    )


def load_language_model(config: ClusterConfig, model: Model) -> LanguageModel:
    """Loads the language model's weights onto the workers' device, and no encoder's weights."""
    from llm_workers.compute import register_attention

    register_attention(ATTENTION_NAME)
    device, dtype = config.workers.device, config.model.dtype
    return model.family.load_language_model(model.directory, device, dtype, ATTENTION_NAME)


def build_worker(
    config: ClusterConfig,
    model: Model,
    member_id: MemberId,
    plane: Plane,
    sink: FeatureSink,
    connectors: Mapping[str, StageConnector] | None = None,
    wrap: Callable[[LanguageModel], LanguageModel] | None = None,
) -> WorkerService:
    """Builds a worker around Weft's own engine; it loads the language model. Over `connectors` the worker reaches the
    stages that speak; without them, it answers in text alone. `wrap` may put a layer around the model (a bench's
    clocks, other ranks)."""
    from llm_workers.own_engine import OwnEngine, with_fitted_blocks
    from llm_workers.sampling import GrammarCompiler
    from llm_workers.worker_service import WorkerService

    language_model = load_language_model(config, model)
    codec, vocab_size = TextCodec.load(model.directory), model.family.shape.vocab_size
    settings, clock, sender = worker_config(config), SystemClock(), None
    if config.stages is not None and connectors:
        sender = thinker_sender(config, connectors)
        settings = with_talker_rows(settings, read_speech_traits(model.directory))
    settings = with_fitted_blocks(settings, model.family, language_model)
    if wrap is not None:
        language_model = wrap(language_model)
    grammars = GrammarCompiler(codec, vocab_size, grammar_limits(config).compiling, settings.grammar_bytes)
    make_engine = partial(OwnEngine, settings, model.family, language_model, clock, sender=sender)
    service = WorkerService(member_id, settings, model.family, make_engine, plane, sink, clock, grammars)
    service.classify_links(link_class_of(config))
    return service


def media_limits(config: ClusterConfig) -> MediaLimits:
    """Returns the limits on the media that a client may send."""
    media = config.media
    return MediaLimits(
        max_bytes_per_item=media.max_bytes_per_item,
        max_image_pixels=media.max_image_pixels,
        max_video_pixels=media.max_video_pixels,
        max_video_seconds=media.max_video_seconds,
        max_video_frames=media.max_video_frames,
        max_audio_seconds=media.max_audio_seconds,
        max_audio_bytes=media.max_audio_bytes,
        max_decoded_bytes=media.max_decoded_bytes,
    )


def grammar_limits(config: ClusterConfig) -> GrammarLimits:
    """Returns the limits on structured output."""
    limits = config.limits
    return GrammarLimits(
        max_bytes=limits.max_grammar_bytes,
        max_depth=limits.max_schema_depth,
        max_choices=limits.max_grammar_choices,
        compiling=CompileLimits(
            max_symbols=limits.max_grammar_symbols,
            max_lexer_fuel=limits.max_lexer_fuel,
            max_lexer_states=limits.max_lexer_states,
            max_lexer_steps=limits.max_lexer_steps,
        ),
        compile_timeout_s=limits.grammar_timeout_s,
        max_pattern_bytes=limits.max_pattern_bytes,
    )


def fetch_settings(config: ClusterConfig) -> FetchSettings | None:
    """Returns what the routers may fetch, or None if they fetch nothing. Raises ConfigError if a file or folder that
    the section names is not there."""
    section = config.media.fetch
    if not section.enabled:
        return None
    if section.file_root is not None and not section.file_root.is_dir():
        raise ConfigError(f"media.fetch.file_root is {section.file_root}, which is not a folder")
    if section.ca_file is not None and not section.ca_file.is_file():
        raise ConfigError(f"media.fetch.ca_file is {section.ca_file}, which is not a file")
    fields = section.model_dump(exclude={"enabled"})
    return FetchSettings(**fields, media_limits=media_limits(config))


def build_fetcher(config: ClusterConfig) -> MediaFetcher | None:
    """Returns what fetches the media of a router, or None. It runs in a process of its own where the system has the
    sockets for that. Raises ConfigError as `fetch_settings` does."""
    settings = fetch_settings(config)
    if settings is None:
        return None
    return FetchProcess(settings) if sys.platform == "linux" else LoopFetcher(settings)


def video_options(config: ClusterConfig) -> MediaOptions:
    """Returns how videos are sampled where a request does not say."""
    media = config.media
    return MediaOptions(
        sampling=media.sampling,
        fps=media.fps,
        max_frames=media.max_frames,
        max_tokens=media.max_video_tokens,
        num_pooled_frames=media.num_pooled_frames,
        keep_fraction=media.keep_fraction,
    )


def max_items_per_prompt(config: ClusterConfig, family: Family) -> dict[str, int]:
    """Maps each modality to the most items that a request may have. It is 0 for a modality that no encoder of the
    cluster has loaded."""
    loaded = loaded_modalities(config, family)
    limits = config.media.limit_mm_per_prompt
    return {
        modality: min(most, limits.get(modality, most)) if modality in loaded else 0
        for modality, most in family.max_items.items()
    }


def link_overrides(config: ClusterConfig) -> tuple[LinkOverride, ...]:
    """Returns the configured classes of links."""
    return tuple(
        LinkOverride(_selector(each.source), _selector(each.target), each.link) for each in config.router.links
    )


def link_class_of(config: ClusterConfig) -> Callable[[Member, Member], str]:
    """Returns a function that names the class of the link over which the second member reads from the first."""
    rules = LinkRules(link_overrides(config))
    return lambda source, target: rules.link_class(rules.place(source), rules.place(target)).value


def _selector(end: LinkEndSection) -> MemberSelector:
    return MemberSelector(end.member, end.host, end.kind or "*", tuple(sorted(end.labels.items())))


def allowed_hosts(config: ClusterConfig) -> tuple[str, ...] | None:
    """Returns the names under which a cluster without keys may be asked, or None for all. A cluster that others can
    reach may have names that it doesn't know, such as that of a Kubernetes service; one that only this machine reaches
    has none."""
    listed = config.access.allowed_hosts
    try:
        is_private = ipaddress.ip_address(config.server.host).is_loopback
    except ValueError:
        is_private = config.server.host == "localhost"
    if listed is None and not is_private:
        return None
    return tuple(name.lower() for name in (host_name(), *(listed or ())))


def tenants(config: ClusterConfig) -> tuple[Tenant, ...]:
    """Returns the tenants of the cluster. A tenant without a salt gets one that no other has: names have no colon, and
    a salt that the config sets is marked by one."""
    return tuple(_tenant(name, section) for name, section in config.tenants.items())


def _tenant(name: str, section: TenantSection) -> Tenant:
    fields = section.model_dump()
    rates = RateQuota(**{each.name: fields.pop(each.name) for each in dataclasses.fields(RateQuota)})
    digests, salt = fields.pop("api_key_digests"), fields.pop("cache_salt")
    own_salt = name if salt is None else f":{salt}" if salt else ""
    return Tenant(name=name, key_digests=digests, cache_salt=own_salt, rates=rates, **fields)


def system_fingerprint(model: Model) -> str:
    """Returns a name for what makes answers: the version of Weft and the configuration of the model."""
    digest = hashlib.sha256(metadata.version("weft").encode())
    digest.update((model.directory / "config.json").read_bytes())
    return f"fp_{digest.hexdigest()[:12]}"


def http_limits(config: ClusterConfig) -> HttpLimits:
    """Returns the limits of the routers' HTTP servers."""
    limits = HttpLimits(
        max_header_bytes=config.server.max_header_bytes,
        max_connections=config.server.max_connections,
        header_timeout_s=config.server.header_timeout_s,
        body_timeout_s=config.server.body_timeout_s,
    )
    server = config.server
    return replace(limits, write_timeout_s=server.write_timeout_s, min_body_bytes_per_s=server.min_body_bytes_per_s)


def tracing_settings(config: ClusterConfig) -> TracingSettings:
    """Returns where spans go. Raises ConfigError if the file of the collector's headers can't be used."""
    section = config.tracing
    return TracingSettings(
        endpoint=section.endpoint,
        sample_ratio=section.sample_ratio,
        follows_clients=section.follow_clients,
        max_requests_per_s=section.max_requests_per_s,
        headers=() if section.headers_file is None else read_headers(section.headers_file),
        timeout_s=section.timeout_s,
    )


def read_headers(path: Path) -> tuple[tuple[str, str], ...]:
    """Returns the headers in a file with one `name: value` per line; empty lines and those that begin with `#` do not
    count. Raises ConfigError if the file can't be read or has another line, without quoting it, as it may be a key."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tracing.headers_file: {path} can't be read: {error}") from error
    headers = []
    for number, line in enumerate(lines, 1):
        name, is_header, value = line.partition(":")
        if not line.strip() or line.startswith("#"):
            continue
        if not is_header or not name.strip().isascii() or not name.strip() or not value.strip():
            raise ConfigError(f"tracing.headers_file: line {number} of {path} is not written as `name: value`")
        headers.append((name.strip(), value.strip()))
    return tuple(headers)


def router_config(config: ClusterConfig, model: Model) -> RouterConfig:
    """Returns the config of each router."""
    media = config.media
    return RouterConfig(
        model_name=model.name,
        adapters={name: str(source) for name, source in config.model.adapters.items()},
        system_fingerprint=system_fingerprint(model),
        version=metadata.version("weft"),
        embeddings=config.model.embeddings,
        transcription_prompt=DEMO_TRANSCRIPTION if config.model.path is None else config.model.transcription_prompt,
        tool_format=config.model.tool_format,
        reads_reasoning=config.model.reads_reasoning,
        cluster_name=config.ray.cluster_name,
        metrics_port=config.network.metrics_port,
        kind_to_expected={
            "router": config.router.replicas,
            "encoder": config.encoders.first_replicas,
            "worker": config.first_workers,
            "stage": config.num_stage_replicas,
        },
        speech=speech_settings(config, model.directory),
        shows_members=config.ray.address is None,
        block_size=config.workers.block_size,
        feature_itemsize=DTYPE_TO_BYTES[config.model.dtype],
        feature_dtype=config.model.dtype,
        takes_image_embeds=media.image_embeds,
        max_body_bytes=config.server.max_body_bytes,
        write_timeout_s=config.server.write_timeout_s,
        min_answer_bytes_per_s=config.server.min_body_bytes_per_s,
        max_bodies_bytes=config.router.max_bodies_bytes,
        max_in_flight=config.router.max_in_flight,
        max_prompt_tokens=config.router.max_prompt_tokens,
        tenants=tenants(config),
        keys_file=config.access.keys_file,
        operator_digests=config.access.operator_key_digests,
        allowed_hosts=allowed_hosts(config),
        has_console=config.access.console,
        allowed_origins=tuple(origin.lower() for origin in config.access.allowed_origins),
        rate_burst_s=config.access.burst_s,
        tracing=tracing_settings(config),
        batch_wait_s=config.router.batch_wait_s,
        tokens_per_encoder_second=config.router.tokens_per_encoder_second,
        planner=PlannerSettings(
            max_index_blocks=config.router.max_index_blocks,
            max_index_items=config.router.max_index_items,
            links=link_overrides(config),
        ),
        costs_file=config.router.costs_file,
        max_num_choices=config.router.max_num_choices,
        max_messages=config.limits.max_messages,
        max_content_parts=config.limits.max_content_parts,
        max_media_items=config.limits.max_media_items,
        max_stop_strings=config.limits.max_stop_strings,
        max_stop_chars=config.limits.max_stop_chars,
        max_stop_token_ids=config.limits.max_stop_token_ids,
        max_prompt_logprobs=config.limits.max_prompt_logprobs,
        grammar=grammar_limits(config),
        min_priority=config.router.min_priority,
        heartbeat_s=config.router.heartbeat_s,
        lease_s=config.router.lease_s,
        leave_grace_s=config.server.drain_s,
        dispatch_timeout_s=config.router.dispatch_timeout_s,
        capacity_wait_s=config.router.capacity_wait_s,
        media_limits=media_limits(config),
        max_items_per_prompt=max_items_per_prompt(config, model.family),
        video_options=video_options(config),
        named_media_bytes=media.named_media_bytes,
        on_encode_failure=media.on_encode_failure,
        encode_timeout_ms=MODALITY_TO_ENCODE_TIMEOUT_MS | media.encode_timeout_ms,
    )


def build_router(config: ClusterConfig, model: Model, member_id: MemberId, plane: Plane, pools: Pools) -> RouterService:
    """Builds a router; it reads the tokenizer and needs no torch. The router's helper processes start with it."""
    from modalities import probing
    from router.prompt import PromptBuilder
    from router.service import RouterService

    media, settings = config.media, router_config(config, model)
    limits = probing.ProbeLimits(
        modality_to_cpu_s=probing.MODALITY_TO_CPU_S | media.probe_cpu_s,
        memory_bytes=media.probe_memory_bytes,
        timeout_s=media.probe_timeout_s,
    )
    prober = probing.ProbePool(media.probe_processes, limits)
    codec, fetcher = TextCodec.load(model.directory), build_fetcher(config)
    prompt_builder = PromptBuilder(settings, model.family, codec, REGISTRY, prober, fetcher)
    return RouterService(member_id, settings, prompt_builder, plane, pools, SystemClock())
