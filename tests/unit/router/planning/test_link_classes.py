"""Tests the class of a link: what is found out about two places decides it, unless an override names the pair."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.contracts import Member, MemberPlace
from router.planning.link_classes import LINK_CLASSES, LinkClass, LinkOverride, LinkRules, MemberSelector


def member(name: str, host: str = "h0", kind: str = "worker", **place: object) -> Member:
    return Member(name, kind, f"address-{name}", host, 1, place=MemberPlace(**place))


def class_of(source: Member, target: Member, *overrides: LinkOverride) -> LinkClass:
    rules = LinkRules(overrides)
    return rules.link_class(rules.place(source), rules.place(target))


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (member("e", "h0/p"), member("w", "h0/p"), LinkClass.SAME_PROCESS),
        (member("e", "h0/p"), member("w", "h0/q"), LinkClass.SAME_HOST),
        (member("e", "h0"), member("w", "h0"), LinkClass.SAME_HOST),
        (member("e", "h0/p"), member("w", "h1/p"), LinkClass.TCP),
        (member("e", nvlink_domain="n"), member("w", nvlink_domain="n"), LinkClass.NVLINK),
        (member("e", "h0", nvlink_domain="n"), member("w", "h1", nvlink_domain="n"), LinkClass.NVLINK),
        (member("e", "h0", nvlink_domain="n"), member("w", "h1", nvlink_domain="m"), LinkClass.TCP),
        (member("e", "h0", rdma_fabric="ib"), member("w", "h1", rdma_fabric="ib"), LinkClass.RDMA),
        (member("e", "h0", rdma_fabric="ib"), member("w", "h0", rdma_fabric="ib"), LinkClass.SAME_HOST),
        (member("e", "h0", rdma_fabric="ib"), member("w", "h1", rdma_fabric="roce"), LinkClass.TCP),
        (member("e", "h0", rdma_fabric="ib"), member("w", "h1"), LinkClass.TCP),
        (member("e", "h0"), member("w", "h1"), LinkClass.TCP),
    ],
)
def test_what_is_known_of_two_places_decides(source: Member, target: Member, expected: LinkClass) -> None:
    assert class_of(source, target) is expected


NEAR = LinkOverride(
    MemberSelector(kind="encoder", labels=(("rack", "r*"),)), MemberSelector(host="gpu-?"), LinkClass.RDMA
)
FAR = LinkOverride(MemberSelector(), MemberSelector(), LinkClass.TCP)


def test_an_override_needs_every_pattern_of_both_its_ends() -> None:
    encoder = member("e", "h0", "encoder", labels=(("rack", "r7"), ("zone", "a")))
    worker = member("w", "gpu-1")
    assert class_of(encoder, worker, NEAR) is LinkClass.RDMA
    assert class_of(worker, encoder, NEAR) is LinkClass.TCP
    assert class_of(member("e", "h0", "encoder"), worker, NEAR) is LinkClass.TCP
    assert class_of(member("e", "h0", "encoder", labels=(("rack", "q1"),)), worker, NEAR) is LinkClass.TCP
    assert class_of(encoder, member("w", "gpu-12"), NEAR) is LinkClass.TCP
    by_name = LinkOverride(MemberSelector(member_id="e-1*"), MemberSelector(member_id="w"), LinkClass.NVLINK)
    assert class_of(member("e-12", "h0"), worker, by_name) is LinkClass.NVLINK
    assert class_of(member("e-2", "h0"), worker, by_name) is LinkClass.TCP


def test_the_first_override_that_fits_wins_over_the_others_and_over_what_was_found() -> None:
    encoder, worker = member("e", "gpu-1", "encoder", labels=(("rack", "r7"),)), member("w", "gpu-1")
    assert class_of(encoder, worker, NEAR, FAR) is LinkClass.RDMA
    assert class_of(encoder, worker, FAR, NEAR) is LinkClass.TCP
    assert class_of(member("e", "gpu-1/p", "worker"), member("w", "gpu-1/p"), NEAR, FAR) is LinkClass.TCP


def test_the_process_of_a_host_is_no_part_of_its_machine() -> None:
    by_host = LinkOverride(MemberSelector(host="h0"), MemberSelector(host="h0"), LinkClass.NVLINK)
    assert class_of(member("e", "h0/p"), member("w", "h0/p"), by_host) is LinkClass.NVLINK


names = st.sampled_from(["", "a", "b"])
members = st.builds(
    lambda name, host, process, domain, fabric, rack: member(
        name,
        f"{host}/{process}" if process else host,
        nvlink_domain=domain,
        rdma_fabric=fabric,
        labels=(("rack", rack),) if rack else (),
    ),
    st.sampled_from(["m-0", "m-1"]),
    st.sampled_from(["h0", "h1"]),
    names,
    names,
    names,
    names,
)
selectors = st.builds(
    MemberSelector,
    st.sampled_from(["*", "m-0"]),
    st.sampled_from(["*", "h1"]),
    st.just("*"),
    st.sampled_from([(), (("rack", "a"),)]),
)
overrides = st.lists(st.builds(LinkOverride, selectors, selectors, st.sampled_from(LinkClass)), max_size=3)


@settings(deadline=None, max_examples=100)
@given(st.lists(members, max_size=4), st.lists(members, max_size=4), overrides)
def test_the_table_of_many_pairs_equals_the_class_of_each(
    sources: list[Member], targets: list[Member], rules: list[LinkOverride]
) -> None:
    links = LinkRules(rules)
    places = [links.place(each) for each in sources], [links.place(each) for each in targets]
    table = links.table(*places)
    assert table.shape == (len(targets), len(sources))
    for column, source in enumerate(places[0]):
        for row, target in enumerate(places[1]):
            assert LINK_CLASSES[table[row, column]] is links.link_class(source, target)


def test_members_in_equal_places_have_equal_links() -> None:
    rules = LinkRules([NEAR])
    assert rules.place(member("w-1", "gpu-1")) == rules.place(member("w-2", "gpu-1"))
    assert len({rules.place(member("w-1", "gpu-1")), rules.place(member("w-2", "gpu-1"))}) == 1
