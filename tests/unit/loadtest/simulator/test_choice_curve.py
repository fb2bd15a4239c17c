from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_requests import small_cluster

from loadtest.report_page import Plot
from loadtest.simulator import sim_runs
from loadtest.simulator.choice import MEDIA_MIX, ChoiceScale, chance, isolation
from loadtest.simulator.choice_curve import (
    NAMES,
    CurvePoint,
    curve_parts,
    curve_points,
    with_crossed_machines,
    with_encoder_load,
    with_encoding,
)
from loadtest.simulator.sim_runs import at_load, capacity

SCALE = ChoiceScale(num_requests=20, num_workers=4, num_encoders=2, num_processes=1, num_seeds=2)


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capacities need not be exact here."""
    monkeypatch.setattr(sim_runs, "SAMPLE", 100)


def host(encoders_stand: str, kind: str, index: int) -> str:
    cluster = small_cluster(num_workers=4, num_encoders=8, machine_size=2, encoders_stand=encoders_stand)
    return cluster.member(kind, index).host


def test_encoders_stand_beside_workers_or_apart_or_in_turn() -> None:
    assert [host("beside", "worker", index) for index in range(4)] == ["m0", "m0", "m1", "m1"]
    assert [host("beside", "encoder", index) for index in range(4)] == ["m0", "m1", "m0", "m1"]
    assert [host("apart", "encoder", index) for index in range(4)] == ["e0", "e0", "e1", "e1"]
    assert [host("both", "encoder", index) for index in range(8)] == ["m0", "e0", "m1", "e0", "m0", "e1", "m1", "e1"]


def test_at_a_share_of_one_both_stages_limit_the_load_alike() -> None:
    cluster, workload = SCALE.settings(), SCALE.workload()
    loaded = with_encoder_load(cluster, workload, 1.0)
    assert capacity(loaded, workload) == pytest.approx(capacity(cluster, workload))
    slower = with_encoding(loaded, 1.25)
    assert capacity(slower, workload) == pytest.approx(0.8 * capacity(cluster, workload)), "encoders limit it"
    faster = with_encoder_load(cluster, workload, 0.5)
    assert capacity(faster, workload) == pytest.approx(capacity(cluster, workload)), "workers limit it"


def test_crossed_machines_have_fast_encoders_or_fast_workers() -> None:
    cluster = with_crossed_machines(small_cluster(num_workers=16, num_encoders=6))
    machine_to_slowness: dict[str, set[tuple[str, float]]] = {}
    for kind, count, factors in (("worker", 16, cluster.worker_slowness), ("encoder", 6, cluster.encoder_slowness)):
        for index in range(count):
            of_machine = machine_to_slowness.setdefault(cluster.member(kind, index).host, set())
            of_machine.add((kind, factors[index % len(factors)]))
    assert set(map(frozenset, machine_to_slowness.values())) == {
        frozenset({("worker", 2.0), ("encoder", 1.0)}),
        frozenset({("worker", 1.0), ("encoder", 2.0)}),
    }


def test_all_axes_have_plots_of_their_own_and_loads_that_can_be_borne() -> None:
    points = curve_points(SCALE.settings(), SCALE.workload(), MEDIA_MIX)
    axes = list(dict.fromkeys(one.axis for one in points))
    assert len({axis.split()[0].lower() for axis in axes}) == len(axes)
    for one in points:
        expected = one.x if one.axis == "load" else 0.8
        assert one.workload.rate / capacity(one.settings, replace(one.workload, rate=1.0)) == pytest.approx(expected)
        assert sum(one.workload.kind_to_share.values()) == pytest.approx(1.0)


def test_the_curve_has_a_row_for_each_point_and_counts_all_seeds() -> None:
    cluster = SCALE.settings()
    workload = at_load(cluster, SCALE.workload(), 0.5)
    slow = replace(cluster, worker_slowness=(3.0,))
    points = [CurvePoint("load", 0.5, cluster, workload), CurvePoint("slowness", 3.0, slow, workload)]
    text, table, *plots = curve_parts([*points, points[0]._replace(axis="other")], (1, 2), 1)
    assert isinstance(text, str)
    assert [row[:2] for row in table[1:]] == [["load", "0.5"], ["slowness", "3"], ["other", "0.5"]]
    assert table[1][2:] == table[3][2:], "a point on two axes runs once"
    assert float(table[2][3]) > 1.5 * float(table[1][3]), "slow workers make the p99 longer"
    least, _, largest = table[1][7].split()
    assert float(least) <= float(largest)
    assert all(isinstance(plot, Plot) and list(plot.name_to_points) == list(NAMES) for plot in plots)
    assert len(plots) == 3


def test_chance_compares_the_same_requests() -> None:
    _, table = chance(SCALE).parts
    assert [row[0] for row in table[1:]] == [
        "joint",
        "joint without exploration",
        "joint, equals only if equal",
        "encoder-first",
        "worker-first",
    ]
    assert table[1][2:] == ["1.000 ± 0.000"] * 3
    assert all(len(row[1].split(", ")) == 2 for row in table[1:])


def test_isolation_has_texts_at_the_load_of_the_mix_beside_the_same_texts() -> None:
    alone, mixed, as_loaded = isolation(replace(SCALE, num_requests=40)).summaries
    assert [alone.policy, mixed.policy, as_loaded.policy] == ["text alone", "with media", "text alone at 80 % load"]
    assert set(alone.kind_to_ttft) == set(as_loaded.kind_to_ttft) == {"text"}
    assert "image" in mixed.kind_to_ttft
    assert alone.num_requests == as_loaded.num_requests == 32
    assert as_loaded.total.mean != alone.total.mean
