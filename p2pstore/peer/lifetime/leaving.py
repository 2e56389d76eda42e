"""Saving and leaving: the state directory is kept up to date, and at the end others, or this peer's SSD, take the
objects that it alone holds. Shell."""

from __future__ import annotations

import logging
import os
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import trio

from p2pstore.core.copies.hand_over import HandedOver, HandOverOperation
from p2pstore.core.peer_core import PeerCore
from p2pstore.errors import ConfigError
from p2pstore.gossip.floors.floor_stamps import Stamps
from p2pstore.gossip.gossip_messages import Ask
from p2pstore.gossip.records import PeerId, SignedRecord
from p2pstore.objects import counted, format_bytes
from p2pstore.runtime.trio_tasks import take_turns
from p2pstore.state.state_directory import StateDirectory

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

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


FAREWELL_SECONDS: Final = 1.0
TELL_SECONDS: Final = 0.5
"""How long a peer that was asked to leave waits for a client to ask how that went."""


class Leaving:
    """The end of one peer. `drained` is set when the last operation has ended."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._core = node.core
        self.drained = trio.Event()
        self._hand_over: HandOverOperation | None = None
        self._all_handed_over = False
        self._told = trio.Event()

    @property
    def handed_over(self) -> HandedOver | None:
        """Progress of the hand-over; None before it begins."""
        return None if self._hand_over is None else self._hand_over.handed_over

    def document(self) -> dict[str, Any] | None:
        """For the statistics; once it is known how that ended, and was asked for, this peer ends."""
        handed = self.handed_over
        if handed is None:
            return None
        if self._all_handed_over:
            self._told.set()
        return {**asdict(handed), "done": self._all_handed_over}

    async def run(self) -> None:
        """Take no new work, finish what is under way, hand over to others what this peer alone holds and write to the
        SSD what memory has (at most `drain_seconds` for all of it), tell the others, keep what must survive.

        A peer whose memory is kept comes back with all of it: it hands nothing over and writes nothing to the SSD,
        unless it was asked to leave, which is for good. Then nothing is kept."""
        node = self._node
        kept = None if node.leave_requested.is_set() else node.kept_memory
        ssd = node.ssd if kept is None else None
        if kept is None and node.kept_memory is not None:
            node.kept_memory.is_kept = False
        self._core.closing = True
        self._hand_over = HandOverOperation(self._core)
        node.process()
        with trio.move_on_after(node.drain_seconds):
            async with trio.open_nursery() as nursery:
                if kept is None and node.running and node.failure is None and node.drain_seconds > 0:
                    operation = self._core.operations.start(self._hand_over, node.now)
                    nursery.start_soon(node.settle, operation)
                if ssd is not None:
                    nursery.start_soon(ssd.write_memory)
                if self._core.operations_under_way:
                    await self.drained.wait()
            if ssd is not None:  # objects put by operations under way
                await ssd.write_memory()
        self._log_handed_over()
        if kept is not None:
            logger.info(
                "%s objects (%s) stay in %s for the next start",
                f"{self._core.segment.object_count:,}",
                format_bytes(self._core.segment.used_bytes),
                kept.path,
                extra={"event": "memory_kept", "path": str(kept.path)},
            )
        await self._say_goodbye()

    def _log_handed_over(self) -> None:
        self._all_handed_over = True
        handed = self.handed_over
        if handed is not None and (handed.objects or handed.left_objects):
            logger.info(
                "handed over %s (%s) that only this peer held; left behind %s (%s)",
                counted(handed.objects, "object"),
                format_bytes(handed.bytes),
                counted(handed.left_objects, "object"),
                format_bytes(handed.left_bytes),
                extra={"event": "handed_over", **asdict(handed)},
            )

    async def _say_goodbye(self) -> None:
        if self._node.leave_requested.is_set():
            with trio.move_on_after(TELL_SECONDS):
                await self._told.wait()
        asks = [effect for effect in self._core.gossip.leave(self._node.now) if isinstance(effect, Ask)]
        with trio.move_on_after(FAREWELL_SECONDS):
            async with trio.open_nursery() as nursery:
                for ask in asks:
                    nursery.start_soon(self._node.control.ask, ask)
        if self._node.saver is not None:
            await self._node.saver.save()
