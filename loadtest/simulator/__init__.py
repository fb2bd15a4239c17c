"""Simulates a cluster on a virtual clock, around the code that runs in production: `weft simulate`.

The planner, the index, the queue for capacity, the encoder's pipeline and the worker's scheduler are those of the
product. What is simulated is time: steps, forward passes, preparation and transfers take what a table says, messages
take a delay, and requests come from a workload or a trace.

    event_loop        keeps the virtual time
    cost_tables       reads what things take, from `tables/`
    sim_requests      defines requests and their outcomes
    sim_transport     moves features: arenas and inboxes without memory, and links
    sim_worker        runs the scheduler of one worker
    sim_encoder       runs the pipeline of one encoder
    sim_router        runs the planner of one router
    policies          chooses members in other ways than the planner
    faults            describes what goes wrong
    sim_cluster       builds a cluster of these and runs it
    sim_scaling       scales its pools with the production code
    scaling_burst     runs a burst of pictures on a cluster that scales itself
    workloads         draws requests
    trace_files       reads requests of traces; `samples/` has the formats
    sim_runs          carries out several runs, and knows which load a cluster bears
    speech_timeline   runs the stages that speak, with chunks and without
    document_figures  simulates the figures of the documents
    choice            compares policies
    choice_curve      compares them over load, media, encoders and networks
    cluster_size      finds the smallest cluster for a workload
    sim_report        makes numbers, tables and plots of results
    sim_command       carries out the commands

`deploy` puts the options of `weft simulate` into its command line and calls `simulate`. `loadtest.load` sends the
requests of a `WorkloadSpec` to a real cluster. This face imports the rest when a simulation runs. The folder knows
nothing of how Weft is deployed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from loadtest.simulator.sim_requests import SimRequest
from loadtest.simulator.workloads import QUESTION, WorkloadSpec, generate, media_of, parse_mix

__all__ = ["QUESTION", "SimRequest", "WorkloadSpec", "add_options", "generate", "media_of", "parse_mix", "simulate"]

DESCRIPTION = """\
Simulates a cluster on a virtual clock. Planner, index, encoder pipeline and worker scheduler are the production code;
the times of steps, forward passes and transfers come from a cost table.

examples:
  weft simulate run --policy joint,worker-first --workers 16 --encoders 6 --load 0.8
  weft simulate run --mix text=0.8,image=0.2 --fault death:worker-3@10 --report build/simulation
  weft simulate run --trace AzureLMMInferenceTrace_multimodal.csv --trace-requests 20000
  weft simulate figures           compares the figures of the documents with the simulator's
  weft simulate choice            runs the comparisons of policies
  weft simulate size --rate 20 --mix text=0.8,image=0.2 --slo-ttft 2
                                  counts the workers and encoders for a workload
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the commands and options of `weft simulate` to a parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = DESCRIPTION
    commands = parser.add_subparsers(dest="simulation", required=True)
    run = commands.add_parser("run", help="runs one workload or trace with one or several policies")
    _add_run_options(run)
    figures = commands.add_parser("figures", help="compares the figures of the documents with the simulator's")
    figures.add_argument("names", nargs="*", help="names the figures; all of them if none is named")
    choice = commands.add_parser("choice", help="compares policies: the experiments behind the bars on the choice")
    choice.add_argument(
        "names", nargs="*", help="names the experiments; all but `autoscaling`, `sizing` and `large` if none is named"
    )
    choice.add_argument("--requests", type=int, default=4000, help="sets the number of requests of each run")
    choice.add_argument("--workers", type=int, default=16, help="sets the number of workers")
    choice.add_argument("--encoders", type=int, default=6, help="sets the number of encoders")
    choice.add_argument(
        "--large", default="", metavar="RUNS", help="sets the runs of `large` as requests:workers:encoders,..."
    )
    choice.add_argument(
        "--seeds", type=int, default=3, help="sets how many seeds the curve and the test of chance take"
    )
    size = commands.add_parser("size", help="counts the workers and encoders that serve a workload fast enough")
    _add_size_options(size)
    for command in (run, figures, choice, size):
        command.add_argument("--seed", type=int, default=1, help="seeds the random numbers")
        command.add_argument("--processes", type=int, default=2, help="sets how many runs go on at once")
        command.add_argument("--report", type=Path, help="writes a page with tables and plots to this folder")
        command.add_argument(
            "--json", action="store_true", help="prints only the bars, as JSON; the tables go to standard error"
        )


def _add_run_options(run: argparse.ArgumentParser) -> None:
    cluster = run.add_argument_group("cluster")
    _add_table_options(cluster)
    cluster.add_argument("--workers", type=int, default=16, help="sets the number of workers")
    cluster.add_argument("--encoders", type=int, default=6, help="sets the number of encoders")
    cluster.add_argument("--routers", type=int, default=1, help="sets the number of routers")
    cluster.add_argument("--policy", default="joint", help="names policies, separated by commas, or `all`")
    cluster.add_argument("--report-delay", type=float, default=0.0, help="delays reports to routers by seconds")
    cluster.add_argument(
        "--fault", action="append", default=[], help="adds a fault: death:worker-3@10 or slow:encoder-0@5-20x4"
    )
    workload = run.add_argument_group("workload")
    _add_workload_options(workload)
    workload.add_argument("--load", type=float, default=0.8, help="sets the rate as a share of the capacity")
    workload.add_argument("--rate", type=float, default=0.0, help="sets the requests per second, in place of --load")
    workload.add_argument("--trace", type=Path, help="reads Azure's CSV or a folder of ServeGen's clients instead")
    workload.add_argument("--trace-requests", type=int, default=0, help="limits the requests of the trace")
    workload.add_argument("--trace-speed-up", type=float, default=1.0, help="divides the times of the trace")
    workload.add_argument("--trace-picture", default="image", help="names the medium for the pictures of the trace")
    run.add_argument("--single-steps", action="store_true", help="plans every decode step by itself")


def _add_size_options(size: argparse.ArgumentParser) -> None:
    _add_table_options(size.add_argument_group("cluster"))
    workload = size.add_argument_group("workload")
    _add_workload_options(workload)
    workload.add_argument("--rate", type=float, required=True, help="sets the requests per second")
    goal = size.add_argument_group("goal")
    goal.add_argument("--slo-ttft", type=float, default=2.0, help="sets the seconds to the first token")
    goal.add_argument("--slo-tpot", type=float, default=0.1, help="sets the seconds between further tokens")
    goal.add_argument("--share", type=float, default=0.95, help="sets the share of requests that must meet both")


def _add_table_options(cluster: argparse._ArgumentGroup) -> None:
    """Adds the options that say how fast members are, and how much memory they have."""
    cluster.add_argument("--table", default="omniconnector-a100", help="names the cost table, or its file")
    cluster.add_argument("--block-size", type=int, default=32, help="sets the tokens of a KV block")
    cluster.add_argument("--blocks", type=int, default=4096, help="sets the KV blocks of a worker")
    cluster.add_argument("--slow-workers", default="", help="multiplies the times of workers in turn, e.g. 1,1,2")
    cluster.add_argument("--slow-encoders", default="", help="multiplies the times of encoders in turn, e.g. 1,1,2")


def _add_workload_options(workload: argparse._ArgumentGroup) -> None:
    workload.add_argument("--requests", type=int, default=2000, help="sets the number of requests")
    workload.add_argument("--mix", default="", help="sets the shares of kinds, e.g. text=0.8,image*4=0.2")
    workload.add_argument("--prompt", type=float, default=600, help="sets the mean number of text tokens")
    workload.add_argument("--output", type=float, default=200, help="sets the mean number of output tokens")
    workload.add_argument("--burstiness", type=float, default=1.0, help="sets the variation of gaps; 1 is Poisson")
    workload.add_argument("--turns", type=float, default=1.0, help="sets the mean number of turns of a conversation")
    workload.add_argument("--shared-media", type=float, default=0.0, help="sets the share of media that repeat")


def simulate(arguments: argparse.Namespace) -> int:
    """Carries out a parsed command. Returns 0 even when a bar is missed, because a miss is a result. Raises ConfigError
    for options that contradict each other."""
    from loadtest.simulator.sim_command import carry_out_command

    return carry_out_command(arguments)
