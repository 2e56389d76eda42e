"""Writing what must survive: floors at once, the address book after members came, the clock now and then. Shell."""

from __future__ import annotations

import logging
import os
from collections import deque
from typing import Final

import trio

from p2pstore.core.peer_core import PeerCore
from p2pstore.errors import ConfigError
from p2pstore.gossip.floors.floor_stamps import Stamps
from p2pstore.gossip.records import PeerId, SignedRecord
from p2pstore.runtime.trio_tasks import take_turns
from p2pstore.state.state_directory import StateDirectory

logger = logging.getLogger("p2pstore.peer")

FLOORS_SLACK: Final = 1000
"""Superseded floors in the file before it is written anew."""
SAVE_INTERVAL_SECONDS: Final = 10.0
MEMBERS_SECONDS: Final = 0.5
"""Members come in groups: those within this time are saved together."""
MAX_UNSAVED: Final = 100_000
"""Floors that wait for a disk that takes none. Beyond it the file is written anew when it takes some."""


class StateSaver:
    """Keeps one peer's state directory up to date. A disk that fails costs a log line; it is tried again."""

    def __init__(self, core: PeerCore, state: StateDirectory) -> None:
        self._core = core
        self.state = state
        self._unsaved: deque[SignedRecord] = deque(maxlen=MAX_UNSAVED)
        self._lost_unsaved = False
        self._save_soon = trio.Event()
        self._save_now = trio.Event()
        self._saving = trio.Lock()
        self._pins = core.publishers.version
        self._renewals = 0
        self.problem = ""
        """Why the state directory could not be written when that was tried last; no path is in it."""

    def add(self, record: SignedRecord) -> None:
        """Have a cluster record written soon."""
        self._lost_unsaved |= len(self._unsaved) == MAX_UNSAVED
        self._unsaved.append(record)
        self.save_soon(at_once=True)

    def save_soon(self, *, at_once: bool = False) -> None:
        """Have all written. Soon is enough for the address book after a member came: a cluster of which all are killed
        finds itself by nothing else."""
        self._save_soon.set()
        if at_once:
            self._save_now.set()

    async def run(self) -> None:
        """Save until cancelled."""
        while True:
            with trio.move_on_after(SAVE_INTERVAL_SECONDS):
                await self._save_soon.wait()
                with trio.move_on_after(MEMBERS_SECONDS):
                    await self._save_now.wait()
            self._save_soon, self._save_now = trio.Event(), trio.Event()
            await self.save()

    async def save(self) -> None:
        """Write floors, clock and address book, in a thread: disks take long."""
        async with self._saving:
            gossip = self._core.gossip
            addresses = gossip.addresses.addresses()
            kept = gossip.cluster_records
            crowded = self.state.floors.record_count > 2 * len(kept) + FLOORS_SLACK
            lost, self._lost_unsaved = self._lost_unsaved, False
            # After a renewal the file has floors above the new ones, and the clock is lower than it was.
            renewals = self._core.timekeeping.renewals
            renewed = renewals != self._renewals
            # As of now: floors that are seen are among those written first.
            seen, horizon = self._core.earlier_life.seen_to_save, dict(kept.floors.horizon)
            all_floors = None
            if crowded or lost or renewed:
                all_floors = await take_turns(kept.dump_in_steps())
            publishers = self._core.publishers
            version = publishers.version
            pins = (publishers.pins, publishers.forgotten)
            written = await trio.to_thread.run_sync(
                self._write,
                addresses,
                all_floors,
                (seen, horizon),
                None if version == self._pins else pins,
            )
            if written:
                self._pins, self._renewals = version, renewals
            if lost and not written:
                self._lost_unsaved = True

    def _write(
        self,
        addresses: list[str],
        all_floors: list[SignedRecord] | None,
        stamps: tuple[Stamps, Stamps],
        pins: tuple[list[tuple[str, str, PeerId]], list[tuple[str, str, PeerId, int]]] | None,
    ) -> bool:
        state, core = self.state, self._core
        try:
            fresh = list(self._unsaved)
            state.floors.append(fresh)
            for _ in fresh:  # only now: what could not be written is tried again
                self._unsaved.popleft()
            state.record.save_incarnation(core.incarnation)
            if all_floors is not None:
                state.save_clock(core.clock.latest, floors_horizon=stamps[1])
                state.floors.replace([*all_floors, *fresh])
            if not self._lost_unsaved:
                state.save_clock(core.clock.latest, *stamps)
            state.save_addresses(addresses)
            if pins is not None:
                state.save_publishers(*pins)
        except (OSError, ConfigError) as error:
            logger.warning("the state directory cannot be written: %s", error)
            number = error.errno if isinstance(error, OSError) else None
            self.problem = "it cannot be used" if number is None else os.strerror(number)
            return False
        self.problem = ""
        return True
