"""Ranking machines for a request: by what they have of its prefix, what they have to do, and what fetching costs."""

from random import Random
from typing import Any

import pytest

from p2pstore.results import FetchEstimate, FetchSource, PeerInfo, PrefixHolder
from p2pstore.routing import Costs, Route, Router

COSTS = Costs(prefill_seconds_per_block=1.0, fetch_seconds_per_block=0.1)
PEERS = ["a", "b", "c"]


def holder(peer_id: str, blocks: int, memory_blocks: int | None = None) -> PrefixHolder:
    memory = blocks if memory_blocks is None else memory_blocks
    return PrefixHolder(peer_id, peer_id, blocks, memory, local=False)


def ids(routes: list[Route]) -> list[str]:
    return [route.peer_id for route in routes]


def test_who_has_most_of_the_prefix_comes_first() -> None:
    router = Router(Costs(1.0, fetch_seconds_per_block=5.0))
    routes = router.rank(10, [holder("b", 6), holder("c", 9)], PEERS)
    assert ids(routes) == ["c", "b", "a"]
    assert [(each.reused_blocks, each.work_seconds) for each in routes] == [
        (9, 1.0),
        (6, 4.0),
        (0, 10.0),
    ]
    assert not any(each.fetched_blocks for each in routes), "computing is cheaper than that"


def test_what_others_have_is_fetched_where_that_is_cheaper() -> None:
    routes = Router(COSTS).rank(10, [holder("b", 6)], PEERS)
    assert ids(routes)[0] == "b"
    assert (routes[1].reused_blocks, routes[1].fetched_blocks) == (6, 6)
    assert routes[1].work_seconds == pytest.approx(4.0 + 0.6)


def test_a_run_that_begins_here_is_only_fetched_beyond_that() -> None:
    routes = Router(COSTS).rank(10, [holder("a", 4), holder("b", 6)], ["a"])
    assert (routes[0].reused_blocks, routes[0].fetched_blocks) == (6, 2)


def test_blocks_on_an_ssd_take_longer() -> None:
    costs = Costs(1.0, fetch_seconds_per_block=0.1, ssd_seconds_per_block=0.2)
    routes = Router(costs).rank(10, [holder("a", 10, memory_blocks=4), holder("b", 10)], PEERS)
    assert ids(routes)[0] == "b"
    assert routes[0].work_seconds == 0.0


def estimated(peer_id: str, seconds: float) -> FetchEstimate:
    own = FetchSource(peer_id, peer_id, "memory", 4, 400, 0.001, 0.1)
    return FetchEstimate.of([own, FetchSource("x", "x", "remote", 4, 400, seconds, 0.1)], [0, 1] * 4)


def test_of_two_peers_with_equal_prefix_the_one_with_the_faster_link_comes_first() -> None:
    holders = [holder("a", 4), holder("b", 4), holder("x", 8)]
    estimates = {"a": estimated("a", 2.0), "b": estimated("b", 0.4)}
    routes = Router(COSTS).rank(10, holders, ["a", "b"], estimates=estimates)
    assert [(each.peer_id, each.fetched_blocks) for each in routes] == [("b", 4), ("a", 4)]
    assert [each.work_seconds for each in routes] == pytest.approx([2.4, 4.0])
    slow = Router(COSTS).rank(10, holders, ["a"], estimates={"a": estimated("a", 8.0)})
    assert (slow[0].fetched_blocks, slow[0].work_seconds) == (0, 6.0), "computing is cheaper"
    other = Router(COSTS).rank(10, holders, ["a"], estimates={"b": estimated("b", 8.0)})
    assert other[0].work_seconds == pytest.approx(2.4), "costs count where there is no estimate"


def test_queues_count_and_a_bound_keeps_the_first_from_getting_all() -> None:
    router = Router(COSTS)
    chosen = []
    for _ in range(30):
        best = router.rank(10, [holder("a", 9)], PEERS)[0]
        router.sent(best)
        chosen.append(best.peer_id)
    assert set(chosen) == set(PEERS)


def test_without_a_bound_the_first_gets_nearly_all() -> None:
    """As all requests share their first block."""
    router = Router(Costs(1.0, fetch_seconds_per_block=100.0), load_bound=1000.0)
    for _ in range(5):
        router.sent(router.rank(10, [holder("a", 10)], PEERS)[0])
    assert router.rank(10, [holder("a", 10)], PEERS)[0].peer_id == "a"


def test_work_that_is_finished_waits_no_more() -> None:
    router = Router(COSTS)
    route = router.rank(10, [], PEERS)[0]
    router.sent(route)
    assert router.rank(10, [], [route.peer_id])[0].queue_seconds == 10.0
    router.finished(route)
    router.finished(route)
    assert router.rank(10, [], [route.peer_id])[0].queue_seconds == 0.0


def test_queues_that_are_told_count_instead() -> None:
    routes = Router(COSTS).rank(10, [], PEERS, queued={"a": 30.0, "b": 1.0})
    assert ids(routes) == ["c", "b", "a"]
    assert routes[-1].is_over_bound


def test_who_cannot_be_in_time_anywhere_is_better_rejected() -> None:
    routes = Router(COSTS).rank(10, [holder("a", 8)], PEERS)
    assert Router.accepts(routes, 2.0)
    assert not Router.accepts(routes, 1.9)
    assert not Router.accepts([], 10.0), "there is nobody"


def info(peer_id: str, **facts: Any) -> PeerInfo:
    fields: dict[str, Any] = {"status": "alive", "control": [], "data": [], "me": False}
    numbers = dict.fromkeys(("incarnation", "memory_capacity", "memory_used", "objects"), 0)
    fields |= {"name": peer_id, "software": "", "heard_seconds_ago": 0.0, **numbers, **facts}
    return PeerInfo(peer_id=peer_id, **fields)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"load": 1.2}, "it is busy: 1.20 of a core"),
        ({"leaving": True}, "it is leaving"),
        ({"status": "suspect"}, "it is suspect"),
    ],
)
def test_who_is_in_trouble_comes_last(facts: dict[str, Any], why: str) -> None:
    holders = [holder("a", 9)]
    infos = [info("a", **facts), info("b", load=0.9), info("c")]
    assert ids(Router(COSTS).rank(10, holders, PEERS)) == ["a", "b", "c"]
    routes = Router(COSTS).rank(10, holders, PEERS, infos=infos)
    assert ids(routes) == ["b", "c", "a"]
    assert [bool(each.trouble) for each in routes] == [False, False, True]
    assert why in routes[-1].trouble
    lenient = Router(COSTS, most_load=2.0).rank(10, holders, PEERS, infos=infos)
    assert (lenient[0].peer_id == "a") == ("load" in facts)


def test_a_request_is_admitted_or_the_reason_is_said() -> None:
    holders, alive = [holder("a", 8)], [info("b"), info("c")]
    router = Router(Costs(1.0, fetch_seconds_per_block=100.0))
    routes = router.rank(10, holders, PEERS, infos=[info("a"), *alive])
    assert Router.admit(routes, 2.0).route is routes[0]
    late = Router.admit(routes, 1.9)
    assert (late.route, late.reason) == (None, "late: 2.0 s at best, and 1.9 s are allowed")
    routes = router.rank(10, holders, PEERS, infos=[info("a", load=3.0), *alive])
    refused = Router.admit(routes, 2.0)
    assert refused.route is None
    assert refused.reason.startswith("refused: of the best machine's peer, it is busy: 3.00")
    elsewhere = Router.admit(routes, 10.0)
    assert elsewhere.route is routes[0]
    assert routes[0].peer_id == "b"
    assert Router.admit([], 1.0).reason == "there is no machine"
    gone = router.rank(10, holders, ["a"], infos=[])
    assert Router.admit(gone, 5.0).reason == "refused: of the best machine's peer, no such peer"


def test_a_bound_below_the_mean_is_none() -> None:
    with pytest.raises(ValueError, match="1 at least"):
        Router(COSTS, load_bound=0.9)


def test_routes_make_sense_whatever_is_known() -> None:
    rng = Random(1)
    for _ in range(300):
        count = rng.randrange(0, 30)
        known = []
        for peer in rng.sample(PEERS, rng.randrange(4)):
            blocks = rng.randrange(1, 40)
            known.append(holder(peer, blocks, rng.randrange(blocks + 1)))
        router = Router(Costs(rng.random(), rng.random(), rng.random() / 10, rng.random() / 10))
        routes = router.rank(count, known, PEERS)
        assert sorted(ids(routes)) == PEERS
        for route in routes:
            assert 0 <= route.fetched_blocks <= route.reused_blocks <= count
            assert route.work_seconds >= 0
