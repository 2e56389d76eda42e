"""A state directory that cannot be written is told, until it can."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pstore.gossip.records import SignedRecord
from p2pstore.objects import Version
from p2pstore.peer.lifetime.saving import StateSaver
from p2pstore.state.state_directory import StateDirectory
from tests.unit.core_harness import Harness, digest_of


async def test_a_full_disk_is_told_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StateDirectory.open(tmp_path / "state") as state:
        saver = StateSaver(Harness().core, state)
        await saver.save()
        assert saver.problem == ""

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, f"{tmp_path} cannot be written: No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(state, "save_addresses", full)
            await saver.save()
        assert saver.problem == "No space left on device"
        await saver.save()
        assert saver.problem == ""


async def test_floors_that_come_while_all_are_written_anew_are_in_the_file(tmp_path: Path) -> None:
    """All of many floors are collected in steps, between which others are heard of."""
    world = Harness()
    for number in range(300):
        world.core.floors.write(digest_of(f"k{number}"), Version(1, 1), world.now)
    world.core.take_effects()
    with StateDirectory.open(tmp_path / "state") as state:
        saver = StateSaver(world.core, state)
        state.floors.record_count = 1 << 20  # superseded ones
        late: list[SignedRecord] = []

        async def hear() -> None:
            for number in range(300, 320):
                late.append(world.core.floors.write(digest_of(f"k{number}"), Version(1, 1), world.now))
                saver.add(late[-1])
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hear)
            nursery.start_soon(saver.save)
        await saver.save()
        found = {signed.body for signed in state.floors.load()}
    assert found == {signed.body for signed in world.gossip.cluster_records.dump()}
    assert {signed.body for signed in late} <= found
