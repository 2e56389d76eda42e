"""Batches of transfers: submitted at once, they run side by side; each is awaited, polled or cancelled by its number.

Written once for all drivers: a few helpers (tasks, or threads) take one transfer after the other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from p2pstore.arguments import conflict_policy, seconds, whole_number
from p2pstore.client.answers import plain_error
from p2pstore.client.device_memory import on_device
from p2pstore.client.object_store import ObjectStore
from p2pstore.errors import P2PStoreError, TransferCancelled
from p2pstore.objects import MIB, encode_key
from p2pstore.results import ItemResult, PutResult, TransferRequest, TransferState, TransferStatus
from p2pstore.runtime.streams import Driver, Event, HelperTask, StartHelper
from p2pstore.values import destination_view, source_view

MAX_TRANSFERS: Final = 65_536
"""Of one batch that have not ended."""
MAX_LIMIT: Final = 256
WATCHED_BYTES: Final = 4 * MIB
"""Least length of transfers that report progress. For smaller ones that costs too much."""
RECHECK_SECONDS: Final = 60.0

_ENDED: Final = frozenset({"done", "failed", "cancelled"})


@dataclass(eq=False)
class _Transfer:
    key: str
    request: TransferRequest | None
    """Until it has ended: its buffer is the caller's again then."""
    length_bytes: int
    state: TransferState = "waiting"
    moved_bytes: int = 0
    value: int | PutResult | None = None
    error: P2PStoreError | ValueError | None = None
    to_be_cancelled: bool = False
    task: HelperTask | None = None
    waiters: list[Event] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Note the progress. Raises `TransferCancelled` after `cancel`."""
        self.moved_bytes = done_bytes
        if self.to_be_cancelled:
            raise TransferCancelled("the transfer was cancelled before its end")

    def result(self) -> ItemResult[int | PutResult]:
        return ItemResult(self.key, self.value, self.error)


class TransferBatch:
    """Transfers of one client; made by its `transfers()`. For the tasks of one event loop, or for any threads.

    A transfer is `waiting` until one of the `limit` places is free, then `running`, and ends as `done`, `failed` or
    `cancelled`. Only then does nothing write to its buffer, or read from it, any more. A batch remembers how each of
    its transfers ended: make one for each piece of work.
    """

    def __init__(
        self, store: ObjectStore, driver: Driver, start: StartHelper, limit: int, *, in_threads: bool
    ) -> None:
        self._store = store
        self._driver = driver
        self._start = start
        self._limit = whole_number("limit", limit)
        if not 1 <= self._limit <= MAX_LIMIT:
            raise ValueError(f"limit is {limit}: 1 to {MAX_LIMIT} transfers may run at once")
        self._in_threads = in_threads
        self._lock = threading.Lock()  # held for microseconds, never awaited in
        self._transfers: list[_Transfer] = []
        self._waiting: deque[_Transfer] = deque()
        self._workers = 0
        self._unended = 0
        self._closed = False

    # --- for callers -------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many were submitted."""
        return len(self._transfers)

    def submit(self, requests: Iterable[TransferRequest]) -> list[int]:
        """Have these done, and return at once: their numbers, by which they are asked for.

        Raises `TypeError` or `ValueError` for a request that cannot be, and `ValueError` beyond 65,536 that have not
        ended; then none of them is begun. `RuntimeError` after the end of the block.
        """
        made = [_checked(request) for request in requests]
        with self._lock:
            if self._closed:
                raise RuntimeError("the batch has ended: submit inside of its block")
            if self._unended + len(made) > MAX_TRANSFERS:
                raise ValueError(
                    f"{self._unended:,} transfers have not ended: at most {MAX_TRANSFERS:,} may wait"
                )
            first = len(self._transfers)
            self._transfers += made
            self._waiting += made
            self._unended += len(made)
        self._fill()
        return list(range(first, first + len(made)))

    def status(self, number: int) -> TransferStatus:
        """How one transfer fares, without waiting. Raises `IndexError` for a number that was not submitted."""
        with self._lock:
            return _status(self._at(number))

    def statuses(self) -> list[TransferStatus]:
        """How all transfers fare, without waiting, in the order of submission."""
        with self._lock:
            return [_status(each) for each in self._transfers]

    async def wait(self, number: int) -> ItemResult[int | PutResult]:
        """Wait for the end of one transfer. Never raises for its failure: the result carries the error, which is
        `TransferCancelled` for one that was cancelled. `value` is the length for a get, a `PutResult` for a put.
        Raises `IndexError` for a number that was not submitted."""
        while True:
            with self._lock:
                transfer = self._at(number)
                if transfer.ended:
                    return transfer.result()
                event = self._driver.event()
                transfer.waiters.append(event)
            try:
                await event.wait(RECHECK_SECONDS)
            finally:
                with self._lock:
                    if event in transfer.waiters:
                        transfer.waiters.remove(event)

    async def results(self) -> list[ItemResult[int | PutResult]]:
        """Wait for the end of all that were submitted by now; one result each, in the order of submission."""
        return [await self.wait(number) for number in range(len(self._transfers))]

    def cancel(self, *numbers: int) -> None:
        """Cancel these transfers, or all when none is named; those that ended stay as they are. Returns at once: one
        that runs ends soon (in threads when its next MiB has come; a small one, and a put that waits for its
        replicas, runs to its end). Raises `IndexError` for a number that was not submitted."""
        with self._lock:
            chosen = [self._at(number) for number in numbers] if numbers else self._transfers
            running = []
            for transfer in chosen:
                if transfer.state == "waiting":
                    self._settle(transfer, "cancelled")
                elif transfer.state == "running" and not transfer.to_be_cancelled:
                    transfer.to_be_cancelled = True
                    running.append(transfer)
        if not self._in_threads:
            for transfer in running:
                assert transfer.task is not None
                transfer.task.cancel()

    # --- the life of the block ---------------------------------------------------------------

    async def finish(self) -> None:
        """The block ended well: wait for all."""
        await self.results()

    def close(self) -> None:
        """The block ended: nothing more is begun, and what runs is cancelled."""
        with self._lock:
            self._closed = True
        self.cancel()

    # --- workers -----------------------------------------------------------------------------

    def _at(self, number: int) -> _Transfer:
        if not 0 <= number < len(self._transfers):
            raise IndexError(f"there is no transfer {number}: {len(self._transfers)} were submitted")
        return self._transfers[number]

    def _fill(self) -> None:
        """Have workers for what waits, up to the limit."""
        while True:
            with self._lock:
                wanted = min(self._limit, self._workers + len(self._waiting))
                if self._closed or self._workers >= wanted:
                    return
                self._workers += 1
            try:
                self._start(self._work)
            except BaseException:
                with self._lock:
                    self._workers -= 1
                raise

    async def _work(self, task: HelperTask) -> None:
        """Take one transfer after the other. One that is cancelled takes its task along; another one follows."""
        try:
            while (transfer := self._take(task)) is not None:
                await self._run(transfer)
                # The next one must not be cancelled, even if this one ended before it noticed.
                if transfer.to_be_cancelled:
                    return
        finally:
            with self._lock:
                self._workers -= 1
            self._fill()

    def _take(self, task: HelperTask) -> _Transfer | None:
        with self._lock:
            while self._waiting:
                transfer = self._waiting.popleft()
                if not transfer.ended:  # it may have been cancelled while it waited
                    transfer.state, transfer.task = "running", task
                    return transfer
            return None

    async def _run(self, transfer: _Transfer) -> None:
        value: int | PutResult | None = None
        error: BaseException | None = None
        try:
            value = await self._move(transfer)
        except BaseException as problem:
            error = problem
            if not isinstance(problem, (P2PStoreError, ValueError)):
                raise
        finally:
            with self._lock:
                if error is None:
                    transfer.value, transfer.moved_bytes = value, transfer.length_bytes
                    if isinstance(value, int):
                        transfer.moved_bytes = value
                    self._settle(transfer, "done")
                elif isinstance(error, (P2PStoreError, ValueError)) and not isinstance(
                    error, TransferCancelled
                ):
                    transfer.error = plain_error(error)
                    self._settle(transfer, "failed")
                else:
                    self._settle(transfer, "cancelled")

    async def _move(self, transfer: _Transfer) -> int | PutResult:
        request = transfer.request
        assert request is not None
        progress = transfer.progress if transfer.length_bytes >= WATCHED_BYTES else None
        if request.operation == "get":
            return await self._store.get_into(
                request.key, request.buffer, wait=request.wait, progress=progress
            )
        return await self._store.put(
            request.key,
            request.buffer,
            replicas=request.replicas,
            on_conflict=conflict_policy(request.overwrite, request.on_conflict),
            progress=progress,
        )

    def _settle(self, transfer: _Transfer, state: TransferState) -> None:
        """It has ended. The caller holds the lock."""
        transfer.state, transfer.task, transfer.request = state, None, None
        if state == "cancelled":
            transfer.error = TransferCancelled("the transfer was cancelled before its end")
        self._unended -= 1
        waiters, transfer.waiters = transfer.waiters, []
        for event in waiters:
            event.set()


def _checked(request: Any) -> _Transfer:
    if not isinstance(request, TransferRequest):
        raise TypeError(f"a batch is of TransferRequests, not of {type(request).__name__}")
    encode_key(request.key)
    if request.operation not in ("get", "put"):
        raise ValueError(f"operation is {request.operation!r}: it is 'get' or 'put'")
    _check_options(request)
    device = on_device(request.buffer)
    if device is not None:  # with the stream that is current here, not in the helper
        return _Transfer(request.key, replace(request, buffer=device), device.nbytes)
    view_of = destination_view if request.operation == "get" else source_view
    return _Transfer(request.key, request, view_of(request.buffer).nbytes)


def _check_options(request: TransferRequest) -> None:
    wait, replicas = seconds("wait", request.wait), whole_number("replicas", request.replicas)
    policy = conflict_policy(request.overwrite, request.on_conflict)
    if request.operation == "put" and wait:
        raise ValueError("wait is for gets: a put does not wait for its key")
    if request.operation == "get" and (replicas != 1 or policy != "keep"):
        raise ValueError("replicas, overwrite and on_conflict are for puts, not for gets")


def _status(transfer: _Transfer) -> TransferStatus:
    return TransferStatus(transfer.key, transfer.state, transfer.moved_bytes, transfer.error)
