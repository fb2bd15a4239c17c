from __future__ import annotations

import builtins
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from simulated_requests import run, small_cluster, small_workload

from deploy.cli import main
from loadtest.report_page import Percentiles, Plot, write_report
from loadtest.simulator import sim_runs
from loadtest.simulator.choice import ChoiceScale, LargeRun, large
from loadtest.simulator.document_figures import FIGURES
from loadtest.simulator.sim_report import kind_table, summarise, summary_table
from loadtest.simulator.sim_runs import SAMPLE, LeastWork, ProgressBar, SimRun, at_load, capacity, run_all
from loadtest.simulator.workloads import WorkloadSpec


def test_a_summary_counts_what_was_served() -> None:
    requests = small_workload(80, 10.0)
    result = run(small_cluster(), requests)
    summary = summarise(result, 0.0)
    outcomes = result.outcomes
    assert summary.num_requests == 80
    assert summary.num_failed == 0
    assert summary.ttft == Percentiles.of([one.first_token_s for one in outcomes])
    assert sum(one.count for one in summary.kind_to_ttft.values()) == 80
    assert summary.tokens_per_s / summary.requests_per_s == pytest.approx(sum(one.num_output for one in requests) / 80)
    assert 0.0 < summary.overlap <= 1.05
    assert summary.num_planned <= summary.num_steps
    table = summary_table([summary])
    assert [len(row) for row in table] == [len(table[0])] * 2
    assert {row[1] for row in kind_table([summary])[1:]} == set(summary.kind_to_ttft)


def test_a_load_is_a_share_of_the_capacity() -> None:
    cluster, workload = small_cluster(), WorkloadSpec(100, 1.0, {"text": 1.0}, mean_prompt=300)
    assert at_load(cluster, workload, 0.5).rate == pytest.approx(0.5 * capacity(cluster, workload))
    assert capacity(small_cluster(num_workers=6), workload) == pytest.approx(2 * capacity(cluster, workload))
    assert capacity(small_cluster(worker_slowness=(2.0,)), workload) == pytest.approx(0.5 * capacity(cluster, workload))
    videos = WorkloadSpec(100, 1.0, {"video-120f": 1.0}, mean_output=1)
    one, two = (capacity(small_cluster(num_encoders=count, num_workers=64), videos) for count in (1, 2))
    assert two == pytest.approx(2 * one), "encoders limit this workload"


def test_work_that_caches_save_counts_once() -> None:
    table = small_cluster().table
    one_picture = WorkloadSpec(100, 1.0, {"image": 1.0}, shared_media=1.0, num_shared=1)
    encoding = table.modality_to_encoding["image"].forward_s(table.kind("image").cost)
    assert LeastWork.of(table, one_picture).encode_s == pytest.approx(encoding / SAMPLE)
    assert LeastWork.of(table, WorkloadSpec(100, 1.0, {"image": 1.0})).encode_s == pytest.approx(encoding)
    alone = LeastWork.of(table, WorkloadSpec(100, 1.0, mean_prompt=300, prompt_spread=0.0))
    talks = LeastWork.of(table, WorkloadSpec(100, 1.0, mean_prompt=300, prompt_spread=0.0, mean_turns=4.0))
    assert alone.num_prompt == 300
    assert talks.num_prompt > 2 * alone.num_prompt, "a turn repeats what was said before"
    assert talks.prefill_tokens < 1.2 * alone.prefill_tokens, "which is computed already"


def test_a_page_has_tables_and_plots(tmp_path: Path) -> None:
    plot = Plot("line", "A line", "x", "y", {"joint": [(0.0, 1.0), (1.0, 3.0)], "random": [(0.0, 2.0), (1.0, 9.0)]})
    page, pictures = write_report(tmp_path, "A <title>", ["a paragraph", [["what", "how"], ["a", "1 & 2"]], plot], "me")
    text = page.read_text()
    assert "A &lt;title&gt;" in text
    assert "<td>1 &amp; 2</td>" in text
    if find_spec("matplotlib") is None:
        assert pictures == []
        assert "install weft[simulate]" in text
    else:
        assert [each.read_bytes()[:4] for each in pictures] == [b"\x89PNG"]


def test_a_page_without_matplotlib_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *arguments: object, **options: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    page, pictures = write_report(tmp_path, "title", [Plot("p", "A plot", "x", "y", {})], "me")
    assert pictures == []
    assert "A plot: install weft[simulate] to get this plot." in page.read_text()


def test_progress_is_told_by_tenths_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    bar = ProgressBar(1000, sys.stderr)
    for num_ended in (10, 250, 260, 1000):
        bar.show(num_ended)
    bar.end()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [" 25% of 1", "100% of 1"]


def test_runs_keep_their_order_and_labels() -> None:
    workload = WorkloadSpec(20, 10.0, mean_output=5)
    runs = [SimRun(name, small_cluster(policy=name), workload) for name in ("random", "joint")]
    assert [each.policy for each in run_all(runs, 1, None)] == ["random", "joint"]
    assert sim_runs.carry_out(runs[1]).outcomes == run(small_cluster(), list(runs[1].requests())).outcomes


# ---------------------------------------------------------------- commands


def test_the_command_prints_its_result_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = [
        "--workers",
        "2",
        "--encoders",
        "1",
        "--requests",
        "20",
        "--mix",
        "text=0.5,image=0.5",
        "--processes",
        "1",
    ]
    report = ["--report", str(tmp_path)]
    assert main(["simulate", "run", *options, "--policy", "joint,worker-first", "--json", *report]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in printed["runs"]] == ["joint", "worker-first"]
    assert all(one["num_failed"] == 0 and one["num_requests"] == 20 for one in printed["runs"])
    assert printed["bars"][0]["target"] == 0.8
    assert "worker-first" in (tmp_path / "index.html").read_text()


def test_wrong_options_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "run", "--policy", "best"]) == 1
    assert "there is no policy 'best'" in capsys.readouterr().err
    assert main(["simulate", "figures", "none"]) == 1
    assert "there is no figure 'none'; there are overlap" in capsys.readouterr().err
    assert main(["simulate", "run", "--slow-workers", "1,x"]) == 1
    assert "is no list of factors" in capsys.readouterr().err


def test_large_runs_tell_how_long_they_took() -> None:
    scale = ChoiceScale(num_processes=1, large_runs=(LargeRun(60, 4, 2), LargeRun(30, 8, 3)))
    experiment = large(scale)
    text, (_, first, second) = experiment.parts
    assert "80 % load" in str(text)
    assert (first[0], first[1], first[2]) == ("4 workers, 2 encoders", "60", "0")
    assert (second[0], second[1], second[2]) == ("8 workers, 3 encoders", "30", "0")
    assert [bar.target for bar in experiment.bars] == [20.0, 20.0]
    assert all(0.0 < bar.value < 1.0 for bar in experiment.bars)


def test_the_sizes_of_large_runs_come_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "choice", "large", "--large", "30:4", "--processes", "1"]) == 1
    assert "is no list of runs" in capsys.readouterr().err


# ---------------------------------------------------------------- figures of the documents


@pytest.mark.parametrize("name", ["overlap", "batch", "types", "tpot", "memory"])
def test_the_simulator_gives_the_figures_of_the_documents(name: str) -> None:
    figure = FIGURES[name]()
    assert figure.assumed
    assert [row.what for row in figure.rows if not row.is_alike] == []


@pytest.mark.parametrize(
    ("name", "num_rows", "missed"),
    [
        ("encoding", 17, ["10 s of video and 30 s of sound, H100"]),
        ("batches", 10, ["1 pictures, use of the device", "4 pictures, use of the device"]),
    ],
)
def test_only_what_a_document_contradicts_itself_in_is_missed(name: str, num_rows: int, missed: list[str]) -> None:
    figure = FIGURES[name]()
    assert len(figure.rows) == num_rows
    assert figure.assumed
    assert figure.notes
    assert [row.what for row in figure.rows if not row.is_alike] == missed


def test_figures_are_printed_next_to_the_documents(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "figures", "overlap", "--json"]) == 0
    printed = capsys.readouterr()
    assert [bar["ok"] for bar in json.loads(printed.out)["bars"]] == [True] * 3
    assert "sequential" in printed.err
    assert "3,300 text tokens" in printed.err
