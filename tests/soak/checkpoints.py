"""Clients that publish a checkpoint again and again, and that follow it: the version in use must be whole."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from p2pstore import blocking
from p2pstore.errors import NoLocalPeer, P2PStoreError, StoreClosed
from p2pstore.results import FollowedCheckpoint
from tests.soak.values import number_in, value_of

if TYPE_CHECKING:
    from tests.soak.actor import Journal, Notes, Settings

NAME: Final = "soak"
FILES: Final = 4
EVERY_SECONDS: Final = 25.0
UPDATE_SECONDS: Final = 40.0
AWAY_SECONDS: Final = 1.0
CLIENT_SECONDS: Final = 15.0


class _Ended(Exception):
    """The actor is to end."""


def publish(settings: Settings, journal: Journal, ending: threading.Event) -> None:
    """New files, published and then switched to, until told to end."""
    version = settings.epoch * 1000
    while True:
        version += 1
        folder = Path(settings.publishes, f"v{version}")
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(FILES):
            name = _file_name(number)
            (folder / name).write_bytes(value_of(name, version))
        try:
            with journal.operation("publish") as notes:
                with blocking.connect(settings.socket, timeout=CLIENT_SECONDS) as client:
                    client.checkpoints.publish(NAME, folder)
                notes.results.append((str(version), "published"))
            with journal.operation("update") as notes:
                with blocking.connect(settings.socket, timeout=CLIENT_SECONDS) as client:
                    done = client.checkpoints.update(NAME, quorum=1, timeout=UPDATE_SECONDS)
                notes.results.append((str(version), "switched", done.using))
        except (NoLocalPeer, StoreClosed):
            pass
        for old in Path(settings.publishes).iterdir():
            if old.name not in (f"v{version}", f"v{version - 1}"):
                shutil.rmtree(old, ignore_errors=True)
        if ending.wait(EVERY_SECONDS):
            return


def follow(settings: Settings, journal: Journal, ending: threading.Event) -> None:
    """Follow until told to end, and compare all files whenever another version comes into use."""

    def changed(state: FollowedCheckpoint) -> None:
        if ending.is_set():
            raise _Ended
        if state.stage == "current":
            with journal.operation("look at checkpoint") as notes:
                _look(Path(settings.follows), notes)

    while not ending.is_set():
        try:
            with blocking.connect(settings.socket, timeout=CLIENT_SECONDS) as client:
                client.checkpoints.follow(NAME, settings.follows, changed)
        except _Ended:
            return
        except P2PStoreError:
            time.sleep(AWAY_SECONDS)  # it is followed again


def _look(directory: Path, notes: Notes) -> None:
    try:
        version = os.readlink(directory / "current")
    except FileNotFoundError:
        return
    seen = set()
    for number in range(FILES):
        name = _file_name(number)
        try:
            seen.add(number_in(name, (directory / version / name).read_bytes()))
        except FileNotFoundError:
            if os.readlink(directory / "current") == version:
                notes.results.append((name, "wrong", "a file of the version in use is missing"))
            return
    if None in seen or len(seen) > 1:
        notes.results.append((f"checkpoint {version}", "wrong", f"files of versions {seen}"))
    else:
        notes.results.append((str(seen.pop()), "in use"))


def version_in_use(directory: Path) -> int | None:
    """By the first file of what a follower's directory names as current; None for none."""
    try:
        value = (directory / "current" / _file_name(0)).read_bytes()
    except FileNotFoundError:
        return None
    return number_in(_file_name(0), value)


def _file_name(number: int) -> str:
    return f"weights-{number}.bin"
