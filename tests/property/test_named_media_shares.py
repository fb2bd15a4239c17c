"""Checks that owners share the room for named media fairly: who has no more than an equal share loses nothing, the room
is never exceeded, and nothing is forgotten while there is room."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from router.prompt.named_media import NamedFile, NamedMedia, kept_bytes

EMPTY_BYTES = kept_bytes(("a", "image", "u"), NamedFile(b"", b"", None))
ROOM = 6 * EMPTY_BYTES + 60
STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("uvwxyz"), st.integers(0, ROOM), st.booleans()), max_size=60
)


@given(steps=STEPS)
def test_an_owner_within_its_share_keeps_its_media(steps: list[tuple[str, str, int, bool]]) -> None:
    """The reference holds everything that was kept, and looks at what is missing after each step."""
    media = NamedMedia(ROOM)
    held: dict[str, OrderedDict[str, int]] = {owner: OrderedDict() for owner in "abc"}
    for owner, uuid, size, is_look in steps:
        if is_look:
            file = media.find(owner, "image", uuid)
            assert (file is not None) == (uuid in held[owner])
            if file is not None:
                held[owner].move_to_end(uuid)
            continue
        media.keep(owner, owner, "image", uuid, NamedFile(b"x" * size, b"", None))
        held[owner].pop(uuid, None)
        if size + EMPTY_BYTES <= ROOM:
            held[owner][uuid] = size + EMPTY_BYTES
        before = {each: sum(files.values()) for each, files in held.items()}
        num_owners = sum(bool(files) for files in held.values())
        for each, files in held.items():
            kept = [name for name in files if (each, "image", name) in media._name_to_owner]
            assert kept == list(files)[len(files) - len(kept) :], "the oldest go first"
            if before[each] <= ROOM / max(1, num_owners) or sum(before.values()) <= ROOM:
                assert len(kept) == len(files)
            held[each] = OrderedDict((name, files[name]) for name in kept)
        assert media.num_bytes == sum(sum(files.values()) for files in held.values()) <= ROOM
