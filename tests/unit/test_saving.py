"""A state directory that cannot be written is told, until it can."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from p2pstore.peer.saving import StateSaver
from p2pstore.statedir import StateDirectory
from tests.unit.core_harness import Harness


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
