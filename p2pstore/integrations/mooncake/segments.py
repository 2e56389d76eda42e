"""More memory for the pool, for a while: one more peer each time."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

from p2pstore.errors import P2PStoreError
from p2pstore.integrations.mooncake.mooncake_types import ErrorCode
from p2pstore.integrations.mooncake.object_calls import ObjectCalls
from p2pstore.integrations.mooncake.own_peer import OwnPeer
from p2pstore.integrations.mooncake.setup_settings import name_options

FAILED: Final = int(ErrorCode.INTERNAL_ERROR)
MAX_SEGMENTS: Final = 64
KNOWN_SECONDS: Final = 10.0


class SegmentCalls(ObjectCalls):
    """Calls that give the pool memory and take it back. A peer's memory has one size for its life, so a segment is a
    peer of its own, in a process of its own, in the cluster of the store's peer."""

    def __init__(self) -> None:
        super().__init__()
        self._segments: dict[str, OwnPeer] = {}

    def close(self) -> int:
        """Take all segments back with the store."""
        code = super().close()
        with self._lock:
            peers = list(self._segments.values())
            self._segments.clear()
        for peer in peers:
            peer.close()
        return code

    def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Give the pool `size` bytes in a file, on tmpfs, hugetlbfs or a DAX file system: `{"ret", "segment_ids"}`,
        where `ret` is 0 or -1. The file is made, and removed when the segment is unmounted: one that exists is left
        alone, and refused, as a peer's memory is a file of its own."""
        if offset or not path or os.path.exists(path):
            self._say(f"mount_segment: {path!r} must be a path where no file is, with offset 0")
            return {"ret": FAILED, "segment_ids": []}
        self._say_unused("mount_segment", protocol, location)
        return self._mount(size, "--memory-path", path)

    def allocate_and_mount_segment(
        self, size: int, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Give the pool `size` bytes more: `{"ret", "segment_ids", "allocated_size"}`."""
        self._say_unused("allocate_and_mount_segment", protocol, location)
        mounted = self._mount(size)
        return mounted | {"allocated_size": 0 if mounted["ret"] else size}

    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Take segments back: their peers first hand over what they alone hold, where others have room. 0, or -1 for an
        id that is not one of this store's."""
        return self._unmount(segment_ids, grace_period_seconds)

    def unmount_and_free_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """`unmount_segment`."""
        return self._unmount(segment_ids, grace_period_seconds)

    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """0, and nothing happens: an SSD is its peer's for its life."""
        self._say_once("unmount_local_disk_segment: an SSD is its peer's for its life, and stays")
        return 0

    def _say_unused(self, call: str, protocol: str, location: str) -> None:
        if protocol not in ("", "tcp") or location:
            self._say_once(
                f"{call}: protocol and location change nothing: a segment is a peer of its own, which is reached as "
                "all peers are and takes its memory where the kernel gives it"
            )

    def _mount(self, size: int, *options: str) -> dict[str, Any]:
        failed: dict[str, Any] = {"ret": FAILED, "segment_ids": []}
        if size <= 0 or len(self._segments) >= MAX_SEGMENTS:
            return failed
        try:
            (here,) = (peer for peer in self._live.peers() if peer.me)
            bootstrap = [part for address in here.control for part in ("--bootstrap", address)]
            listen = ["--listen", f"{here.control[0].rpartition(':')[0]}:0"]
            named = name_options(self._settings, os.environ) if self._settings is not None else []
            peer = OwnPeer(["--memory", str(size), *listen, *bootstrap, *named, *options])
            try:
                self._await_peer(peer)
            except BaseException:
                peer.close()
                raise
        except (P2PStoreError, ValueError, OSError) as error:
            self._say(f"no segment of {size} bytes: {error}")
            return failed
        number = str(uuid.uuid4())
        with self._lock:
            is_open = not self._closed
            if is_open:
                self._segments[number] = peer
        if not is_open:
            peer.close()
            return failed
        return {"ret": 0, "segment_ids": [number]}

    def _await_peer(self, peer: OwnPeer) -> None:
        """Until the store's peer knows of it, it is of no use to the store. Raises `P2PStoreError` when that takes too
        long, and what the client raises."""
        if not peer.ready["joined"]:
            raise P2PStoreError("it was not let into the cluster: set its key in the environment")
        deadline = time.monotonic() + KNOWN_SECONDS
        while all(each.peer_id != peer.ready["peer_id"] for each in self._live.peers()):
            if time.monotonic() > deadline:
                raise P2PStoreError(f"its peer was not heard of within {KNOWN_SECONDS:g} s")
            time.sleep(0.01)

    def _unmount(self, segment_ids: Sequence[str], grace_period_seconds: int) -> int:
        if grace_period_seconds:
            self._say_once(
                "grace_period_seconds changes nothing: a segment hands over what it alone holds, for 5 s at most"
            )
        for each in segment_ids:
            try:
                uuid.UUID(each)
            except ValueError:
                return FAILED
            except AttributeError:
                raise TypeError(f"a segment's id is a str, not {each!r}") from None
        with self._lock:
            peers = [self._segments.pop(each, None) for each in segment_ids]
        for peer in peers:
            if peer is not None:
                peer.close()
        return FAILED if None in peers else 0
