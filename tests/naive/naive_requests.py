"""Declares naive implementations of reading requests, making prompts, and keeping tenants apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from naive_plugin import Guards
from naive_variant import naive

# ------------------------------------------------------------ what a request asks for

WHOLE = "unit/router/test_whole_answers.py::"


@naive(
    "One request asks for any number of answers.",
    "CVE-2026-34756",
    "router/api/generation_fields.py",
    "unit/router/test_http_edge.py::test_bad_requests_are_named_and_the_cluster_serves_on",
    r"\(200,|KeyError: 'error'",
)
def makes_any_number_of_choices(guards: Guards) -> None:
    """Does not limit `n`."""
    check: Any = None

    def unchecked(fields: Any, config: Any, vocab_size: int) -> None:
        check(fields.model_copy(update={"n": 1}), config, vocab_size)

    check = guards.replace("router.api.generation_fields:check_generation", unchecked)


@naive(
    "A schema of a few bytes has a grammar of gigabytes.",
    "",
    "router/prompt/generation_options.py",
    "unit/router/prompt/test_structured.py::test_a_small_schema_with_a_huge_grammar_is_refused[6-4]",
)
def compiles_every_grammar(guards: Guards) -> None:
    """Compiles a grammar within the limits of the library alone."""
    from llguidance import LLParserLimits

    guards.replace("llguidance:LLParserLimits", lambda **_: LLParserLimits())


@naive(
    "The schema of a tool has a pattern that ends the server once it is compiled.",
    "CVE-2025-48944",
    "router/prompt/generation_options.py",
    "unit/router/test_tools_edge.py::test_bad_tools_are_named",
    "KeyError: 'error'",
)
def compiles_at_the_worker(guards: Guards) -> None:
    """Lets the worker be the first to compile the grammar of a request."""
    guards.replace("router.prompt.generation_options:check_grammar", lambda grammar, param, limits: None)
    guards.replace("router.prompt.grammar_checks:GrammarChecks.check", lambda checks, grammar, param: None)


@naive(
    "A regular expression of a request takes minutes and gigabytes once it is compiled.",
    "",
    "router/prompt/generation_options.py",
    "unit/router/prompt/test_structured.py::test_long_regular_expressions_are_refused_before_they_are_compiled",
)
def takes_long_patterns(guards: Guards) -> None:
    """Limits the text of a grammar as a whole, and not its regular expressions."""
    guards.replace("router.prompt.generation_options:_check_patterns", lambda patterns, param, limits: None)


@naive(
    "A grammar that passes the router's checks takes seconds at a worker, which then refuses it.",
    "",
    "router/prompt/grammar_checks.py",
    "unit/router/prompt/test_grammar_checks.py::test_what_a_worker_would_refuse_reaches_none[fields0-structured_outputs.regex]",
)
def checks_without_the_tokenizer(guards: Guards) -> None:
    """Lets the router compile a grammar without the tokens of the model, which leaves the lexer out."""
    guards.replace("router.prompt.grammar_checks:GrammarChecks.check", lambda checks, grammar, param: None)


@naive(
    "Each request brings a grammar of its own, and the worker keeps them all.",
    "",
    "llm_workers/sampling/grammar.py",
    "property/test_worker_grammar_budget.py::test_what_is_kept_stays_within_the_budget_whatever_the_number_of_grammars",
    "assert",
)
def keeps_a_number_of_grammars(guards: Guards) -> None:
    """Limits the number of compiled grammars that are kept, and not their memory."""
    guards.replace("llm_workers.sampling.grammar:GrammarMemory.is_over", False)


@naive(
    "The lexer of a short grammar grows without end while an answer is drawn.",
    "",
    "modalities/text/compiled_grammars.py",
    "property/test_worker_grammar_budget.py::test_a_grammar_that_grows_too_large_breaks_alone_and_begins_again",
    "assert",
)
def counts_when_it_compiles(guards: Guards) -> None:
    """Looks at what a grammar takes when it is compiled, and never again."""
    guards.replace("modalities.text.compiled_grammars:CompiledGrammar.note_mask", lambda grammar: False)


@naive(
    "Requests whose clients have left keep the threads busy in which grammars are compiled.",
    "",
    "llm_workers/sampling/grammar.py",
    "property/test_worker_grammar_budget.py::test_compiling_for_a_request_that_has_gone_is_not_begun",
    "assert",
)
def compiles_for_those_that_left(guards: Guards) -> None:
    """Compiles every grammar that was ever asked for, in turn."""
    guards.replace("llm_workers.sampling.grammar:GrammarCompiler._leave", lambda compiler, flight: None)


@naive(
    "A body of brackets nests deeper than the stack.",
    "",
    "router/api/request_body.py",
    "unit/router/test_api.py::test_what_is_no_json_object_is_refused",
    "RecursionError",
)
def reads_any_depth(guards: Guards) -> None:
    """Reads a body with the parser of the standard library."""
    from fabric.contracts import InvalidRequest

    @guards.method("router.api.request_body:parse_body")
    def parse(kind: Any, body: bytes, most_values: int = 0) -> object:
        try:
            return kind.model_validate(json.loads(body))
        except ValueError as error:
            raise InvalidRequest("the body is not valid JSON") from error


@naive(
    "A body of a few megabytes has millions of values.",
    "",
    "router/api/request_body.py",
    "unit/router/prompt/test_media_threads.py::test_a_body_of_many_values_is_refused_before_it_is_parsed",
    "JSON values",
)
def parses_every_body(guards: Guards) -> None:
    """Parses a body whatever it consists of."""
    guards.replace("router.api.request_body:check_shape", lambda body, most: None)


@naive(
    "A body is longer than memory.",
    "",
    "router/edge/connection.py",
    "unit/router/test_http_edge.py::test_chunked_body_over_the_limit_is_refused_while_it_comes",
    "TimeoutError",
)
def reads_every_body(guards: Guards) -> None:
    """Reads a body to its end."""

    @guards.method("router.edge.connection:read_body")
    async def read(scope: object, receive: Any, max_bytes: int, reserve: object) -> bytes:
        body, goes_on = b"", True
        while goes_on:
            message = await receive()
            body += message.get("body", b"")
            goes_on = message.get("more_body", False)
        return body


@naive(
    "The answer to a request that meets a defect shows a path, or what another client has sent.",
    "CVE-2026-22778",
    "router/edge/app.py",
    "unit/router/test_http_edge.py::test_a_defect_is_answered_without_its_words",
    r"\[Errno 13\]",
)
def shows_the_exception(guards: Guards) -> None:
    """Answers with the words of the exception."""
    from starlette.responses import JSONResponse

    @guards.method("router.edge.app:internal_error")
    async def answer(request: object, error: Exception) -> JSONResponse:
        return JSONResponse({"error": {"message": str(error), "type": "server_error"}}, 500)


@naive(
    "One answer has log-probabilities for a long prompt, for each of its alternatives and for each choice.",
    "",
    "router/api/generation_fields.py",
    f"{WHOLE}test_the_log_probabilities_of_all_prompts_are_limited_before_they_are_computed[1-fields0-prompt_logprobs]",
    "assert 200 == 400",
)
def scores_any_prompt(guards: Guards) -> None:
    """Limits the alternatives of a token, and not the answer."""
    guards.replace("router.api.generation_fields:check_scores", lambda *asked: None)


@naive(
    "Nobody is served while a large answer is written.",
    "",
    "router/service.py",
    f"{WHOLE}test_a_large_answer_is_written_beside_the_event_loop",
    "assert",
)
def writes_in_the_event_loop(guards: Guards) -> None:
    """Writes every answer in the event loop."""

    async def write(self: object, make: Callable[[], bytes]) -> bytes:
        return make()

    guards.replace("router.service:RouterService.write", write)


@naive(
    "The name of a field holds a line break, and what follows it looks like a line of the log.",
    "",
    "deploy/logs.py",
    "unit/deploy/test_deploy_logs.py::test_text_of_a_client_forges_no_line",
    "assert",
)
def logs_what_clients_write(guards: Guards) -> None:
    """Writes the text of a message as it is."""
    guards.replace("deploy.logs:escaped", str)


# ------------------------------------------------------------ prompts

TEXT = "unit/modalities/text/"


@naive(
    "A user types the placeholder of a picture, or the end of a turn.",
    "CVE-2026-44222",
    "modalities/text/control_tokens.py",
    f"{TEXT}test_codec.py::test_a_typed_placeholder_is_text_even_over_two_parts",
    "assert",
)
def reads_control_tokens(guards: Guards) -> None:
    """Tokenises a rendered conversation as it is."""
    guards.replace("modalities.text.control_tokens:ControlTokens.is_harmless", lambda self, *text: True)
    guards.replace("modalities.text.control_tokens:ControlTokens.is_contained", lambda self, text: False)


@naive(
    "A request sets variables that the chat template uses itself.",
    "CVE-2025-62426",
    "modalities/text/codec.py",
    f"{TEXT}test_chat_template.py::test_a_request_can_not_set_what_is_ours[messages]",
)
def passes_all_variables(guards: Guards) -> None:
    """Passes all variables of a request to the template."""
    guards.replace("modalities.text.codec:RESERVED_VARIABLES", frozenset())


@naive(
    "The chat template of a checkpoint runs code.",
    "",
    "modalities/text/codec.py",
    f"{TEXT}test_chat_template.py::test_what_the_template_refuses_or_breaks_on_is_an_invalid_request",
)
def runs_templates_freely(guards: Guards) -> None:
    """Renders chat templates without a sandbox."""
    import jinja2

    guards.replace("modalities.text.codec:ImmutableSandboxedEnvironment", jinja2.Environment)


# ------------------------------------------------------------ tenants and keys


@naive(
    "Two pictures with the same bytes and other dimensions have one hash.",
    "CVE-2025-46722",
    "fabric/contracts/identity.py",
    "unit/fabric/contracts/test_digest.py::test_every_field_of_an_item_counts[geometry-value3]",
    "assert '",
)
def hashes_without_dimensions(guards: Guards) -> None:
    """Hashes a medium by its values alone."""
    mm_hash: Any = None

    def hashed(content: bytes, **fields: Any) -> object:
        return mm_hash(content, **{**fields, "geometry": ()})

    mm_hash = guards.replace("fabric.contracts.identity:mm_hash", hashed)


@naive(
    "The time to the first token tells what another tenant has asked.",
    "CVE-2025-46570",
    "kv_index/block_hashing.py",
    "unit/kv_index/test_block_hashing.py::test_salt_isolates_every_block_and_cannot_pose_as_a_medium",
    "assert",
)
def shares_one_cache(guards: Guards) -> None:
    """Keeps one cache for all tenants."""
    hashed: Any = None

    def unsalted(*arguments: Any, **options: Any) -> object:
        return hashed(*arguments, **{**options, "cache_salt": ""})

    hashed = guards.replace("kv_index.block_hashing:prompt_block_hashes", unsalted)


@naive(
    "A client chooses the salt of another tenant.",
    "CVE-2025-46570",
    "router/service.py",
    "unit/router/test_access_control.py::test_no_tenant_reaches_the_caches_of_another",
    "assert",
)
def joins_salts(guards: Guards) -> None:
    """Puts the salt of the request behind that of its tenant, with nothing that separates them."""

    @guards.method("router.service:salted")
    def joined(request: Any, salt: str) -> object:
        own = request.cache_salt or ""
        return request.model_copy(update={"cache_salt": f"{salt}/{own}" if salt else own})


@naive(
    "A client names the medium of another tenant by its `uuid`.",
    "",
    "router/prompt/named_media.py",
    "unit/router/test_named_media_edge.py::test_an_unknown_name_is_refused_and_so_is_that_of_another_salt",
    "KeyError: 'error'",
)
def names_media_globally(guards: Guards) -> None:
    """Looks a medium up by its name alone."""
    keep: Any = None
    find: Any = None

    def keep_without_salt(self: Any, *words: Any) -> None:
        *owner, _, modality, uuid, file = words
        keep(self, *owner, "", modality, uuid, file)

    keep = guards.replace("router.prompt.named_media:NamedMedia.keep", keep_without_salt)
    find = guards.replace("router.prompt.named_media:NamedMedia.find", lambda self, salt, *name: find(self, "", *name))


@naive(
    "Named media of a few bytes, with long names, take all memory.",
    "",
    "router/prompt/named_media.py",
    "unit/router/test_named_media_edge.py::test_small_files_count_what_they_take",
    "assert",
)
def counts_files_alone(guards: Guards) -> None:
    """Counts the bytes of the files, and neither names nor books."""
    guards.replace("router.prompt.named_media:kept_bytes", lambda name, file: len(file.data))


@naive(
    "The time of a refusal tells how much of a key is right.",
    "CVE-2025-59425",
    "router/run/key_book.py",
    "unit/router/run/test_key_book.py::test_a_look_up_compares_with_all_keys_whichever_it_is",
    "assert",
)
def stops_at_the_first_difference(guards: Guards) -> None:
    """Compares keys as strings, up to the first that is equal."""
    from fabric.contracts import Unauthorized

    @guards.method("router.run.key_book:KeyBook.find")
    def find(self: Any, key: str) -> object:
        for known in self._keys:
            if hashlib.sha256(key.encode()).digest() == known.digest:
                return known.caller
        raise Unauthorized("the API key is unknown")


@naive(
    "A path without a key shows the requests of all tenants.",
    "",
    "router/edge/access.py",
    "unit/router/test_access_control.py::test_every_route_but_health_asks_for_a_key",
    "assert",
)
def guards_v1_alone(guards: Guards) -> None:
    """Asks for keys below `/v1` only."""
    from router.run import Caller

    call: Any = None

    async def guarded(self: Any, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not scope["path"].startswith("/v1"):
            scope["weft.caller"] = Caller()
            await self._app(scope, receive, send)
        else:
            await call(self, scope, receive, send)

    call = guards.replace("router.edge.access:AccessControl.__call__", guarded)


BROWSERS = "unit/router/test_cross_site.py::"


@naive(
    "A page of another site has the browser send a body of a type for which it need not ask.",
    "",
    "router/edge/cross_site.py",
    f"{BROWSERS}test_a_body_of_another_type_is_refused_by_every_route",
    "assert",
)
def reads_every_type(guards: Guards) -> None:
    """Reads a body whatever its type."""
    guards.replace("router.edge.cross_site:check_content_type", lambda scope, wanted: None)


@naive(
    "A page of another site sends a request to a cluster that asks for no key.",
    "",
    "router/edge/cross_site.py",
    f"{BROWSERS}test_without_keys_pages_of_other_sites_can_send_nothing",
    "assert",
)
def answers_every_page(guards: Guards) -> None:
    """Answers requests from everywhere."""
    guards.replace("router.edge.cross_site:check_site", lambda scope, hosts, origins: None)


@naive(
    "The name of a site suddenly leads to the reader's own machine (DNS rebinding).",
    "",
    "router/edge/cross_site.py",
    f"{BROWSERS}test_a_server_with_known_names_refuses_others[evil.example:8000-False]",
    "assert",
)
def has_every_name(guards: Guards) -> None:
    """Compares the origin with the host alone."""
    guards.replace("router.edge.cross_site:_is_allowed", lambda host, patterns: True)
