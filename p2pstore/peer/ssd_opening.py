"""Opening and closing the SSD of a peer, with disks that hang. Shell."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from p2pstore.config import MINIMUM_SSD_BYTES, PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.objects import MIB, format_bytes
from p2pstore.peer.peer_ssd import LOOK_SECONDS, PeerSsd
from p2pstore.runtime.trio_tasks import open_background_nursery
from p2pstore.ssd_tier.cold_log import TierHooks
from p2pstore.ssd_tier.disk import FileDisk, open_disk
from p2pstore.ssd_tier.log_layout import FILE_NAME, SEGMENT_BYTES
from p2pstore.ssd_tier.tier import open_tier
from p2pstore.ssd_tier.write_admission import AdmissionPolicy

if TYPE_CHECKING:
    from p2pstore.peer.node import Node

logger = logging.getLogger("p2pstore.peer")

OPENING_SECONDS: Final = 30.0
"""Deadline of a silent disk while its log is opened."""
ENDING_SECONDS: Final = 3.0
"""Deadline of I/O under way when the peer ends; then a hanging disk is abandoned."""


SEGMENTS_WANTED: Final = 16
MIN_SEGMENT_BYTES: Final = 16 * MIB


@asynccontextmanager
async def open_ssd(config: PeerConfig, node: Node) -> AsyncIterator[None]:
    """The node's SSD tier, if it is to have one, for as long as the block runs. Call it before the node runs. Raises
    `ConfigError` when the SSD cannot be used."""
    if config.ssd is None:
        yield
        return
    disk = await _open_in_thread(config)
    ssd = PeerSsd(node)
    policy = AdmissionPolicy(write_bytes_per_day=config.ssd_bytes_per_day)
    try:
        async with (
            open_background_nursery() as guards,
            _opening(disk, config, guards) as opened,
            open_tier(
                disk,
                policy,
                TierHooks(
                    withdraw=ssd.withdraw,
                    is_last_copy=ssd.is_last_copy,
                    state_changed=ssd.state_changed,
                    shares=ssd.shares,
                ),
                segment_bytes=segment_bytes_for(disk.size_bytes),
                cluster=config.cluster,
            ) as tier,
        ):
            opened.set()
            guards.start_soon(_leave_alone_what_hangs, ssd, disk)
            ssd.begin(tier)
            logger.info(
                "ssd: %s of %s used, %s objects from earlier runs",
                format_bytes(tier.live_bytes),
                format_bytes(tier.capacity_bytes),
                f"{len(tier):,}",
                extra={"event": "ssd_open", "path": str(disk.path)},
            )
            try:
                yield
            finally:
                ssd.ending.set()
    except OSError as error:
        raise ConfigError(f"ssd: {config.ssd} fails: {error}") from error
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(disk.close)


@asynccontextmanager
async def _opening(
    disk: FileDisk, config: PeerConfig, guards: trio.Nursery
) -> AsyncIterator[trio.Event]:
    """Raises `ConfigError` when the disk hangs before the event is set; others then say which disk it was."""
    opened, abandoned = trio.Event(), trio.Event()

    async def guard() -> None:
        while not opened.is_set():
            with trio.move_on_after(LOOK_SECONDS):
                await opened.wait()
            if not opened.is_set() and disk.waits.silent_seconds >= OPENING_SECONDS:
                abandoned.set()
                disk.abandon()
                return

    guards.start_soon(guard)
    try:
        yield opened
    except Exception as error:
        if isinstance(error, ConfigError) and not opened.is_set():
            raise ConfigError(f"ssd: {disk.path}: {error}") from error
        if not abandoned.is_set():
            raise
        raise ConfigError(
            f"ssd: {config.ssd} does not answer: nothing came from it for {OPENING_SECONDS:g} s. Look at the kernel's "
            "log for that disk, or start this peer without it"
        ) from error


async def _leave_alone_what_hangs(ssd: PeerSsd, disk: FileDisk) -> None:
    """Abandon a hanging disk: its I/O cannot be ended, and its waiters would keep this peer alive."""
    await ssd.ending.wait()
    await trio.sleep(ENDING_SECONDS)
    while disk.waits.longest_seconds < ENDING_SECONDS:  # noqa: ASYNC110  # a disk sends no event
        await trio.sleep(LOOK_SECONDS)
    logger.warning(
        "the SSD has not answered for %.0f s: this peer ends without what is under way there",
        disk.waits.longest_seconds,
        extra={"event": "ssd_left_alone"},
    )
    ssd.tier.stop()
    disk.abandon()


async def _open_in_thread(config: PeerConfig) -> FileDisk:
    """Opening a path that hangs can be cancelled: a disk opened later is closed at once."""
    wanted = [True]  # the side that takes it owns the disk
    opened: list[FileDisk] = []

    def open_it() -> None:
        assert config.ssd is not None
        disk = open_disk(config.ssd, config.ssd_capacity_bytes or default_capacity(config.ssd))
        opened.append(disk)
        try:
            wanted.pop()
        except IndexError:
            disk.close()

    try:
        await trio.to_thread.run_sync(open_it, abandon_on_cancel=True)
    except trio.Cancelled:
        try:
            wanted.pop()
        except IndexError:  # it was opened in this moment
            opened[0].close()
        raise
    return opened[0]


def segment_bytes_for(capacity_bytes: int) -> int:
    """A power of two: 256 MiB, or on a small disk what makes some sixteen of them. Reclaim goes by whole segments, and
    parts of large objects are 64 MiB."""
    wanted = max(MIN_SEGMENT_BYTES, capacity_bytes // SEGMENTS_WANTED)
    return min(SEGMENT_BYTES, 1 << (wanted.bit_length() - 1))


def default_capacity(path: str) -> int | None:
    """The capacity where no setting names one: of a directory the capacity before, else half of its free space; None
    for a whole device. Raises `ConfigError` when that is too little."""
    place = Path(path)
    if not place.is_dir():
        return None
    with contextlib.suppress(OSError):  # opening it raises the error
        if taken := (place / FILE_NAME).stat().st_size:
            return taken
    half = shutil.disk_usage(place).free // 2
    if half < MINIMUM_SSD_BYTES:
        raise ConfigError(
            f"ssd: half of what is free in {path} is {format_bytes(half)}, and the SSD tier needs "
            f"{format_bytes(MINIMUM_SSD_BYTES)}: make room there, name another directory, or say how much to take "
            "(--ssd-capacity)"
        )
    return half
