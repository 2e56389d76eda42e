"""Listing: pages of several peers become one, against a model that knows everything."""

from hypothesis import given
from hypothesis import strategies as st

from p2pstore.core.gets.key_pages import (
    ASKED_PER_STEP,
    MERGED_PER_STEP,
    ListedPage,
    ListOperation,
    merge_pages,
)
from p2pstore.gossip.records import PeerId
from p2pstore.runtime.stepping import run_through
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import KeyInfo, Keys, ListKeys
from p2pstore.wire import Code, Failure
from tests.unit.core_harness import NAMESPACE, Harness

Versions = dict[str, tuple[int, int]]
"""A peer's keys with clock and writer of the version that it holds."""

KEYS = st.text(st.sampled_from("abé\U0001f600"), min_size=1, max_size=3)
HELD = st.lists(
    st.dictionaries(KEYS, st.tuples(st.integers(1, 2), st.integers(1, 2)), max_size=12),
    min_size=1,
    max_size=4,
)


def page_of(held: Versions, prefix: str, after: str, limit: int) -> Keys:
    """A peer's answer."""
    keys = sorted(key for key in held if key.startswith(prefix) and key > after)
    items = [KeyInfo(key, 1, *held[key], 0, 0, False, 0) for key in keys[:limit]]
    return Keys(items, len(keys) > limit)


def name_of(peer_id: PeerId) -> str:
    return peer_id.decode()


@given(HELD, st.sampled_from(["", "a", "é"]), st.integers(1, 5))
def test_paging_through_gives_every_key_once_with_the_holders_of_its_newest_version(
    held: list[Versions], prefix: str, limit: int
) -> None:
    peers = {b"peer %d" % number: keys for number, keys in enumerate(held)}
    listed, after, pages = [], "", 0
    while True:
        answers = [(peer_id, page_of(keys, prefix, after, limit)) for peer_id, keys in peers.items()]
        page = run_through(merge_pages(limit, answers, [], name_of))
        listed += page.items
        assert len(page.items) <= limit
        if not page.more:
            break
        assert page.items, "a page that promises more brings something"
        after = page.items[-1].key
        pages += 1
        assert pages < 100
    everything = sorted({key for keys in held for key in keys if key.startswith(prefix)})
    assert [item.key for item in listed] == everything
    for item in listed:
        newest = max(keys[item.key] for keys in held if item.key in keys)
        holders = [name_of(peer_id) for peer_id, keys in peers.items() if keys.get(item.key) == newest]
        assert (item.clock, item.writer) == newest
        assert (item.copies, item.peers) == (len(holders), holders)


def info(key: str, clock: int = 1) -> KeyInfo:
    return KeyInfo(key, clock, clock, 1, 0, 2, True, 77)


def test_nothing_is_listed_behind_what_a_peer_has_not_listed() -> None:
    answers = [(b"x", Keys([info("a"), info("b")], True)), (b"y", Keys([info("c")], False))]
    page = run_through(merge_pages(10, answers, [], name_of))
    assert [item.key for item in page.items] == ["a", "b"]
    assert page.more


def test_an_entry_carries_what_its_holder_said() -> None:
    (item,) = run_through(merge_pages(10, [(b"x", Keys([info("a", 5)], False))], [], name_of)).items
    assert (item.length, item.pin, item.soft, item.expires_unix_ms) == (5, 2, True, 77)
    assert (item.clock, item.writer, item.copies, item.peers) == (5, 1, 1, ["x"])


def list_keys(world: Harness, *, local: bool = False, **options: object) -> ListOperation:
    fields: dict[str, object] = {"prefix": "", "after": "", "limit": 10, **options}
    request = ListKeys(NAMESPACE, **fields)  # type: ignore[arg-type]  # fields by name
    operation = ListOperation(world.core, request, local=local)
    world.start(operation)
    return operation


def keys_in(operation: ListOperation) -> list[str]:
    assert isinstance(operation.result, ListedPage)
    return [item.key for item in operation.result.items]


def test_all_live_peers_are_asked_the_same_and_merged() -> None:
    world = Harness(others=3)
    world.stored("b", b"1")
    world.die(world.others[0])
    operation = list_keys(world, prefix="", after="a", limit=7)
    asks = world.asks(DataKind.LIST)
    assert {ask.peer_id for ask in asks} == {other.peer_id for other in world.others[1:]}
    assert all(ask.request == ListKeys(NAMESPACE, "", "a", 7) for ask in asks)
    world.answer(asks[0], Keys([info("c")], False))
    assert not operation.done
    world.answer(asks[1], Keys([info("c")], False))
    assert keys_in(operation) == ["b", "c"]
    assert operation.result.items[1].copies == 2
    assert operation.result.items[0].peers == [world.core.name_of(world.core.peer_id)]
    assert not operation.result.silent
    world.check_idle()


def test_silent_peers_are_named() -> None:
    world = Harness(others=2)
    world.stored("b", b"1")
    operation = list_keys(world)
    first, second = world.asks(DataKind.LIST)
    world.answer(first, None)
    world.answer(second, Failure(int(Code.BUSY), "later"))
    assert keys_in(operation) == ["b"]
    assert operation.result.silent == [first.peer_id, second.peer_id]


def test_a_local_listing_asks_nobody() -> None:
    world = Harness(others=2)
    world.stored("b", b"1")
    assert keys_in(list_keys(world, local=True)) == ["b"]
    assert not world.asks(DataKind.LIST)


def test_what_expired_is_not_listed_while_it_is_still_here() -> None:
    world = Harness()
    world.stored("a", b"1")
    entry = world.stored("b", b"1")
    unix = world.core.unix(world.now)
    for expires_unix, keys in ((unix + 1, ["a", "b"]), (unix, ["a"])):
        entry.expires_unix_ms = int(1000 * expires_unix)
        assert keys_in(list_keys(world, local=True)) == keys


def test_cancelling_ends_a_listing() -> None:
    world = Harness(others=1)
    operation = list_keys(world)
    (ask,) = world.asks(DataKind.LIST)
    world.core.operations.cancel(operation, world.now)
    world.answer(ask, Keys([], False))
    world.check_idle()


def test_many_peers_are_asked_and_their_pages_merged_some_at_a_time() -> None:
    answers = [
        (b"peer %d" % number, Keys([info(f"{key:05}") for key in range(200)], False))
        for number in range(20)
    ]
    steps = merge_pages(150, answers, [], name_of)
    assert len(list(steps)) == 150 * len(answers) // MERGED_PER_STEP
    world = Harness(others=ASKED_PER_STEP + 3)
    operation = list_keys(world)
    asks = world.asks(DataKind.LIST)
    assert len(asks) == ASKED_PER_STEP
    world.pass_time(0.01)
    asks += world.asks(DataKind.LIST)
    assert len({ask.peer_id for ask in asks}) == len(asks) == ASKED_PER_STEP + 3
    for ask in asks:
        world.answer(ask, Keys([info("c")], False))
    assert operation.done
    assert operation.result.items[0].copies == len(asks)
