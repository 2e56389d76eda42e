"""Removing objects; where copies are, and having more or fewer of them; more memory for the pool, for a while."""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from p2pstore.errors import P2PStoreError
from p2pstore.integrations.engine_client import pages_of_keys
from p2pstore.integrations.mooncake.base import OwnPeer
from p2pstore.integrations.mooncake.mooncake_types import ErrorCode, ReplicaStatus, TaskStatus, TaskType
from p2pstore.integrations.mooncake.object_calls import FAILURES, INVALID, ObjectCalls, is_key
from p2pstore.integrations.mooncake.setup_settings import name_options
from p2pstore.results import Location

FAILED: Final = int(ErrorCode.INTERNAL_ERROR)
MAX_TASKS: Final = 10_000
NO_TASK: Final = (0, 0)
HIGH_WORD: Final = 64
MAX_SEGMENTS: Final = 64
KNOWN_SECONDS: Final = 10.0


class RemovingCalls(ObjectCalls):
    """Calls that remove. A removed object is gone everywhere, and does not come back with a peer that was away.

    Mooncake grants a lease of seconds with every read and every `is_exist`, and refuses to remove the object meanwhile
    (-706) unless `force` is given. Here reads leave nothing behind: they check what they copied, and a
    `BufferHandle` keeps its bytes even when the object is removed. So nothing is ever refused, and `force` makes no
    difference.
    """

    def remove(self, key: str, force: bool = False) -> int:
        """Remove an object: 0, or -704 for an unknown key."""
        try:
            return 0 if self._live.remove(key) else int(ErrorCode.OBJECT_NOT_FOUND)
        except FAILURES as error:
            return self._read_code(error)

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """`remove` for many; a code for each."""
        try:
            results = self._live.remove_many(keys)
        except FAILURES as error:
            return [self._read_code(error)] * len(keys)
        codes = []
        for each in results:
            if each.error is not None:
                codes.append(self._read_code(each.error))
            else:
                codes.append(0 if each.value else int(ErrorCode.OBJECT_NOT_FOUND))
        return codes

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove the objects in whose keys the pattern (Python's) is found, in this store's namespace. Returns how many
        they were, -600 for what is no pattern, or the code of the failure that left some of them there."""
        try:
            pattern = re.compile(regex_pattern)
        except (re.error, OverflowError, RecursionError) as error:
            return self._code(ValueError(f"{regex_pattern!r} is no pattern: {error}"))
        removed = 0
        try:
            for keys in self._pages():
                codes = self.batch_remove([key for key in keys if pattern.search(key)])
                removed += codes.count(0)
                failures = set(codes) - {0, int(ErrorCode.OBJECT_NOT_FOUND)}
                if failures:  # the log says why
                    return min(failures)
        except FAILURES as error:
            return self._code(error)
        return removed

    def remove_all(self, force: bool = False) -> int:
        """Remove everything in this store's namespace (the tenant), and nothing else. Returns the number of objects."""
        try:
            count = sum(len(keys) for keys in self._pages())
            self._live.flush()
        except FAILURES as error:
            return self._code(error)
        return count

    def _pages(self) -> Iterator[list[str]]:
        """The keys of the namespace, of all peers that answer."""
        for page in pages_of_keys(self._live):
            if page.silent_peers:
                silent = ", ".join(page.silent_peers)
                self._warn(f"keys of peers that did not answer may be left: {silent}")
            yield [each.key for each in page.keys]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where the bytes of a copy are: `transport_endpoint` is the segment's name. There is no address: another peer's
    memory is not this program's, and may move."""

    size: int = 0
    buffer_address: int = 0
    transport_endpoint: str = ""


@dataclass(frozen=True, slots=True)
class MemoryDescriptor:
    """A copy in memory."""

    buffer_descriptor: Descriptor


@dataclass(frozen=True, slots=True)
class DiskDescriptor:
    """A copy on an SSD. The path is its peer's affair, and empty."""

    object_size: int = 0
    file_path: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaDescriptor:
    """One known copy of an object."""

    descriptor: Descriptor
    in_memory: bool
    on_disk: bool
    status: ReplicaStatus = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        """Whether the copy is in its peer's memory."""
        return self.in_memory

    def is_disk_replica(self) -> bool:
        """Whether the copy is in a file system that all share: never."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Whether the copy is on its peer's SSD alone."""
        return self.on_disk and not self.in_memory

    def get_memory_descriptor(self) -> MemoryDescriptor:
        """Where it is in memory. Raises `RuntimeError` when it is not."""
        if not self.in_memory:
            raise RuntimeError("this copy is not in memory")
        return MemoryDescriptor(self.descriptor)

    def get_disk_descriptor(self) -> DiskDescriptor:
        """Where it is on disk. Raises `RuntimeError` when it is in memory."""
        if self.in_memory:
            raise RuntimeError("this copy is in memory")
        return DiskDescriptor(self.descriptor.size)


@dataclass(slots=True)
class QueryTaskResponse:
    """How a copy task fares."""

    id: tuple[int, int] = NO_TASK
    type: TaskType = TaskType.REPLICA_COPY
    status: TaskStatus = TaskStatus.PENDING
    created_at_ms_epoch: int = field(default_factory=lambda: _now_ms())
    last_updated_at_ms_epoch: int = field(default_factory=lambda: _now_ms())
    assigned_client: tuple[int, int] = NO_TASK
    message: str = ""

    def move_on(self, status: TaskStatus, message: str = "") -> None:
        self.message, self.last_updated_at_ms_epoch = message, _now_ms()
        self.status = status


class ReplicaCalls(RemovingCalls):
    """Calls about copies."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: dict[tuple[int, int], QueryTaskResponse] = {}

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """The known copies on living peers; none for an unknown key."""
        try:
            return self._described([key]).get(key, [])
        except FAILURES as error:
            self._read_code(error)
            return []

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """`get_replica_desc` for many; unknown keys are missing."""
        try:
            return self._described(keys)
        except FAILURES as error:
            self._read_code(error)
            return {}

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Remove all copies of these objects, or, with a segment's name, of those that only this segment holds; returns
        the keys of what was removed. A copy that other peers have too stays: each peer decides alone what it keeps, and
        lets go of such copies first when it needs room."""
        if segment_name:
            keys = self._only_in(segment_name, keys)
        codes = self.batch_remove(keys) if keys else []
        return [key for key, code in zip(keys, codes, strict=True) if not code]

    def _only_in(self, name: str, keys: Sequence[str]) -> list[str]:
        """Those of the objects all of whose copies are in one segment."""
        try:
            holder = self._segments_by_name().get(name)
            if holder is None:
                raise ValueError(f"batch_replica_clear: no segment is called {name!r}")
            client, found = self._live, []
            for key in filter(is_key, keys):
                holders = {copy.peer_id for copy in client.locate(key)}
                if holders == {holder}:
                    found.append(key)
                elif holder in holders:
                    self._warn_once(
                        "batch_replica_clear with a segment's name leaves objects that other segments hold too: peers "
                        "let go of such copies by themselves when they need room"
                    )
        except FAILURES as error:
            self._code(error)
            return []
        return found

    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[tuple[int, int], int]:
        """Have as many more copies of an object as there are targets; returns a number for `query_task`, and 0; or -704
        for an unknown key, -600 when a target is no segment or none is named, -1401 when too much is under way.

        On which peers the copies are the object's key decides, so that all peers agree without asking: the names of
        the targets only say how many.
        """
        try:
            here = len(self._described([key]).get(key, []))
            if not here:
                return NO_TASK, int(ErrorCode.OBJECT_NOT_FOUND)
            known = self._segments_by_name().keys()
        except FAILURES as error:
            return NO_TASK, self._read_code(error)
        if not targets or not known >= set(targets):
            return NO_TASK, INVALID
        self._warn_once(
            "create_copy_task: the targets say only how many copies are made; where, the object's key decides"
        )
        if len(self._tasks) >= MAX_TASKS and not self._forget_ended():
            return NO_TASK, int(ErrorCode.TASK_PENDING_LIMIT_EXCEEDED)
        task = QueryTaskResponse(_new_number())
        self._tasks[task.id] = task
        threading.Thread(target=self._copy, args=(task, key, here + len(targets)), daemon=True).start()
        return task.id, 0

    def create_move_task(self, key: str, source: str, target: str) -> tuple[tuple[int, int], int]:
        """-704 for an unknown key, else -600: each peer decides alone what it keeps, so objects are not moved by
        command. Peers that leave hand over what they alone hold by themselves."""
        try:
            found = self._described([key])
        except FAILURES as error:
            return NO_TASK, self._read_code(error)
        return NO_TASK, INVALID if found else int(ErrorCode.OBJECT_NOT_FOUND)

    def query_task(self, task_id: tuple[int, int]) -> tuple[QueryTaskResponse | None, int]:
        """How a task of this store fares, and 0; or None and -1400."""
        try:
            high, low = task_id
        except ValueError:
            raise TypeError(f"a task's id is a pair of numbers, not {task_id!r}") from None
        task = self._tasks.get((high, low))
        return (None, int(ErrorCode.TASK_NOT_FOUND)) if task is None else (task, 0)

    def get_offload_rpc_read_count(self) -> int:
        """0: peers read their SSDs themselves."""
        return 0

    # -----------------------------------------------------------------------------------------

    def _described(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """The copies of those that have any. Raises what the client raises."""
        client = self._live
        names: dict[str, str] = {}
        described = {}
        for key in dict.fromkeys(filter(is_key, keys)):
            copies = [copy for copy in client.locate(key) if copy.reachable]
            if not copies:
                continue
            if not {copy.peer_id for copy in copies} <= names.keys():
                names = {peer.peer_id: self._segment_name(peer) for peer in client.peers()}
            size = self.get_size(key)
            described[key] = [_described(copy, names, size) for copy in copies]
        return described

    def _copy(self, task: QueryTaskResponse, key: str, copies: int) -> None:
        task.move_on(TaskStatus.PROCESSING)
        try:
            result = self._live.replicate(key, copies)
        except Exception as error:
            task.move_on(TaskStatus.FAILED, str(error))
            return
        if result.copies < copies:
            text = f"{result.copies} copies of {copies}: there are no more peers with room"
            task.move_on(TaskStatus.FAILED, text)
        else:
            task.move_on(TaskStatus.SUCCESS)

    def _forget_ended(self) -> bool:
        """Forget tasks that have ended. Whether there were any."""
        ended = [
            number
            for number, task in list(self._tasks.items())
            if task.status in (TaskStatus.SUCCESS, TaskStatus.FAILED)
        ]
        for number in ended:
            del self._tasks[number]
        return bool(ended)


def _described(copy: Location, names: dict[str, str], size: int) -> ReplicaDescriptor:
    descriptor = Descriptor(max(size, 0), 0, names.get(copy.peer_id, copy.peer))
    return ReplicaDescriptor(descriptor, copy.tier in ("dram", "both"), copy.tier != "dram")


def _new_number() -> tuple[int, int]:
    number = uuid.uuid4().int
    return number >> HIGH_WORD, number & (1 << HIGH_WORD) - 1


def _now_ms() -> int:
    return int(time.time() * 1000)


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
            self._warn(f"mount_segment: {path!r} must be a path where no file is, with offset 0")
            return {"ret": FAILED, "segment_ids": []}
        self._warn_unused("mount_segment", protocol, location)
        return self._mount(size, "--memory-path", path)

    def allocate_and_mount_segment(
        self, size: int, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Give the pool `size` bytes more: `{"ret", "segment_ids", "allocated_size"}`."""
        self._warn_unused("allocate_and_mount_segment", protocol, location)
        mounted = self._mount(size)
        return mounted | {"allocated_size": 0 if mounted["ret"] else size}

    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Take segments back; peers first hand over what they alone hold. 0, or -1 for an id of no segment here."""
        return self._unmount(segment_ids, grace_period_seconds)

    def unmount_and_free_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """`unmount_segment`."""
        return self._unmount(segment_ids, grace_period_seconds)

    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """0, and nothing happens: an SSD is its peer's for its life."""
        self._warn_once("unmount_local_disk_segment: an SSD is its peer's for its life, and stays")
        return 0

    def _warn_unused(self, call: str, protocol: str, location: str) -> None:
        if protocol not in ("", "tcp") or location:
            self._warn_once(
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
            self._warn(f"no segment of {size} bytes: {error}")
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
            self._warn_once(
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
