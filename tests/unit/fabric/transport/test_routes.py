"""Tests how a sink chooses between the two routes to a device."""

from __future__ import annotations

import pytest

from fabric.transport.routes import (
    PROBE_BYTES,
    SLOW_BYTES_PER_S,
    SLOW_FROM_BYTES,
    STAGED_GAIN,
    LinkKey,
    LinkRoutes,
    Probe,
    Route,
)

LINK = LinkKey("encoder-1", "VRAM")
SLOW_S = SLOW_FROM_BYTES / SLOW_BYTES_PER_S


def measure(routes: LinkRoutes, link: LinkKey, nbytes: int, direct_s: float, staged_s: float) -> list[Probe]:
    """Carries out a measurement in which the timed probes take the given times."""
    probes = routes.begin(link, nbytes)
    assert probes
    for probe in probes:
        routes.note(link, probe, {Route.DIRECT: direct_s, Route.STAGED: staged_s}[probe.route])
    routes.end_measurement(link)
    return probes


def test_each_route_is_warmed_up_before_it_is_timed() -> None:
    probes = measure(LinkRoutes(has_staging=True), LINK, 2 * PROBE_BYTES, 1.0, 1.0)
    assert [(probe.route, probe.is_timed) for probe in probes] == [
        (Route.DIRECT, False),
        (Route.DIRECT, True),
        (Route.STAGED, False),
        (Route.STAGED, True),
    ]
    assert {probe.nbytes for probe in probes} == {PROBE_BYTES}


def test_without_staging_nothing_is_measured() -> None:
    routes = LinkRoutes(has_staging=False)
    assert routes.begin(LINK, PROBE_BYTES) == []
    routes.end_measurement(LINK)
    assert routes.route(LINK) is Route.DIRECT
    assert routes.rates(LINK) == {}


def test_the_staged_route_must_be_clearly_faster() -> None:
    for staged_s, route in ((0.5, Route.STAGED), (1.0 / STAGED_GAIN, Route.DIRECT), (2.0, Route.DIRECT)):
        routes = LinkRoutes(has_staging=True)
        measure(routes, LINK, PROBE_BYTES, 1.0, staged_s)
        assert routes.route(LINK) is route
        assert routes.rates(LINK) == {Route.DIRECT: PROBE_BYTES, Route.STAGED: PROBE_BYTES / staged_s}
        assert routes.begin(LINK, 100 * PROBE_BYTES) == [], "a large measurement holds for every size"


def test_links_differ_by_source_and_by_the_kind_of_its_memory() -> None:
    routes = LinkRoutes(has_staging=True)
    measure(routes, LINK, PROBE_BYTES, 1.0, 0.1)
    for other in (LINK._replace(kind="DRAM"), LINK._replace(source="encoder-2")):
        assert routes.route(other) is Route.DIRECT
        assert routes.begin(other, PROBE_BYTES)


def test_a_small_measurement_holds_for_small_payloads_alone() -> None:
    routes = LinkRoutes(has_staging=True)
    measure(routes, LINK, 1000, 1.0, 0.1)
    assert routes.begin(LINK, 4000) == []
    assert routes.route(LINK) is Route.STAGED
    measure(routes, LINK, 4001, 0.1, 1.0)
    assert routes.route(LINK) is Route.DIRECT


def test_others_wait_while_a_link_is_measured() -> None:
    routes = LinkRoutes(has_staging=True)
    probes = routes.begin(LINK, PROBE_BYTES)
    assert probes
    for probe in probes:
        assert routes.begin(LINK, 1) is None
        routes.note(LINK, probe, 1.0)
    assert routes.begin(LINK, 1) is None
    routes.end_measurement(LINK)
    assert routes.begin(LINK, 1) == []


def test_a_measurement_that_was_given_up_counts_as_none() -> None:
    routes = LinkRoutes(has_staging=True)
    probes = routes.begin(LINK, PROBE_BYTES)
    assert probes
    for probe in probes[:2]:
        routes.note(LINK, probe, 1.0)
    routes.end_measurement(LINK)
    assert routes.rates(LINK) == {}
    assert routes.begin(LINK, PROBE_BYTES)


def test_a_route_that_failed_is_not_taken_although_a_later_read_works() -> None:
    routes = LinkRoutes(has_staging=True)
    probes = routes.begin(LINK, PROBE_BYTES)
    assert probes
    routes.note_failure(LINK, Route.DIRECT)
    for probe in probes:
        routes.note(LINK, probe, 1e-6 if probe.route is Route.DIRECT else 1.0)
    routes.end_measurement(LINK)
    assert routes.route(LINK) is Route.STAGED


def test_where_both_routes_fail_the_link_stays_direct_and_is_measured_again() -> None:
    routes = LinkRoutes(has_staging=True)
    assert routes.begin(LINK, PROBE_BYTES)
    for route in Route:
        routes.note_failure(LINK, route)
    routes.end_measurement(LINK)
    assert routes.route(LINK) is Route.DIRECT
    assert routes.begin(LINK, PROBE_BYTES)


@pytest.mark.parametrize(
    ("nbytes", "direct_s", "staged_s", "is_slow"),
    [
        (SLOW_FROM_BYTES, 2 * SLOW_S, 1.01 * SLOW_S, True),
        (SLOW_FROM_BYTES, 2 * SLOW_S, 0.99 * SLOW_S, False),
        (SLOW_FROM_BYTES, 0.99 * SLOW_S, 2 * SLOW_S, False),
        (SLOW_FROM_BYTES - 1, 2 * SLOW_S, 2 * SLOW_S, False),
    ],
)
def test_a_link_is_slow_if_both_routes_are_for_a_large_payload(
    nbytes: int, direct_s: float, staged_s: float, is_slow: bool
) -> None:
    routes = LinkRoutes(has_staging=True)
    assert not routes.is_slow(LINK)
    measure(routes, LINK, nbytes, direct_s, staged_s)
    assert routes.is_slow(LINK) is is_slow


def test_a_source_that_is_forgotten_is_measured_again() -> None:
    routes = LinkRoutes(has_staging=True)
    other = LINK._replace(source="encoder-2")
    for link in (LINK, other):
        measure(routes, link, PROBE_BYTES, 1.0, 0.1)
    routes.forget(LINK.source)
    assert routes.begin(LINK, PROBE_BYTES)
    assert routes.begin(other, PROBE_BYTES) == []


def test_a_read_that_takes_no_time_on_the_clock_has_a_rate() -> None:
    routes = LinkRoutes(has_staging=True)
    measure(routes, LINK, PROBE_BYTES, 0.0, 0.0)
    assert routes.route(LINK) is Route.DIRECT
    assert min(routes.rates(LINK).values()) > 0
