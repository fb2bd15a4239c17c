"""Tests the rules for Prometheus: promtool accepts them, each alert fires when it should and is silent when it should
be, and each has its runbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_tools import prometheus_tool

from fabric.contracts.errors import leaves
from router.api import status_of

ROOT = Path(__file__).resolve().parents[3]
FOLDER, RUNBOOKS = ROOT / "deploy" / "prometheus", ROOT / "docs" / "runbooks"
FILES = (FOLDER / "rules.yaml", FOLDER / "alerts.yaml")
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(FILES[1].read_text())["groups"] for rule in group["rules"]
}
MINUTES = 380
"""Every series lasts this long; alerts look back six hours at most."""
REQUESTS = 'weft_router_requests_total{cluster="c",code="%s"}'
TRAFFIC = {REQUESTS % "ok": "0+94x"}


class Case(NamedTuple):
    """A `Case` holds series that make an alert fire, and series that only nearly do. `0+60x` rises by 60 each minute.
    `labels` are those of the alert, besides its name and severity."""

    fires: dict[str, str]
    silent: dict[str, str]
    labels: dict[str, str] = {"cluster": "c"}  # noqa: RUF012 - nobody changes it


def requests(num_ok: float, num_failed: float, code: str = "engine_failed") -> dict[str, str]:
    """Returns requests per minute that were served and that failed."""
    return TRAFFIC | {REQUESTS % "ok": f"0+{num_ok}x", REQUESTS % code: f"0+{num_failed}x"}


def first_tokens(num_in_time: float, num_late: float, modality: str = "text") -> dict[str, str]:
    """Returns first tokens per minute in time and after 31 s."""
    name, bound = "weft_router_time_to_first_token_seconds", "2.5" if modality == "text" else "10.0"
    labels, total = f'cluster="c",modality="{modality}"', num_in_time + num_late
    return TRAFFIC | {
        f'{name}_bucket{{{labels},le="{bound}"}}': f"0+{num_in_time}x",
        f'{name}_bucket{{{labels},le="30.0"}}': f"0+{num_in_time}x",
        f'{name}_bucket{{{labels},le="60.0"}}': f"0+{total}x",
        f'{name}_bucket{{{labels},le="+Inf"}}': f"0+{total}x",
        f"{name}_count{{{labels}}}": f"0+{total}x",
    }


def of(member: str, **values: str) -> dict[str, str]:
    """Returns series of a member of the cluster by the ends of their names."""
    return {f'weft_{member}_{name}{{cluster="c",{member}="m"}}': value for name, value in values.items()}


MEMBER = {"cluster": "c", "kind": "worker", "member": "m"}
UP = 'weft_member_up{cluster="c",kind="worker",member="m"}'
FILES_OF = 'weft_process_%s_fds{cluster="c",kind="worker",member="m"}'
MEMBERS = 'weft_router_members{cluster="c",instance="%s",kind="worker"}'
REFUSING = 'weft_router_members_refusing_config{cluster="c",instance="%s",kind="router"}'
EXPECTED = 'weft_router_members_expected{cluster="c",instance="%s",kind="worker"}'
LINK = 'weft_worker_%s_total{cluster="c",link="rdma",worker="m"}'
PLANNER = 'weft_planner_%s_total{cluster="c",stage="ttft"}'
MEDIA = 'weft_router_media_items_total{cluster="c",modality="image"}'
DEGRADED = 'weft_router_degraded_total{cluster="c",modality="image",action="reduced",reason="encode_failed"}'

CASES = {
    # The budget is 0.5 %: 14.4 times as much is 7.2 %, and six times as much 3 %.
    "WeftErrorBudgetBurnFast": Case(requests(92, 8), requests(93, 7)),
    "WeftErrorBudgetBurnSlow": Case(requests(96, 4), requests(98, 2)),
    "WeftErrorRatioHigh": Case(requests(94, 6), requests(94, 6, "draining")),
    # The budget is 5 %: 72 % and 30 %.
    "WeftFirstTokenBudgetBurnFast": Case(first_tokens(25, 75), first_tokens(30, 70)),
    "WeftFirstTokenBudgetBurnSlow": Case(first_tokens(65, 35, "video"), first_tokens(75, 25, "video")),
    "WeftFirstTokenSlow": Case(first_tokens(98, 2), first_tokens(99.5, 0.5)),
    "WeftRequestsRefused": Case(requests(94, 6, "overloaded"), requests(96, 4, "overloaded")),
    "WeftRequestsWait": Case(
        {
            'weft_router_requests_waiting{cluster="c",router="a"}': "15x",
            'weft_router_requests_waiting{cluster="c",router="b"}': "6x",
        },
        {'weft_router_requests_waiting{cluster="c",router="a"}': "20x"},
    ),
    "WeftEncodersSaturated": Case(
        of("encoder", busy_ratio="0.95x", queue_seconds="12x"), of("encoder", busy_ratio="0.95x", queue_seconds="9x")
    ),
    "WeftEncoderStuck": Case(
        of("encoder", num_queued="3x", batches_total="7x"),
        of("encoder", num_queued="3x", batches_total="0+1x"),
        {"cluster": "c", "encoder": "m"},
    ),
    "WeftKvFull": Case(
        of("worker", kv_used_blocks="96x", kv_capacity_blocks="100x"),
        of("worker", kv_used_blocks="95x", kv_capacity_blocks="100x"),
        {"cluster": "c", "worker": "m"},
    ),
    "WeftPreemptions": Case(
        of("worker", preemptions_total="0+9x"), of("worker", preemptions_total="0+5x"), {"cluster": "c", "worker": "m"}
    ),
    "WeftMembersMissing": Case(
        {MEMBERS % "a": "1x", MEMBERS % "b": "1x", EXPECTED % "a": "2x", EXPECTED % "b": "2x"},
        {MEMBERS % "a": "1x", MEMBERS % "b": "2x", EXPECTED % "a": "2x", EXPECTED % "b": "2x"},
        {"cluster": "c", "kind": "worker"},
    ),
    "WeftConfigRefused": Case(
        {REFUSING % "a": "1x", REFUSING % "b": "0x"},
        {REFUSING % "a": "0x", REFUSING % "b": "0x"},
        {"cluster": "c", "kind": "router"},
    ),
    "WeftMemberSilent": Case({UP: "0x"}, {UP: "1x"}, MEMBER),
    "WeftTargetDown": Case(
        {'up{job="weft",instance="a:9467"}': "0x"},
        {'up{job="other",instance="a:9467"}': "0x", 'up{job="weft",instance="a:9467"}': "1x"},
        {"job": "weft", "instance": "a:9467"},
    ),
    "WeftRouterSilent": Case(
        {'weft_router_num_silent{cluster="c",router="a"}': "1x"},
        {'weft_router_num_silent{cluster="c",router="a"}': "0x"},
    ),
    "WeftTransfersFail": Case(
        {LINK % "transfers": "0+97x", LINK % "transfer_failures": "0+3x"},
        {LINK % "transfers": "0+995x", LINK % "transfer_failures": "0+5x"},
        {"cluster": "c", "link": "rdma"},
    ),
    "WeftSlotsQuarantined": Case(
        of("worker", num_quarantined="1x"), of("worker", num_quarantined="0x"), {"cluster": "c", "worker": "m"}
    ),
    "WeftPredictionsOff": Case(
        TRAFFIC | {PLANNER % "abs_error": "0+12x", PLANNER % "actual": "0+10x"},
        TRAFFIC | {PLANNER % "abs_error": "0+9x", PLANNER % "actual": "0+10x"},
    ),
    "WeftIndexOutOfStep": Case(
        {'weft_index_sources_out_of_step{cluster="c",index="prefix"}': "2x"},
        {'weft_index_sources_out_of_step{cluster="c",index="prefix"}': "0x"},
        {"cluster": "c", "index": "prefix"},
    ),
    "WeftMediaDegraded": Case({MEDIA: "0+100x", DEGRADED: "0+6x"}, {MEDIA: "0+100x", DEGRADED: "0+4x"}),
    "WeftOpenFilesNearLimit": Case(
        {FILES_OF % "open": "900x", FILES_OF % "max": "1024x"},
        {FILES_OF % "open": "800x", FILES_OF % "max": "1024x"},
        MEMBER,
    ),
}


def series(values: dict[str, str]) -> list[dict[str, str]]:
    """Returns series as promtool takes them: `1x` stands for a value that stays."""
    return [
        {"series": name, "values": f"{value}{MINUTES}" if "+" in value else f"{value[:-1]}+0x{MINUTES}"}
        for name, value in values.items()
    ]


LABELS = "alertname, severity, cluster, kind, member, worker, encoder, link, index, job, instance"


def firing(alert: str) -> str:
    return f'count by ({LABELS}) (ALERTS{{alertname="{alert}",alertstate="firing"}})'


def written(alert: str, case: Case) -> str:
    """Returns a file of tests for promtool: the alert fires at the end of its own series, and not of the others."""
    severity = ALERTS[alert]["labels"]["severity"]
    labels = {"alertname": alert, "severity": severity} | case.labels
    text = "{" + ", ".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
    tests = [
        {
            "interval": "1m",
            "input_series": series(values),
            "promql_expr_test": [
                {"expr": firing(alert), "eval_time": f"{MINUTES}m", "exp_samples": expected},
                # Before its time, an alert is pending at most.
                {"expr": firing(alert), "eval_time": "1m", "exp_samples": []},
            ],
        }
        for values, expected in ((case.fires, [{"labels": text, "value": 1}]), (case.silent, []))
    ]
    return yaml.safe_dump({"rule_files": [str(path) for path in FILES], "evaluation_interval": "2m", "tests": tests})


def promtool(*arguments: str) -> None:
    done = subprocess.run([prometheus_tool("promtool"), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", *map(str, FILES))


def test_every_alert_has_a_case_and_every_case_an_alert() -> None:
    assert sorted(CASES) == sorted(ALERTS)


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_when_it_should_and_is_silent_when_it_should_be(alert: str, tmp_path: Path) -> None:
    file = tmp_path / "test.yaml"
    file.write_text(written(alert, CASES[alert]))
    promtool("test", "rules", str(file))


def test_without_traffic_no_ratio_fires(tmp_path: Path) -> None:
    """One request in a quarter of an hour that fails is a request that failed, and no ratio."""
    few = {REQUESTS % "no_capacity": "0+0.05x", REQUESTS % "ok": "0+0x"}
    test = {
        "interval": "1m",
        "input_series": series(few),
        "promql_expr_test": [{"expr": "ALERTS", "eval_time": f"{MINUTES}m", "exp_samples": []}],
    }
    file = tmp_path / "test.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(path) for path in FILES], "evaluation_interval": "2m", "tests": [test]})
    )
    promtool("test", "rules", str(file))


def test_errors_are_the_codes_for_which_the_cluster_answers_500_or_above() -> None:
    own_faults = {kind.code for kind in leaves() if status_of(kind("")) >= 500} - {"draining"} | {"internal_error"}
    refusals = {kind.code for kind in leaves() if status_of(kind("")) == 429}
    patterns = set(re.findall(r'code=~"([^"]+)"', FILES[0].read_text()))
    assert patterns == {"|".join(sorted(own_faults)), "|".join(sorted(refusals))}


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_says_what_it_is_about(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    notes = rule["annotations"]
    assert notes.keys() == {"summary", "description", "runbook_url"}
    assert notes["description"].endswith(".")
    assert not notes["summary"].endswith(".")
    page = RUNBOOKS / (re.sub(r"(?<!^)(?=[A-Z])", "-", alert).lower() + ".md")
    assert notes["runbook_url"] == str(page.relative_to(ROOT))
    text = page.read_text()
    assert text.startswith(f"# {alert}\n")
    heads = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert heads == ["What it means", "How to see it", "What to do"]
    assert "```promql" in text
    assert "```sh" in text
    assert f"[{alert}]({page.name})" in (RUNBOOKS / "README.md").read_text()


def test_every_runbook_has_its_alert() -> None:
    titles = [path.read_text().split("\n", 1)[0] for path in sorted(RUNBOOKS.glob("*.md"))]
    assert sorted(titles) == sorted(["# Runbooks", *(f"# {alert}" for alert in ALERTS)])
