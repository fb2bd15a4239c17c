"""Describes the dashboards of the whole: the overview of requests and of the cluster's health, and the router's own.

Every panel says what it shows and what a bad value means. The module knows nothing of Grafana's form.
"""

from __future__ import annotations

from deploy.grafana.panels import Board, BoardRow, Panel, Query
from deploy.grafana.queries import RATE, mean, per_second, quantiles
from fabric.contracts import CODE_TO_ERROR
from router.api import status_of

_PARTS = ',stage!~"first_token|ready"'
"""Leaves out the stages that contain others."""
OWN_FAULTS = "|".join(
    sorted(
        {code for code, kind in CODE_TO_ERROR.items() if status_of(kind("")) >= 500} - {"draining"} | {"internal_error"}
    )
)
"""Matches the codes of requests that the cluster failed to serve."""


def _stages(names: str, number: str) -> Query:
    """Returns the measured seconds of stages, divided by the rate of a counter."""
    seconds = f'sum by (stage) (rate(weft_router_stage_actual_seconds_total{{@,stage=~"{names}"}}{RATE}))'
    return Query(f"{seconds} / on () group_left () sum(rate({number}{RATE}))", "{{stage}}")


HEALTH = BoardRow(
    "Is the cluster well?",
    [
        Panel(
            "Requests per second",
            "HTTP exchanges of the API that ended. A sudden drop means that clients don't reach the routers.",
            "reqps",
            [Query(f'sum(rate(weft_router_http_requests_total{{@,endpoint=~"/v1/.+"}}{RATE}))')],
            kind="stat",
            width=4,
        ),
        Panel(
            "Failures",
            "Share of the requests that the cluster failed to serve. The objective is below 0.5 %; look at the code.",
            "percentunit",
            [
                Query(
                    f'(sum(rate(weft_router_requests_total{{@,code=~"{OWN_FAULTS}"}}{RATE})) or vector(0))'
                    f" / sum(rate(weft_router_requests_total{{@}}{RATE}))"
                )
            ],
            [(0.005, "yellow"), (0.05, "red")],
            kind="stat",
            width=4,
        ),
        Panel(
            "First token, p99",
            "One request in a hundred waits longer than this for its first token. Above 2.5 s texts are late.",
            "s",
            quantiles("weft_router_time_to_first_token_seconds", of=(0.99,)),
            [(2.5, "yellow"), (10, "red")],
            kind="stat",
            width=4,
        ),
        Panel(
            "Time per token, p99",
            "One request in a hundred gets its tokens more slowly than this. Above 0.1 s people read faster.",
            "s",
            quantiles("weft_router_time_per_output_token_seconds", of=(0.99,)),
            [(0.1, "yellow"), (0.25, "red")],
            kind="stat",
            width=4,
        ),
        Panel(
            "Waiting requests",
            "Requests that wait at the routers for members, room or their turn. More than a few: the cluster is full.",
            "short",
            [Query("sum(weft_router_requests_waiting{@})")],
            [(5, "yellow"), (20, "red")],
            kind="stat",
            width=4,
        ),
        Panel(
            "Missing members",
            "Members that the config asks for and the directory does not list. Anything above 0 needs a look.",
            "short",
            [
                Query(
                    "sum(clamp_min(max by (kind) (weft_router_members_expected{@})"
                    " - max by (kind) (weft_router_members{@}), 0))"
                )
            ],
            [(1, "red")],
            kind="stat",
            width=4,
        ),
    ],
)

LOST_TIME = BoardRow(
    "Where does a slow request lose its time?",
    [
        Panel(
            "First token by modality, p90",
            "The highest line is the class to look at. Videos are slower by nature; texts should not be.",
            "s",
            quantiles("weft_router_time_to_first_token_seconds", "modality", (0.9,)),
            [(2.5, "yellow"), (10, "red")],
        ),
        Panel(
            "Time of a request by part",
            "Mean time of making the prompt, at the worker, and everything outside the worker. `router` above `prompt` "
            "means that requests wait at the routers.",
            "s",
            [mean("weft_router_stage_seconds", "stage", "{{stage}}")],
            more="weft-router",
        ),
        Panel(
            "Work in queues",
            "Predicted seconds of work that waits: for forward passes and decoding at encoders, and for prefill at "
            "workers. What grows without end is the bottleneck.",
            "s",
            [
                Query("max(weft_encoder_queue_seconds{@})", "encoders, forward"),
                Query("max(weft_encoder_decode_queue_seconds{@})", "encoders, decoding"),
                Query(
                    "max(weft_worker_queued_weighted_tokens{@} * weft_worker_prefill_seconds_per_token{@})",
                    "workers, prefill",
                ),
            ],
            [(5, "yellow"), (10, "red")],
            least=0.1,
        ),
        Panel(
            "At the worker until the first token",
            "Mean time of a request in each stage of its worker; the stages add up. `queue`: workers are short. "
            "`held`: prefill waits for features, so look at encoders and links.",
            "s",
            [_stages("queue|prefill|held", "weft_router_time_to_first_token_seconds_count{@}")],
            kind="bars",
            more="weft-workers",
        ),
        Panel(
            "At the encoders, per item",
            "Mean time of an item in each stage of its encoder. `decode_wait`: decode processes are short. `encode` "
            "far above the others: add encoders, or lower what media cost.",
            "s",
            [_stages("decode_wait|decode|device_prepare|encode", "weft_router_media_items_total{@}")],
            kind="bars",
            more="weft-encoders",
        ),
        Panel(
            "Overlap of encoding and prefill, median",
            "The least possible time to first token, divided by the actual one, of requests with media. Near "
            "1 nothing is lost; well below it, something waits that could run.",
            "percentunit",
            quantiles("weft_router_modality_overlap_efficiency_ratio", "modality", (0.5,), ',modality!="text"'),
            [(0.4, "yellow"), (0.7, "green")],
            most=1,
            more="weft-transfers",
        ),
    ],
)

REQUESTS = BoardRow(
    "Requests",
    [
        Panel(
            "By route and status",
            "HTTP exchanges per second. 429 is a limit at work, 5xx a failure, 499 a client that left.",
            "reqps",
            [
                per_second(
                    "weft_router_http_requests_total",
                    "endpoint, status",
                    "{{endpoint}} {{status}}",
                    ',endpoint=~"/v1/.+|/tokenize|/detokenize|other"',
                )
            ],
            kind="bars",
            red=" 5..$",
        ),
        Panel(
            "Ends by code",
            "Requests per second that ended with anything but `ok`. docs/troubleshooting.md explains each code.",
            "reqps",
            [Query(f'sum by (code) (rate(weft_router_requests_total{{@,code!="ok"}}{RATE})) > 0', "{{code}}")],
            kind="bars",
            empty="All requests ended with ok",
        ),
        Panel(
            "In flight and waiting",
            "Requests that are admitted, and those of them that wait at the routers. If most of them wait, the cluster "
            "is full.",
            "short",
            [
                Query("sum(weft_router_requests_in_flight{@})", "in flight"),
                Query("sum(weft_router_requests_waiting{@})", "waiting"),
            ],
        ),
        Panel(
            "Time to first token",
            "From the arrival of a request to its first token. A p99 far above the p50 means that some requests queue "
            "behind long ones.",
            "s",
            quantiles("weft_router_time_to_first_token_seconds"),
            [(2.5, "yellow"), (10, "red")],
        ),
        Panel(
            "Inter-token latency",
            "Time between two tokens of a choice. If it rises with the load, workers compute too many sequences at "
            "once.",
            "s",
            quantiles("weft_router_inter_token_latency_seconds"),
            [(0.1, "yellow"), (0.25, "red")],
        ),
        Panel(
            "Duration",
            "From the arrival of a request to its end. It follows the length of answers.",
            "s",
            quantiles("weft_router_request_duration_seconds"),
        ),
        Panel(
            "Tokens per second",
            "Prompt tokens of requests that ended, those of them that were cached, and generated tokens. If prompts "
            "rise and generated tokens do not, workers are busy with prefill.",
            "short",
            [
                Query(f"sum(rate(weft_router_prompt_tokens_total{{@}}{RATE}))", "prompt"),
                Query(f"sum(rate(weft_router_prefix_hit_tokens_total{{@}}{RATE}))", "prompt, cached"),
                Query(f"sum(rate(weft_router_completion_tokens_total{{@}}{RATE}))", "generated"),
            ],
        ),
        Panel(
            "Media per second",
            "Items of media by modality. A new kind of load shows here first.",
            "short",
            [per_second("weft_router_media_items_total", "modality", "{{modality}}")],
        ),
        Panel(
            "Tokens per second by tenant",
            "Computed and generated tokens of each tenant. One tenant that takes nearly all may keep others waiting.",
            "short",
            [per_second("weft_router_tenant_tokens_total", "tenant", "{{tenant}}")],
            kind="bars",
        ),
    ],
)

PROCESSES = BoardRow(
    "Processes",
    [
        Panel(
            "Processor cores in use",
            "Cores that each member's process uses. A router at 1 has a full event loop: add routers.",
            "short",
            [per_second("weft_process_cpu_seconds_total", "kind, member", "{{kind}} {{member}}")],
        ),
        Panel(
            "Memory",
            "Memory of each member's process in RAM. Growth without end is a leak; report it.",
            "bytes",
            [Query("sum by (kind, member) (weft_process_resident_memory_bytes{@})", "{{kind}} {{member}}")],
        ),
        Panel(
            "Open files",
            "Share of the open files that the system allows. Near 1, connections fail.",
            "percentunit",
            [
                Query(
                    "max by (kind, member) (weft_process_open_fds{@} / weft_process_max_fds{@})", "{{kind}} {{member}}"
                )
            ],
            [(0.6, "yellow"), (0.8, "red")],
        ),
        Panel(
            "What runs",
            "Versions and models of the routers. Two versions at once are an upgrade under way, or one that got stuck.",
            "short",
            [Query("count by (version, python, model) (weft_build_info{@})", "routers")],
            kind="table",
            width=24,
        ),
    ],
)

OVERVIEW = Board(
    "weft-overview",
    "Weft overview",
    "Requests, times and failures of a cluster, and where slow requests lose their time.",
    [HEALTH, LOST_TIME, REQUESTS, PROCESSES],
)

ROUTER = Board(
    "weft-router",
    "Weft router",
    "What the routers predict, where they send requests, what they admit and what they know.",
    [
        BoardRow(
            "Predicted against actual",
            [
                Panel(
                    "Time to first token, predicted and actual, p50",
                    "From dispatch to the first token. If the lines part, requests may go to the wrong members.",
                    "s",
                    [
                        *(
                            q._replace(legend="predicted")
                            for q in quantiles("weft_router_predicted_ttft_seconds", of=(0.5,))
                        ),
                        *(q._replace(legend="actual") for q in quantiles("weft_router_actual_ttft_seconds", of=(0.5,))),
                    ],
                ),
                Panel(
                    "Predicted divided by actual",
                    "1 is right, 2 means that the router expects twice the time. Far from 1 for long: see the stages.",
                    "none",
                    quantiles("weft_router_ttft_ratio", of=(0.1, 0.5, 0.9)),
                    [(2, "yellow"), (4, "red")],
                ),
                Panel(
                    "Relative error by stage",
                    "Absolute error of a stage, divided by its measured time, up to 200 %. Stages of a few "
                    "milliseconds are hard to predict and matter little.",
                    "percentunit",
                    [
                        Query(
                            f"sum by (stage) (rate(weft_router_stage_error_seconds_total{{@}}{RATE}))"
                            f" / sum by (stage) (rate(weft_router_stage_actual_seconds_total{{@}}{RATE}))",
                            "{{stage}}",
                        )
                    ],
                    [(0.5, "yellow"), (1, "red")],
                    most=2,
                ),
                Panel(
                    "Terms of the score: predicted seconds per second",
                    "What plans expect of each stage. The largest term decides where requests go.",
                    "s",
                    [per_second("weft_router_stage_predicted_seconds_total", "stage", "{{stage}}", _PARTS)],
                    kind="bars",
                ),
                Panel(
                    "Measured seconds per second",
                    "The same stages as they were. It should look like the panel beside it.",
                    "s",
                    [per_second("weft_router_stage_actual_seconds_total", "stage", "{{stage}}", _PARTS)],
                    kind="bars",
                ),
                Panel(
                    "Predictions that were compared",
                    "Requests per second of which prediction and measurement are known, by stage. Too few of them "
                    "make the other panels of this row unsure.",
                    "ops",
                    [per_second("weft_planner_observations_total", "stage", "{{stage}}")],
                ),
            ],
        ),
        BoardRow(
            "Hit rates",
            [
                Panel(
                    "Prompt tokens from KV caches",
                    "Share of the prompt tokens that were found in a cache. It falls if prompts change, or if requests "
                    "go to workers that do not have their prefix.",
                    "percentunit",
                    [
                        Query(
                            f"sum(rate(weft_router_prefix_hit_tokens_total{{@}}{RATE}))"
                            f" / sum(rate(weft_router_prompt_tokens_total{{@}}{RATE}))",
                            "found",
                        )
                    ],
                    most=1,
                ),
                Panel(
                    "Promised and found",
                    "Tokens that the index promised, and those that workers found. If fewer are found, the index is "
                    "out of step or caches are too small.",
                    "short",
                    [
                        Query(f'sum(rate(weft_planner_predicted_total{{@,stage="prefix_tokens"}}{RATE}))', "promised"),
                        Query(f'sum(rate(weft_planner_actual_total{{@,stage="prefix_tokens"}}{RATE}))', "found"),
                    ],
                ),
                Panel(
                    "Items that need no encoder",
                    "Share of the media that a KV cache covers. Conversations about the same picture raise it.",
                    "percentunit",
                    [
                        Query(
                            f"sum(rate(weft_router_covered_items_total{{@}}{RATE}))"
                            f" / sum(rate(weft_router_media_items_total{{@}}{RATE}))",
                            "covered",
                        )
                    ],
                    most=1,
                ),
            ],
        ),
        BoardRow(
            "Admission and attempts",
            [
                Panel(
                    "Decisions of admission",
                    "Requests per second by class and what was decided. Anything but `dispatched` was refused.",
                    "reqps",
                    [
                        per_second(
                            "weft_router_admissions_total", "service_class, outcome", "{{service_class}} {{outcome}}"
                        )
                    ],
                    kind="bars",
                ),
                Panel(
                    "Waits for room, p90",
                    "How long requests wait at the routers, by class. Batch requests may wait; interactive ones "
                    "should not.",
                    "s",
                    quantiles("weft_router_gate_wait_seconds", "service_class", (0.9,)),
                    [(1, "yellow"), (5, "red")],
                    empty="No request had to wait",
                ),
                Panel(
                    "Attempts by outcome",
                    "More attempts than requests means that members fail and requests migrate. Their outcomes name "
                    "the errors.",
                    "ops",
                    [per_second("weft_router_attempts_total", "outcome", "{{outcome}}")],
                    kind="bars",
                ),
                Panel(
                    "Failed calls to members",
                    "Calls that failed, by kind and error. Single ones are retried elsewhere; many mean a sick member.",
                    "ops",
                    [per_second("weft_router_dispatch_errors_total", "kind, code", "{{kind}} {{code}}")],
                    [(0.1, "yellow"), (1, "red")],
                    least=0.1,
                    empty="No call has failed since the routers began",
                ),
                Panel(
                    "Media that were degraded",
                    "Items that models did not get as they were sent, by action and reason. Answers may be worse.",
                    "ops",
                    [per_second("weft_router_degraded_total", "action, reason", "{{action}} {{reason}}")],
                    [(0.01, "yellow"), (0.1, "red")],
                    least=0.01,
                    empty="No item was degraded since the routers began",
                ),
                Panel(
                    "Reading and fetching media, p90",
                    "Time of reading a header, and of fetching a medium by URL. Slow servers of media delay their own "
                    "requests only.",
                    "s",
                    [
                        *(
                            q._replace(legend="header, {{modality}}")
                            for q in quantiles("weft_router_probe_seconds", "modality", (0.9,))
                        ),
                        *(
                            q._replace(legend="fetch, {{outcome}}")
                            for q in quantiles("weft_router_fetch_seconds", "outcome", (0.9,))
                        ),
                    ],
                ),
            ],
        ),
        BoardRow(
            "What routers know",
            [
                Panel(
                    "Members",
                    "Members that the directory lists, and those that the config asks for. If fewer are there for "
                    "minutes, Serve can't place or start them. Members that refuse a change of the config keep the "
                    "former values.",
                    "short",
                    [
                        Query("max by (kind) (weft_router_members{@})", "{{kind}}"),
                        Query("max by (kind) (weft_router_members_expected{@})", "{{kind}}, expected"),
                        Query("max by (kind) (weft_router_members_refusing_config{@})", "{{kind}}, refusing"),
                    ],
                    width=6,
                    dashed=", expected$",
                ),
                Panel(
                    "Keys in the indexes",
                    "KV blocks and features whose places the routers know. If it stays at its limit, raise "
                    "`router.max_index_blocks` or `router.max_index_items`.",
                    "short",
                    [Query("max by (index) (weft_index_keys{@})", "{{index}}")],
                    width=6,
                ),
                Panel(
                    "Out of step, and silent",
                    "Members whose events are missing from an index, and routers that do not answer the others. Both "
                    "should be 0.",
                    "short",
                    [
                        Query("max by (index) (weft_index_sources_out_of_step{@})", "out of step, {{index}}"),
                        Query("max(weft_router_num_silent{@})", "silent routers"),
                    ],
                    [(1, "red")],
                    width=6,
                    least=1,
                ),
                Panel(
                    "Token frames not used",
                    "Frames by reason. Some are normal when clients leave or choices end; many mean lost messages.",
                    "ops",
                    [per_second("weft_router_frames_dropped_total", "reason", "{{reason}}")],
                    width=6,
                    least=0.1,
                    empty="Every frame was used",
                ),
            ],
        ),
    ],
)
