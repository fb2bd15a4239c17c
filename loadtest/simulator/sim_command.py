"""Carries out the commands of `weft simulate`: runs, figures, comparisons and sizes.

Each prints tables and bars, or with `--json` its bars and nothing else, and writes its result with machine and commit
to `loadtest/results/`, and with `--report` a page. The module knows nothing of how a simulation works.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from fabric.contracts import ConfigError
from loadtest.bench_result import Bar, BenchResult, commit, machine, publish, render_table
from loadtest.report_page import Plot, Table, write_report
from loadtest.simulator.choice import EXPERIMENTS, LARGE_RUNS, MIX, ONLY_BY_NAME, ChoiceScale, Experiment, LargeRun
from loadtest.simulator.cluster_size import SIZE_HEADINGS, SizeGoal, SizeSearch, size_row
from loadtest.simulator.cost_tables import load_table
from loadtest.simulator.document_figures import FIGURES, DocumentFigure
from loadtest.simulator.faults import parse_fault
from loadtest.simulator.policies import POLICIES, SEQUENTIAL
from loadtest.simulator.sim_cluster import ClusterSettings
from loadtest.simulator.sim_report import as_json, distribution_plot, kind_table, summarise, summary_table
from loadtest.simulator.sim_runs import SimRun, at_load, run_all
from loadtest.simulator.trace_files import TraceOptions
from loadtest.simulator.workloads import WorkloadSpec, parse_mix


def carry_out_command(arguments: argparse.Namespace) -> int:
    """Carries out a parsed command, and returns 0."""
    {"run": _run, "figures": _figures, "choice": _choice, "size": _size}[arguments.simulation](arguments)
    return 0


def _report(arguments: argparse.Namespace, title: str, parts: Sequence[str | Table | Plot]) -> None:
    if arguments.report is not None:
        page, pictures = write_report(arguments.report, title, parts, f"commit {commit()}, {machine()['cpu']}")
        print(f"the report is {page}, with {len(pictures)} plots", file=sys.stderr)


# ---------------------------------------------------------------- run


def _run(arguments: argparse.Namespace) -> None:
    runs = runs_of(arguments)
    results = run_all(runs, arguments.processes)
    summaries = [summarise(each) for each in results]
    bars = []
    policy_to_p99 = {one.policy: one.ttft.p99 for one in summaries}
    if "joint" in policy_to_p99 and (others := [policy_to_p99[one] for one in SEQUENTIAL if one in policy_to_p99]):
        ratio = policy_to_p99["joint"] / min(others)
        bars.append(Bar("joint over the best sequential policy, TTFT p99", ratio, 0.8, "times", is_max=True))
    people = sys.stderr if arguments.json else sys.stdout
    settings, workload = runs[0].settings, runs[0].workload
    table = settings.table
    told = (
        f"{settings.num_workers} workers, {settings.num_encoders} encoders, {settings.num_routers} routers; costs of "
        f"{table.source}; {workload.rate:.2f} requests/s where no trace says it"
    )
    skipped = sum(one.num_steps - one.num_planned for one in summaries)
    cost = (
        f"{sum(one.num_steps for one in summaries):,} steps, of which {skipped:,} were advanced in stretches, in "
        f"{sum(one.cpu_s for one in summaries):.1f} s of processor time"
    )
    print(
        told, render_table(summary_table(summaries)), render_table(kind_table(summaries)), cost, sep="\n\n", file=people
    )
    parts: list[str | Table | Plot] = [
        told,
        summary_table(summaries),
        distribution_plot(results),
        kind_table(summaries),
    ]
    _report(arguments, "Simulation of " + ", ".join(one.policy for one in summaries), [*parts, *table.assumed, cost])
    if arguments.json:
        told_bars = [bar.to_json() for bar in bars]
        print(json.dumps({"simulate": "run", "bars": told_bars, "runs": [as_json(one) for one in summaries]}))


def runs_of(arguments: argparse.Namespace) -> list[SimRun]:
    """Returns one run per policy. Raises ConfigError for options that make no run."""
    names = list(POLICIES) if arguments.policy == "all" else arguments.policy.split(",")
    settings = ClusterSettings(
        load_table(arguments.table),
        arguments.workers,
        arguments.encoders,
        arguments.routers,
        seed=arguments.seed,
        block_size=arguments.block_size,
        num_blocks=arguments.blocks,
        report_delay_s=arguments.report_delay,
        worker_slowness=_factors(arguments.slow_workers),
        encoder_slowness=_factors(arguments.slow_encoders),
        is_fast=not arguments.single_steps,
        faults=tuple(map(parse_fault, arguments.fault)),
    )
    workload = _workload_of(arguments, settings)
    if not arguments.rate:
        workload = at_load(settings, workload, arguments.load)
    options = TraceOptions(
        picture=arguments.trace_picture,
        shared_pictures=arguments.shared_media,
        speed_up=arguments.trace_speed_up,
        max_requests=arguments.trace_requests,
    )
    runs = []
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"there is no policy {name!r}; the policies are {', '.join(POLICIES)} and all")
        runs.append(SimRun(name, replace(settings, policy=name), workload, arguments.seed, arguments.trace, options))
    return runs


def _workload_of(arguments: argparse.Namespace, settings: ClusterSettings) -> WorkloadSpec:
    """Returns the workload of the options, with a rate of 1 where they state none."""
    known = {kind: share for kind, share in MIX.items() if kind.partition("*")[0] in {"text", *settings.table.media}}
    return WorkloadSpec(
        arguments.requests,
        arguments.rate or 1.0,
        parse_mix(arguments.mix) if arguments.mix else known,
        burstiness=arguments.burstiness,
        mean_prompt=arguments.prompt,
        mean_output=arguments.output,
        mean_turns=arguments.turns,
        shared_media=arguments.shared_media,
    )


def _factors(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(factor) for factor in text.split(",") if factor)
    except ValueError as error:
        raise ConfigError(f"{text!r} is no list of factors; write for example 1,1,2") from error


# ---------------------------------------------------------------- sizes


def _size(arguments: argparse.Namespace) -> None:
    """Prints the smallest cluster for a workload, and its neighbours."""
    settings = ClusterSettings(
        load_table(arguments.table),
        1,
        1,
        seed=arguments.seed,
        block_size=arguments.block_size,
        num_blocks=arguments.blocks,
        worker_slowness=_factors(arguments.slow_workers),
        encoder_slowness=_factors(arguments.slow_encoders),
    )
    goal = SizeGoal(arguments.slo_ttft, arguments.slo_tpot, arguments.share)
    search = SizeSearch(settings, _workload_of(arguments, settings), goal, arguments.seed, arguments.processes)
    smallest = search.smallest()
    workers, encoders = smallest.num_workers, smallest.num_encoders
    has_media = encoders > 0
    neighbours = [(workers, encoders + 1), (workers + 1, encoders)] if has_media else [(workers + 1, 0)]
    neighbours += [(workers, encoders - 1)] if encoders > 1 else []
    neighbours += [(workers - 1, encoders)] if workers > 1 else []
    search.at(*neighbours)
    rows = [list(SIZE_HEADINGS), *(size_row(one) for _, one in sorted(search.figures.items()))]
    told = (
        f"{_members(workers, encoders)} serve {arguments.rate:g} requests/s: {smallest.share_met:.1%} have "
        f"their first token within {goal.ttft_s:g} s and further ones {goal.tpot_s:g} s apart (asked: "
        f"{goal.share:.0%} of the texts, and of the requests with media)"
    )
    floor = (
        f"the work alone would fill {_members(search.least_workers, search.least_encoders)}; costs of "
        f"{settings.table.source}"
    )
    people = sys.stderr if arguments.json else sys.stdout
    print(render_table(rows), told, floor, sep="\n\n", file=people)
    _report(arguments, "Size of a cluster", [told, rows, floor, *settings.table.assumed])
    if arguments.json:
        print(json.dumps({"simulate": "size", **smallest._asdict()}))


def _members(workers: int, encoders: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)} and {encoders} encoder{'s' * (encoders != 1)}"


# ---------------------------------------------------------------- figures and comparisons


def _chosen(names: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no {what} {name!r}; there are {', '.join(known)}")
    return list(names or known)


def _figures(arguments: argparse.Namespace) -> None:
    figures = [FIGURES[name]() for name in _chosen(arguments.names, list(FIGURES), "figure")]
    rows = [["figure", "what", "document", "simulator", "unit", "simulator / document", "alike"]]
    for figure in figures:
        rows += [
            [
                figure.name,
                row.what,
                f"{row.document:g}",
                f"{row.simulated:.3g}",
                row.unit,
                f"{row.ratio:.2f}",
                "yes" if row.is_alike else "no",
            ]
            for row in figure.rows
        ]
    bars = [
        Bar(f"{figure.name}: {row.what}, simulator / document off by", abs(row.ratio - 1), row.tolerance, "", True)
        for figure in figures
        for row in figure.rows
    ]
    notes = [line for figure in figures for line in _told(figure)]
    result = BenchResult(rows, bars, notes)
    if arguments.names:
        _print_only(result, "figures", as_json_only=arguments.json)
    else:
        publish("simulate-figures", result, as_json=arguments.json)
    parts: list[str | Table | Plot] = []
    for figure in figures:
        own = [["what", "document", "simulator", "unit"]]
        own += [[row.what, f"{row.document:g}", f"{row.simulated:.3g}", row.unit] for row in figure.rows]
        parts += [f"{figure.title} ({figure.source})", own, *figure.assumed, *figure.notes]
    _report(arguments, "Figures of the documents", parts)


def _told(figure: DocumentFigure) -> list[str]:
    lines = [f"{figure.name}: {figure.title}; the document is {figure.source}"]
    lines += [f"  assumed: {each}" for each in figure.assumed]
    return lines + [f"  noted: {each}" for each in figure.notes]


def _print_only(result: BenchResult, name: str, *, as_json_only: bool) -> None:
    """Prints a part of a result, which replaces no file."""
    people = sys.stderr if as_json_only else sys.stdout
    print(render_table(result.rows), *result.notes, sep="\n", file=people)
    if as_json_only:
        print(json.dumps({"simulate": name, "bars": [bar.to_json() for bar in result.bars]}))


def _large_runs(text: str) -> tuple[LargeRun, ...]:
    """Returns the runs of the experiment `large`. Raises ConfigError."""
    if not text:
        return LARGE_RUNS
    try:
        return tuple(LargeRun(*map(int, run.split(":"))) for run in text.split(","))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{text!r} is no list of runs; write for example 2000:256:64,500:1000:200") from error


def _choice(arguments: argparse.Namespace) -> None:
    scale = ChoiceScale(
        arguments.requests,
        arguments.workers,
        arguments.encoders,
        arguments.processes,
        arguments.seed,
        _large_runs(arguments.large),
        arguments.seeds,
    )
    experiments: list[Experiment] = []
    names = arguments.names or [name for name in EXPERIMENTS if name not in ONLY_BY_NAME]
    for name in _chosen(names, list(EXPERIMENTS), "experiment"):
        print(f"experiment {name}", file=sys.stderr)
        experiments.append(EXPERIMENTS[name](scale))
    for experiment in experiments:
        rows = [part for part in experiment.parts if not isinstance(part, str | Plot)]
        told = [part for part in experiment.parts if isinstance(part, str)]
        result = BenchResult([list(row) for row in rows[0]] if rows else [["experiment"], [experiment.name]], [], told)
        result = BenchResult(result.rows, list(experiment.bars), [*result.notes, f"scale: {asdict(scale)}"])
        publish(f"simulate-{experiment.name}", result, as_json=arguments.json)
    parts: list[str | Table | Plot] = []
    for experiment in experiments:
        parts += [f"Experiment: {experiment.name}.", *experiment.parts]
        parts += [f"{bar.name}: {bar.value:.3g} (target {bar.target:g})" for bar in experiment.bars]
    _report(arguments, "Choice of members", parts)
