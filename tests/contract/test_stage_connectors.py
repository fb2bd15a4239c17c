"""Runs one suite for every stage connector: inside one process, in shared memory, and over NIXL."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from connector_peers import ConnectorProcess, connector_maker

from fabric.contracts import ArenaFull, ConfigError, TransferFailed, UnitTooLarge
from fabric.transport import InboxEntry, SharedMemoryStageConnector, StageConnector, remove_inboxes_without_owner

PATIENCE_S = 20.0
KINDS = ["in_process", "shared_memory", pytest.param("nixl", marks=pytest.mark.nixl)]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """Yields a directory in shared memory, which must be gone when the last connector is closed."""
    root = Path(f"/dev/shm/weft-test-{os.getpid()}")
    yield root
    assert not root.exists()


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def make(kind: str, root: Path) -> Callable[[], StageConnector]:
    return connector_maker(kind, root)


@pytest.fixture(scope="module")
def pair(make: Callable[[], StageConnector]) -> Iterator[tuple[StageConnector, StageConnector]]:
    """Yields two connectors that the tests share, because those of NIXL take a second to start."""
    pair = make(), make()
    yield pair
    for connector in pair:
        connector.close()


@pytest.fixture
def sender(pair: tuple[StageConnector, StageConnector]) -> StageConnector:
    return pair[0]


@pytest.fixture
def owner(pair: tuple[StageConnector, StageConnector]) -> StageConnector:
    owner = pair[1]
    owner.arrivals(0)
    assert owner.discard("") == 0
    return owner


def arrived(owner: StageConnector, count: int) -> set[InboxEntry]:
    """Waits for `count` arrivals and returns them."""
    found: list[InboxEntry] = []
    give_up_s = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < give_up_s, f"only {found} came"
        found += owner.arrivals(PATIENCE_S)
    assert len(found) == count
    return set(found)


@pytest.mark.parametrize("nbytes", [0, 1, 5, 4096, 300_001])
def test_data_arrives_as_it_was_put(sender: StageConnector, owner: StageConnector, nbytes: int) -> None:
    data = os.urandom(nbytes)
    sender.put(1, owner.inbox, "a.0_1_0", data)
    assert owner.get(1, owner.inbox, "a.0_1_0", PATIENCE_S) == data
    assert owner.get(1, owner.inbox, "a.0_1_0", 0) is None


def test_data_that_nobody_reads_waits_however_much_it_is(sender: StageConnector, owner: StageConnector) -> None:
    pieces = {f"chat-{number}.0_0_{number}": bytes([number]) * (10 + 300 * number) for number in range(40)}
    for key, data in pieces.items():
        sender.put(0, owner.inbox, key, data)
    if isinstance(owner, SharedMemoryStageConnector):
        assert owner.get(0, owner.inbox, "chat-3.0_0_3", 0.0) == pieces.pop("chat-3.0_0_3")
    for entry in arrived(owner, len(pieces)):
        assert owner.get(entry.from_stage, owner.inbox, entry.key, PATIENCE_S) == pieces[entry.key]
    assert owner.arrivals(0.0) == []


def test_keys_and_stages_are_kept_apart(sender: StageConnector, owner: StageConnector) -> None:
    keys = [(0, "a"), (1, "a"), (1, "a.0_1_1"), (1, "a.0_1_10"), (1, "odd key/with ümlauts%2F.."), (11, "a")]
    for number, (stage, key) in enumerate(keys):
        sender.put(stage, owner.inbox, key, bytes([number]))
    assert arrived(owner, len(keys)) == {InboxEntry(*each) for each in keys}
    assert owner.arrivals(0) == []
    for number, (stage, key) in reversed(list(enumerate(keys))):
        assert owner.get(stage, owner.inbox, key, PATIENCE_S) == bytes([number])
    assert owner.get(2, owner.inbox, "a", 0) is None


def test_data_that_is_put_again_replaces_what_was_not_read(sender: StageConnector, owner: StageConnector) -> None:
    for data in (b"first", b"second"):
        sender.put(0, owner.inbox, "again", data)
        arrived(owner, 1) if data == b"first" else None
    give_up_s = time.monotonic() + PATIENCE_S
    found: list[bytes | None] = []
    while b"second" not in found:
        assert time.monotonic() < give_up_s
        found.append(owner.get(0, owner.inbox, "again", 0.01))
    owner.arrivals(0)
    assert owner.get(0, owner.inbox, "again", 0) is None
    sender.put(0, owner.inbox, "again", b"third")
    assert arrived(owner, 1) == {InboxEntry(0, "again")}
    assert owner.get(0, owner.inbox, "again", PATIENCE_S) == b"third"


def test_a_waiting_get_is_woken_by_its_data(sender: StageConnector, owner: StageConnector) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(owner.get, 0, owner.inbox, "wanted", PATIENCE_S)
        sender.put(0, owner.inbox, "another", b"x")
        sender.put(0, owner.inbox, "wanted", b"y")
        assert waiting.result(PATIENCE_S) == b"y"
    assert owner.get(0, owner.inbox, "another", PATIENCE_S) == b"x"


def test_a_waiting_reader_is_woken_without_data(owner: StageConnector) -> None:
    owner.wake()
    assert owner.arrivals(PATIENCE_S) == []
    begun = threading.Event()

    def wait() -> list[InboxEntry]:
        begun.set()
        return owner.arrivals(PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        started_s = time.monotonic()
        waiting = pool.submit(wait)
        begun.wait()
        owner.wake()
        assert waiting.result(PATIENCE_S) == []
        assert time.monotonic() - started_s < PATIENCE_S / 2


def test_a_connector_reaches_its_own_inbox(owner: StageConnector) -> None:
    owner.put(3, owner.inbox, "self", b"mine")
    assert owner.get(3, owner.inbox, "self", PATIENCE_S) == b"mine"


def test_only_its_owner_reads_an_inbox(sender: StageConnector, owner: StageConnector) -> None:
    with pytest.raises(ValueError, match="belongs to another connector"):
        sender.get(0, owner.inbox, "a", 0)


def test_unread_data_is_discarded_by_the_beginning_of_its_key(sender: StageConnector, owner: StageConnector) -> None:
    for key in ("r.1_0_0", "r.1_0_1", "r.10_0_0", "R.1_0_0"):
        sender.put(0, owner.inbox, key, b"data")
    arrived(owner, 4)
    assert owner.discard("r.1_") == 2
    assert owner.discard("r.1_") == 0
    assert owner.get(0, owner.inbox, "r.1_0_0", 0) is None
    assert owner.get(0, owner.inbox, "r.10_0_0", PATIENCE_S) == b"data"
    assert owner.discard("") == 1
    sender.put(0, owner.inbox, "r.1_0_0", b"later")
    assert arrived(owner, 1) == {InboxEntry(0, "r.1_0_0")}
    assert owner.discard("r") == 1


def test_many_senders_at_once_lose_nothing(sender: StageConnector, owner: StageConnector) -> None:
    def send(stage: int) -> None:
        for number in range(50):
            sender.put(stage, owner.inbox, f"k_{number}", f"{stage} {number}".encode() * 100)

    with ThreadPoolExecutor(4) as pool:
        sending = [pool.submit(send, stage) for stage in range(4)]
        found: dict[InboxEntry, bytes | None] = {}
        give_up_s = time.monotonic() + PATIENCE_S
        while len(found) < 200:
            assert time.monotonic() < give_up_s
            for entry in owner.arrivals(PATIENCE_S):
                found[entry] = owner.get(entry.from_stage, owner.inbox, entry.key, PATIENCE_S)
        for each in sending:
            each.result(PATIENCE_S)
    wanted = {
        InboxEntry(stage, f"k_{number}"): f"{stage} {number}".encode() * 100
        for stage in range(4)
        for number in range(50)
    }
    assert found == wanted


def test_a_closed_inbox_takes_nothing(make: Callable[[], StageConnector], sender: StageConnector) -> None:
    short = make()
    assert short.is_alive
    sender.put(0, short.inbox, "before", b"data")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(short.get, 0, short.inbox, "never", PATIENCE_S)
        short.close()
        short.close()
        assert waiting.result(PATIENCE_S) is None
    assert not short.is_alive


@pytest.mark.parametrize("inbox", ["0123456789abcdef", "no inbox", "../etc", "", "stage-x:bm8gbWV0YWRhdGE="])
def test_an_inbox_that_does_not_exist_fails_the_sender(sender: StageConnector, inbox: str) -> None:
    with pytest.raises(TransferFailed):
        sender.put(0, inbox, "key", b"data")


# ------------------------------------------------------------ what only some kinds have


@pytest.mark.nixl
def test_nixl_tells_a_full_arena_from_data_that_never_fits(make: Callable[[], StageConnector], kind: str) -> None:
    if kind != "nixl":
        pytest.skip("only this kind has an arena")
    sender, owner = make(), make()
    try:
        with pytest.raises(UnitTooLarge):
            sender.put(0, owner.inbox, "huge", bytes(8 << 20))
        sender.put(0, owner.inbox, "large", bytes(3 << 20))
        with pytest.raises(ArenaFull):
            sender.put(0, owner.inbox, "second", bytes(3 << 20))
        assert owner.get(0, owner.inbox, "large", PATIENCE_S) == bytes(3 << 20)
        give_up_s = time.monotonic() + PATIENCE_S
        while True:  # The answer that the slot is free is on its way.
            try:
                sender.put(0, owner.inbox, "second", bytes(3 << 20))
                break
            except ArenaFull:
                assert time.monotonic() < give_up_s
        assert owner.discard("") in (0, 1)
    finally:
        sender.close()
        owner.close()


@pytest.fixture(params=["shared_memory", pytest.param("nixl", marks=pytest.mark.nixl)])
def mortal(request: pytest.FixtureRequest, root: Path) -> Iterator[tuple[ConnectorProcess, StageConnector]]:
    """Yields a connector in a process that a test may kill, and one of the same kind in this process."""
    process, here = ConnectorProcess(request.param, root), connector_maker(request.param, root)()
    yield process, here
    process.close()
    here.close()


def test_data_goes_from_process_to_process(mortal: tuple[ConnectorProcess, StageConnector]) -> None:
    process, here = mortal
    data = os.urandom(100_000)
    process.call("put", 0, here.inbox, "there", data)
    assert here.get(0, here.inbox, "there", PATIENCE_S) == data
    here.put(1, process.inbox, "back", data)
    assert process.call("get", 1, process.inbox, "back", PATIENCE_S) == data


def test_a_killed_sender_takes_nothing_of_others_with_it(mortal: tuple[ConnectorProcess, StageConnector]) -> None:
    process, here = mortal
    process.call("put", 0, here.inbox, "read", b"data")
    assert here.get(0, here.inbox, "read", PATIENCE_S) == b"data"
    process.call("put", 0, here.inbox, "unread", b"data")
    arrived(here, 1)
    process.kill()
    try:
        found = here.get(0, here.inbox, "unread", PATIENCE_S)
    except TransferFailed:
        found = None
    assert found in (None, b"data")
    here.put(2, here.inbox, "later", b"more")
    assert here.get(2, here.inbox, "later", PATIENCE_S) == b"more"


def test_a_killed_owner_is_removed_by_the_next_sender(root: Path) -> None:
    process, here = ConnectorProcess("shared_memory", root), SharedMemoryStageConnector(root)
    try:
        here.put(0, process.inbox, "unread", bytes(100_000))
        assert (root / process.inbox).exists()
        process.kill()
        with pytest.raises(TransferFailed):
            here.put(0, process.inbox, "late", bytes(100_000))
        assert [path.name for path in root.iterdir()] == [here.inbox]
    finally:
        process.close()
        here.close()


def test_killed_processes_are_removed_by_the_next_start_and_the_next_end(root: Path) -> None:
    stays = SharedMemoryStageConnector(root)
    killed = [ConnectorProcess("shared_memory", root) for _ in range(2)]
    try:
        for process in killed:
            stays.put(0, process.inbox, "unread", b"data")
        killed[0].kill()
        SharedMemoryStageConnector(root).close()
        assert {path.name for path in root.iterdir()} == {stays.inbox, killed[1].inbox}
        killed[1].kill()
    finally:
        stays.close()
        for process in killed:
            process.close()
    assert not root.exists()


def test_the_last_killed_processes_are_removed_by_a_process_that_outlives_them(root: Path) -> None:
    lives, killed = (ConnectorProcess("shared_memory", root) for _ in range(2))
    try:
        killed.kill()
        remove_inboxes_without_owner(root)
        assert {path.name for path in root.iterdir()} == {lives.inbox}
        lives.kill()
        remove_inboxes_without_owner(root)
    finally:
        for process in (lives, killed):
            process.close()
    assert not root.exists()
    remove_inboxes_without_owner(root)
    assert not root.exists()


def test_shared_memory_that_others_may_change_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        SharedMemoryStageConnector(tmp_path)


def test_a_key_that_is_too_long_is_refused(root: Path) -> None:
    connector = SharedMemoryStageConnector(root)
    try:
        with pytest.raises(ValueError, match="too long"):
            connector.put(0, connector.inbox, "k" * 300, b"data")
    finally:
        connector.close()
