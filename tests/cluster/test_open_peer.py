"""Several real peers in one trio loop: what the API promises, and what must not bring a peer down."""

import gc
import os
import socket
from pathlib import Path

import pytest
import trio

import p2pstore
from p2pstore import errors
from p2pstore.gossip.gossip_messages import ControlKind, Ping
from p2pstore.memory.policies.interface import LeastRecentlyUsed
from p2pstore.memory.policies.prefix import PrefixAware
from p2pstore.memory.segment_layout import SLOT_BYTES, trailer_offset
from p2pstore.objects import key_digest
from p2pstore.peer import Peer, open_peer
from p2pstore.peer.lifetime import leaving
from p2pstore.routing import Costs, Router
from p2pstore.state.state_directory import StateDirectory
from tests.cluster.peers import cluster, config
from tests.present import present
from tests.waiting import until

MIB = 1024 * 1024


async def test_a_client_whose_reads_fall_back_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path, 2) as (a, b):
        await a.put("k", b"value")
        os.rename(a.socket, tmp_path / "elsewhere")  # its memory cannot be mapped any more
        assert await b.get("k", wait=5) == b"value"
        counters = b.node.core.counters
        await until(lambda: counters["transport_fallbacks"] == 1)
        assert "shm to p0 did not work" in caplog.text
        os.rename(tmp_path / "elsewhere", a.socket)


async def test_concurrent_first_puts_end_as_one_version(tmp_path: Path) -> None:
    async with cluster(tmp_path) as peers:
        async with trio.open_nursery() as nursery:
            for number, peer in enumerate(peers):
                nursery.start_soon(peer.put, "k", b"value %d" % number)
        with trio.fail_after(10):
            while len({await peer.get("k", wait=1) for peer in peers}) > 1:
                await trio.sleep(0.02)


async def test_replicas_survive_their_first_holder(tmp_path: Path) -> None:
    value = os.urandom(3 * MIB)
    async with trio.open_nursery() as nursery, cluster(tmp_path, 2) as (a, b):
        stopped = trio.Event()

        async def short_life() -> None:
            async with open_peer(config(tmp_path, "short", a)) as peer:
                await until(lambda: len(peer.node.core.live_peers()) == 2)
                result = await peer.put("k", value, replicas=3)
                assert (result.copies, result.wanted) == (3, 3)
                few = await peer.put("more", b"x", replicas=9)
                assert (few.copies, few.wanted) == (3, 9)
            stopped.set()

        nursery.start_soon(short_life)
        with trio.fail_after(20):
            await stopped.wait()
        assert await a.get("k") == value
        assert await b.get("k") == value


async def test_readers_spread_over_the_holders(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3) as peers:
        result = await peers[0].put("k", b"value", replicas=2)
        assert result.copies == 2
        (reader,) = (peer for peer in peers if not peer.node.core.segment.object_count)
        core = reader.node.core
        digest = key_digest("k")
        await until(lambda: len(core.copies.known(digest, reader.node.now)) == 2)
        copies = core.copies.known(digest, reader.node.now)
        firsts = {reader.node.routes.reading_order(copies)[0].member for _ in range(100)}
        assert firsts == {copy.member for copy in copies}
        core.holders.peer_failed(copies[0].peer_id, reader.node.now)
        copies = core.copies.known(digest, reader.node.now)
        firsts = {reader.node.routes.reading_order(copies)[0].member for _ in range(100)}
        assert firsts == {copies[0].member}


async def test_errors_of_the_block_come_out_as_themselves(tmp_path: Path) -> None:
    with pytest.raises(errors.NoSuchKey, match="missing"):
        async with open_peer(config(tmp_path, "a")) as peer:
            await peer.get("missing")


def open_files() -> int:
    gc.collect()  # a mapping goes with the last object that refers to it
    return len(os.listdir("/proc/self/fd"))


async def test_nothing_is_left_open(tmp_path: Path) -> None:
    async def once() -> int:
        async with open_peer(config(tmp_path, "a")) as peer:
            await peer.put("k", b"v")
        return open_files()

    first = await once()
    later = [await once() for _ in range(3)]
    assert max(later) <= first
    assert not (tmp_path / "a.sock").exists()


async def test_a_cancelled_peer_closes_everything(tmp_path: Path) -> None:
    async def for_a_while(seconds: float) -> None:
        with trio.move_on_after(seconds):
            async with open_peer(config(tmp_path, "a")) as peer:
                await peer.put("k", bytes(3 * MIB))
                await trio.sleep_forever()

    await for_a_while(0.2)
    before = open_files()
    for seconds in (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.2):
        await for_a_while(seconds)
    assert open_files() <= before
    assert not (tmp_path / "a.sock").exists()


# --- joining ---------------------------------------------------------------------------------


def book(state: str) -> str:
    return Path(state, "addresses.json").read_text()


async def test_a_failed_join_leaves_nothing_behind(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    async with (
        open_peer(config(tmp_path, "a", cluster="one")) as wrong,
        open_peer(config(tmp_path, "c", cluster="two")) as right,
    ):
        for _ in range(2):
            with pytest.raises(errors.AuthenticationFailed, match=wrong.control):
                async with open_peer(config(tmp_path, "b", wrong, cluster="two", state_dir=state)) as b:
                    with trio.fail_after(15):
                        await b.node.leave_requested.wait()
            assert wrong.control not in book(state)
        async with open_peer(config(tmp_path, "b", right, cluster="two", state_dir=state)) as b:
            await until(lambda: b.node.core.live_peers())


async def test_a_remembered_address_of_another_cluster_is_no_reason_to_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Addresses pass to other peers with time, and earlier versions remembered peers that refused them."""
    state = str(tmp_path / "state")

    async def refused() -> None:
        await until(lambda: "which was remembered from earlier" in caplog.text)

    async with open_peer(config(tmp_path, "a", cluster="one")) as wrong:
        with StateDirectory.open(state) as directory:
            directory.save_addresses([wrong.control])
        async with open_peer(config(tmp_path, "b", cluster="two", state_dir=state)) as b:
            await refused()  # with nothing else to go by it serves alone
            await b.put("k", b"alone")
            assert wrong.control in caplog.text
        caplog.clear()
        async with open_peer(config(tmp_path, "c", cluster="two")) as right:
            with StateDirectory.open(state) as directory:
                directory.save_addresses([wrong.control])
            both = config(tmp_path, "b", right, cluster="two", state_dir=state)
            async with open_peer(both) as b:
                await until(lambda: b.node.core.live_peers())
            assert right.control in book(state)
            assert wrong.control not in book(state)


async def test_of_several_addresses_one_that_admits_is_enough(tmp_path: Path) -> None:
    async with (
        open_peer(config(tmp_path, "a", cluster="one")) as wrong,
        open_peer(config(tmp_path, "c", cluster="two")) as right,
        open_peer(config(tmp_path, "b", wrong, right, cluster="two")) as b,
    ):
        await until(lambda: b.node.core.live_peers())
        assert b.node.failure is None


async def test_a_dead_bootstrap_address_is_retried_and_the_peer_serves_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    async with open_peer(config(tmp_path, "b", f"127.0.0.1:{port}")) as b:
        await b.put("k", b"alone")
        assert await b.get("k") == b"alone"
        await until(lambda: any("cannot be joined" in r.getMessage() for r in caplog.records))
        async with open_peer(config(tmp_path, "a", listen=f"127.0.0.1:{port}")) as a:
            await until(lambda: len(a.node.core.live_peers()) == 1, 30)
            assert await a.get("k", wait=5) == b"alone"


async def test_places_that_are_taken(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    async with open_peer(config(tmp_path, "a", state_dir=state)) as a:
        for settings, words in (
            ({"state_dir": state}, "in use"),
            ({"listen": a.control}, "in use"),
            ({"data_listen": [a.data[0]]}, "in use"),
            ({"socket": a.socket}, "socket"),
        ):
            with pytest.raises(errors.ConfigError, match=words):
                async with open_peer(config(tmp_path, "b", **settings)):
                    pass
        await a.put("k", b"still here")


# --- strangers and broken clients ------------------------------------------------------------


async def test_a_cancelled_peer_says_goodbye(tmp_path: Path) -> None:
    async with open_peer(config(tmp_path, "stays")) as stays:
        with trio.CancelScope() as scope:
            async with open_peer(config(tmp_path, "goes", stays)) as goes:
                await until(lambda: len(stays.node.core.live_peers()) == 1)
                gone = goes.node.core.peer_id
                scope.cancel()
                await trio.sleep_forever()
        state = present(stays.node.core.gossip.membership.get(gone))
        assert state.status.name == "LEFT"


async def test_floors_that_are_gone_do_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "FLOORS_SLACK", 3)
    state = str(tmp_path / "state")
    async with open_peer(config(tmp_path, "a", state_dir=state)) as peer:
        saver = present(peer.node.saver)
        directory = saver.state
        floors = peer.node.core.gossip.cluster_records.floors
        for number in range(12):
            await peer.put("k", b"value %d" % number)
            await peer.remove("k")
            floors.raise_horizon({peer.node.core.member: peer.node.core.clock.latest})
            while floors.purging:
                peer.node.core.gossip.cluster_records.purge()
            await saver.save()
            assert directory.floors.record_count <= 2 * 0 + 3 + 2
        assert len(directory.floors.load()) < 12


async def test_a_peer_that_has_left_refuses_what_others_still_ask(tmp_path: Path) -> None:
    """Their connections end a moment after it does; that is no error of this program."""
    async with open_peer(config(tmp_path, "gone")) as peer:
        node = peer.node
    with pytest.raises(errors.StoreClosed, match="has left"):
        await node.control.serve(node.core.peer_id, ControlKind.PING, Ping(1, []))
    node.process()


async def test_addresses_are_kept_as_soon_as_peers_have_met(tmp_path: Path) -> None:
    """A peer killed a moment later finds the others by them."""
    states = [str(tmp_path / name) for name in ("state-a", "state-b")]
    async with (
        open_peer(config(tmp_path, "a", state_dir=states[0])) as a,
        open_peer(config(tmp_path, "b", a, state_dir=states[1])) as b,
    ):

        def kept(state: str, other: Peer) -> bool:
            book = Path(state, "addresses.json")
            return book.exists() and other.control in book.read_text()

        seconds = leaving.SAVE_INTERVAL_SECONDS / 2
        await until(lambda: kept(states[0], b) and kept(states[1], a), seconds)


async def test_what_a_peer_says_of_its_load_is_told_to_schedulers(tmp_path: Path) -> None:
    async with cluster(tmp_path, 2) as (first, second):
        first.node.load.told_permille = 1250
        first.node.core.gossip.own_record.changed()

        async def told() -> dict[str, float]:
            return {info.peer_id: info.load for info in await second.peers()}

        with trio.fail_after(60):
            while (await told())[first.peer_id] != 1.25:
                await trio.sleep(0.01)
        routes = Router(Costs(1.0, 0.1)).rank(
            4, [], [first.peer_id, second.peer_id], infos=await second.peers()
        )
        assert [route.peer_id for route in routes] == [second.peer_id, first.peer_id]


async def test_a_peer_evicts_as_it_was_told(tmp_path: Path) -> None:
    for name, kind in (("lru", LeastRecentlyUsed), ("prefix", PrefixAware)):
        async with open_peer(config(tmp_path, name, eviction_policy=name)) as peer:
            assert type(peer.node.core.segment.policy) is kind


async def test_who_floods_leaves_others_what_their_quota_keeps(tmp_path: Path) -> None:
    """By single puts with room granted ahead, by batches, and from another peer that has no memory itself."""
    async with (
        open_peer(config(tmp_path, "p", memory="8MiB", quota=["mine=3MiB"])) as peer,
        open_peer(config(tmp_path, "q", peer, memory=0)) as poor,
        p2pstore.connect(peer.socket, namespace="mine") as mine,
        p2pstore.connect(peer.socket, namespace="flood") as flood,
        p2pstore.connect(poor.socket, namespace="flood") as distant,
    ):
        value = bytes(27 * 1024)
        keys = [f"key {number}" for number in range(80)]
        for key in keys[:40]:
            await mine.put(key, value)
        for result in await mine.put_many([(key, value) for key in keys[40:]]):
            assert result.error is None
        for number in range(4):
            for each in range(50):
                await flood.put(f"{number} {each}", value)
            await flood.put_many([(f"batch {number} {each}", value) for each in range(50)])
            await distant.put(f"distant {number}", value)
        assert await mine.contains_many(keys) == [True] * 80
        use = (await peer.statistics())["peer"]["quotas"]["mine"]
        assert use["quota_bytes"] == 3 * MIB
        assert use["kept_bytes"] == use["used_bytes"] >= 80 * len(value)


async def test_chains_go_from_their_tails(tmp_path: Path) -> None:
    """A chain put as a batch, and one that grows behind what `match_prefix` found."""
    async with open_peer(config(tmp_path, "p", memory="8MiB")) as peer:
        value = bytes(MIB // 2)
        chain = [f"block {number}" for number in range(8)]
        await peer.put_many([(key, value) for key in chain[:4]])
        assert await peer.match_prefix(chain) == 4
        await peer.put_many([(key, value) for key in chain[4:6]])
        for key in chain[6:]:
            await peer.put(key, value)
        number = 0
        while (left := [key for key in chain if peer.contains_nowait(key)]) == chain:
            await peer.put(f"other {number}", value)
            number += 1
        while left:
            assert left == chain[: len(left)]
            await peer.put(f"other {number}", value)
            number += 1
            left = [key for key in chain if peer.contains_nowait(key)]


async def test_a_stray_write_of_a_client_harms_nobody_for_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that writes maps all of its peer's memory, and may write anywhere in it."""
    value = bytes(range(256)) * 20
    async with open_peer(config(tmp_path, "a")) as peer, p2pstore.connect(peer.socket) as careless:
        await careless.put("k", value)
        entry = peer.node.core.segment.entries()[0]
        memory = careless._link.connection.segments[0]
        geometry = peer.node.core.segment.geometry
        slot = geometry.slots_offset + entry.slot * SLOT_BYTES
        trailer = entry.offset + trailer_offset(entry.length)
        for begin, end in (
            (0, geometry.index_offset),
            (geometry.index_offset, geometry.slots_offset),
            (slot, slot + SLOT_BYTES),
            (trailer, trailer + entry.trailer_length),
            (0, geometry.data_offset),
        ):
            memory[begin:end] = b"\xff" * (end - begin)
            with trio.fail_after(10):
                async with p2pstore.connect(peer.socket) as client:
                    while True:
                        try:
                            assert await client.get("k") == value
                            break
                        except errors.P2PStoreError:
                            await trio.sleep(0.01)
                    assert (await client.put("k", value)).status == "unchanged"
                    await client.put("other", b"x", overwrite=True)
        assert "a client wrote into the part of this peer's memory" in caplog.text
