"""Floors between real peers: flushing, and what is kept over a restart."""

import json
from pathlib import Path

import pytest
import trio

from p2pstore import PeerConfig, errors
from p2pstore.core import floors as sweeping
from p2pstore.gossip.floors import floor_sync
from p2pstore.objects import clock_from_unix_seconds
from p2pstore.peer import Peer, open_peer
from p2pstore.state.state_directory import StateDirectory
from tests.cluster import peers
from tests.waiting import until


def config(folder: Path, name: str, *bootstrap: Peer) -> PeerConfig:
    return peers.config(folder, name, *bootstrap, memory="16MiB", state_dir=str(folder / name))


async def test_a_flush_counts_everywhere_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "WITHDRAWN_PER_STEP", 2)  # many steps
    async with open_peer(config(tmp_path, "a")) as one, open_peer(config(tmp_path, "b", one)) as other:
        await until(lambda: one.node.core.live_peers() and other.node.core.live_peers())
        for number in range(50):
            await one.put(f"k{number}", b"value")
            await other.put(f"o{number}", b"value")
        await until(lambda: one.contains_nowait("o49"))  # what it has heard of is below its floor
        await one.flush()
        for peer in (one, other):
            assert peer.node.core.segment.object_count == 0
            for key in ("k3", "o3"):
                with pytest.raises(errors.NoSuchKey):
                    await peer.get(key)
        assert (await other.put("k3", b"value")).status == "created"
        assert await one.get("k3", wait=5) == b"value"
        assert len(one.node.core.gossip.cluster_records) == 1


async def test_a_flush_ends_at_its_deadline_though_a_peer_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_peer(config(tmp_path, "a")) as one, open_peer(config(tmp_path, "b", one)) as other:
        await until(lambda: one.node.core.live_peers() and other.node.core.live_peers())
        await one.put("k", b"value")
        await other.put("o", b"value")
        floors = other.node.core.floors
        monkeypatch.setattr(floors.sweep, "step", lambda now: None)  # it never gets to it
        one.timeout = 1.0
        begin = trio.current_time()
        await one.flush()
        assert 0.8 < trio.current_time() - begin < 6.0
        with pytest.raises(errors.NoSuchKey):
            await one.get("k")
        with pytest.raises(errors.NoSuchKey):  # it is still in the other's memory, and not served
            await one.get("o")


async def test_what_was_seen_of_floors_survives_a_restart(tmp_path: Path) -> None:
    async with open_peer(config(tmp_path, "a")) as one:
        await one.put("k", b"value")
        await one.remove("k")
        member = one.node.core.member
        await until(lambda: one.node.core.gossip.floors.synchronised)
        stamp = one.node.core.clock.latest
        one.node.core.gossip.cluster_records.floors.raise_horizon({7: stamp, 8: 5})
        one.node.core.gossip.floors.seen[77] = stamp
    kept = json.loads((tmp_path / "a" / "state.json").read_text())
    assert kept["floors_seen"][f"{member:016x}"] > 0
    assert kept["floors_horizon"] == {"0000000000000007": stamp, "0000000000000008": 5}
    async with open_peer(config(tmp_path, "a")) as one:
        records = one.node.core.gossip.cluster_records
        assert records.floors.horizon[7] == stamp
        assert len(records) == 1
        seen = one.node.core.gossip.floors.seen
        assert seen.keys() == {member, 77}
        assert seen[77] == stamp
        assert seen[member] >= kept["floors_seen"][f"{member:016x}"]  # it goes on while this looks


async def test_a_horizon_reaches_a_peer_that_was_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_peer(config(tmp_path, "a")) as one:
        async with open_peer(config(tmp_path, "b", one)) as other:
            await until(lambda: other.node.core.live_peers())
        await until(lambda: not one.node.core.live_peers())
        with StateDirectory.open(tmp_path / "b") as state:
            ten_minutes = clock_from_unix_seconds(600.0)
            clock = state.record.clock
            state.save_clock(clock - ten_minutes, {})
        one.node.core.gossip.cluster_records.floors.raise_horizon({7: clock})
        async with open_peer(config(tmp_path, "b", one)) as other:
            horizon = other.node.core.gossip.cluster_records.floors
            await until(lambda: horizon.horizon == {7: clock})
            assert other.node.core.counters["horizons_missed"] == 1
            await until(lambda: "by the signed records of a" in caplog.text)
            assert "it discarded 0 copies of objects that were put up to" in caplog.text


async def test_a_horizon_that_one_member_makes_up_erases_nothing_and_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floor_sync, "DISBELIEVED_SECONDS", 1.0)
    async with open_peer(config(tmp_path, "a")) as one, open_peer(config(tmp_path, "b", one)) as other:
        await until(lambda: one.node.core.gossip.floors.synchronised)
        await until(lambda: other.node.core.live_peers())
        for number in range(50):
            await one.put(f"k{number}", b"value")
        one.node.core.gossip.floors.quorum.fresh = False  # as after a minute
        lying = other.node.core.gossip
        clock = one.node.core.clock.latest
        members = [state.member for state in lying.membership.live()]
        lying.cluster_records.floors.raise_horizon(dict.fromkeys([*members, 7], clock))
        await until(lambda: "b says that removals up to" in caplog.text)
        found = one.node.core.gossip.floors.disbelieved(one.node.now)
        assert found == {other.node.core.member: clock}
        problems = (await one.statistics())["peer"]["problems"]
        assert any("b forgot removals of which" in each["what"] for each in problems)
        assert one.node.core.segment.object_count == 50
        assert one.node.core.counters["horizons_missed"] == 0
        assert await one.get("k7") == b"value"


async def test_floors_that_are_damaged_come_back_from_a_neighbour(tmp_path: Path) -> None:
    """And meanwhile this peer does not claim to have seen them: what they forbid would come back."""
    async with open_peer(config(tmp_path, "b")) as other:
        async with open_peer(config(tmp_path, "a", other)) as one:
            await until(lambda: other.node.core.live_peers())
            for number in range(10):
                await one.put(f"k{number}", b"value")
                await one.remove(f"k{number}")
            floors = other.node.core.gossip.cluster_records
            await until(lambda: len(floors) == 10)
            await until(lambda: len(one.node.core.earlier_life.seen_to_save) > 0)
        file = tmp_path / "a" / "floors.bin"
        whole = bytearray(file.read_bytes())
        whole[len(whole) // 2] ^= 4
        file.write_bytes(whole)
        with StateDirectory.open(tmp_path / "a") as state:
            assert len(state.floors.load()) == 9
            assert state.record.floors_seen == {}
        file.write_bytes(whole[:-30])  # and once more, for a peer to find
        async with open_peer(config(tmp_path, "a", other)) as one:
            await until(lambda: len(one.node.core.gossip.cluster_records) == 10)
            assert one.node.core.gossip.cluster_records.hash == floors.hash
            problems = (await one.statistics())["peer"]["problems"]
            assert any("was damaged when it started" in each["what"] for each in problems)
