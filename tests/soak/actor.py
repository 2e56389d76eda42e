"""A client process of one peer: does what `plan_load` says, compares every byte, and writes down what it did and saw.

`python -m tests.soak.actor PARENT SETTINGS`: works until SIGTERM. A line is written before each operation and one after
it, so a reader of the lines knows of every value that may be stored, also when this process is killed.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np

from mooncake_p2p.tied import die_with_parent
from p2pstore import blocking
from p2pstore.blocking import BlockingClient
from p2pstore.errors import NoLocalPeer, NoSuchKey, P2PStoreError, StoreClosed
from p2pstore.results import ItemResult, PinName, PutResult, TransferRequest
from tests.soak.checkpoints import follow, publish
from tests.soak.plan import KEPT_AT_ONCE, Family, Operation, OperationKind, plan_load
from tests.soak.values import LONGEST_BYTES, key_name, namespace_of, number_in, number_of, value_of

CLIENT_SECONDS: Final = 15.0
"""Without progress, until an operation gives up."""
AWAY_SECONDS: Final = 0.2
VIEWS_AT_ONCE: Final = 3
OFTEN: Final = 1 << 31
TTL_SECONDS: Final = 8.0
EPOCH_KEYS: Final = 10_000
MAX_SAID: Final = 4
PINS: Final[tuple[PinName, ...]] = ("none", "none", "none", "soft")

Target = tuple[int, Family, int]


@dataclass(frozen=True)
class Settings:
    """The settings of an actor, given as JSON."""

    seed: int
    number: int
    epoch: int
    writers: int
    rate: float
    socket: str
    events: str
    kept: str
    """A directory in which each writer has a file with the names of what it keeps."""
    ssd: bool
    follows: str
    """The directory in which it follows the checkpoint, or nothing."""
    publishes: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Notes:
    """The outcome of an operation, key by key: (key, outcome, ...), and the errors that it met."""

    results: list[tuple[Any, ...]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """The texts of the first errors."""
    unclear: str = ""

    def fail(self, key: str, error: BaseException) -> None:
        """A read ended with this error."""
        if isinstance(error, NoSuchKey):
            self.results.append((key, "missing"))
        elif isinstance(error, (P2PStoreError, ValueError)):
            self.results.append((key, "failed", type(error).__name__))
            self.note(error)
        else:
            raise error

    def note(self, error: BaseException) -> None:
        """An error that is not about what a read found."""
        if not isinstance(error, NoSuchKey):
            self.errors.append(type(error).__name__)
            if len(self.said) < MAX_SAID:
                self.said.append(str(error)[:400])


class Journal:
    """The file of events. Whole lines, written at once, by any thread."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._lock = threading.Lock()
        self._next = 0

    def write(self, **event: object) -> None:
        os.write(self._descriptor, json.dumps(event).encode() + b"\n")

    @contextmanager
    def operation(self, what: str, keys: dict[str, int] | None = None) -> Iterator[Notes]:
        """Note an operation: before it, with the numbers that it puts, and after it. Errors of the package end here,
        but those that say that the peer is gone."""
        with self._lock:
            self._next += 1
            identity = self._next
        notes = Notes()
        self.write(at=time.monotonic(), begin=identity, do=what, keys=keys or {})
        gone = None
        try:
            yield notes
        except (NoLocalPeer, StoreClosed) as error:
            notes.note(error)
            gone = error
        except P2PStoreError as error:
            notes.note(error)
        except Exception as error:
            traceback.print_exc()
            notes.unclear = repr(error)
        self.write(
            at=time.monotonic(),
            end=identity,
            results=notes.results,
            errors=notes.errors,
            said=notes.said,
            unclear=notes.unclear,
        )
        if gone is not None:
            raise gone


class Actor:
    """One client, with views that it holds for a while."""

    def __init__(self, settings: Settings, journal: Journal) -> None:
        self.settings = settings
        self.journal = journal
        self.ending = threading.Event()
        """For threads beside this one."""
        self.told_to_end = False
        """By a signal, whose handler must not touch locks that this thread may have."""
        self._count = 0
        self._clients: dict[str, BlockingClient] = {}
        self._views: deque[tuple[str, int, memoryview]] = deque()
        self._buffers = [memoryview(bytearray(LONGEST_BYTES)) for _ in range(6)]
        self._kept: dict[Family, list[str]] = {"kept": [], "durable": []}
        self._kept_count = 0

    def run(self) -> None:
        """Until told to end."""
        settings = self.settings
        self._kept |= self._kept_of(settings.number)
        plan = plan_load(settings.seed, settings.number, settings.epoch, settings.writers, settings.rate)
        for operation in plan:
            time.sleep(operation.pause_seconds)
            if self.told_to_end:
                break
            try:
                self._do(operation)
            except (NoLocalPeer, StoreClosed):
                self._hang_up()
                time.sleep(AWAY_SECONDS)
        self.ending.set()
        self._hang_up()

    # --- clients ---------------------------------------------------------------------------------

    def _client(self, target: Target) -> BlockingClient:
        namespace = namespace_of(target[0], target[1])
        if namespace not in self._clients:
            with self.journal.operation("connect"):
                self._clients[namespace] = blocking.connect(
                    self.settings.socket, namespace=namespace, timeout=CLIENT_SECONDS
                )
        if namespace not in self._clients:
            raise NoLocalPeer("it did not answer in time")
        return self._clients[namespace]

    def _hang_up(self) -> None:
        while self._views:
            self._release()  # before their leases end
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    # --- operations ------------------------------------------------------------------------------

    def _do(self, operation: Operation) -> None:
        targets = [self._existing(target) for target in operation.keys]
        named = [(target, key) for target, key in targets if key]
        if not named or (operation.kind == "new durable" and not self.settings.ssd):
            return
        client = self._client(named[0][0])
        keys = [key for _, key in named]
        family = named[0][0][1]
        kind, choice = operation.kind, operation.choice
        writing: dict[OperationKind, Callable[[], None]] = {
            "put": lambda: self._put(client, keys[:1], family, choice),
            "overwrite": lambda: self._put(client, keys[:1], family, choice, overwrite=True),
            "put_many": lambda: self._put(client, keys, family, choice, overwrite=choice < OFTEN),
            "remove": lambda: self._remove(client, keys[:1]),
            "remove_many": lambda: self._remove(client, keys),
            "flush": lambda: self._flush(client),
            "new kept": lambda: self._keep(client, "kept", choice),
            "new durable": lambda: self._keep(client, "durable", choice),
        }
        if kind in writing:
            writing[kind]()
        elif kind == "view":
            self._view(client, keys[0])
        else:
            with self.journal.operation(kind) as notes:
                self._read(client, kind, keys, family, choice, notes)

    def _existing(self, target: Target) -> tuple[Target, str]:
        """The key that is meant; of what is kept, one that is there, or nothing."""
        writer, family, number = target
        if family not in ("kept", "durable"):
            return target, key_name(writer, family, number)
        names = self._kept_of(writer).get(family, [])
        if writer == self.settings.number and number == 0:
            return target, "a new one"
        return target, names[number % len(names)] if names else ""

    def _number(self) -> int:
        self._count += 1
        return number_of(self.settings.epoch, self._count)

    def _put(
        self,
        client: BlockingClient,
        keys: list[str],
        family: Family,
        choice: int,
        overwrite: bool = False,
    ) -> None:
        numbers = {key: self._number() for key in keys}
        values = [(key, value_of(key, number)) for key, number in numbers.items()]
        replicas = (1, 1, 2, 3)[choice & 3]
        pin = PINS[choice >> 2 & 3]
        ttl = TTL_SECONDS if not choice >> 4 & 7 else None
        what = "overwrite" if overwrite else "put"
        with self.journal.operation(what, numbers) as notes:
            results: list[ItemResult[PutResult]]
            if len(values) > 1:
                results = client.put_many(
                    values, replicas=replicas, pin=pin, ttl=ttl, overwrite=overwrite
                )
            else:
                ((key, value),) = values
                result = (
                    client.put_tensor(
                        key,
                        np.frombuffer(value, np.uint8),
                        replicas=replicas,
                        overwrite=overwrite,
                        ttl=ttl,
                    )
                    if family == "tensor"
                    else client.put(key, value, replicas=replicas, pin=pin, ttl=ttl, overwrite=overwrite)
                )
                results = [ItemResult(key, result)]
            expires = None if ttl is None else time.monotonic() + ttl
            for key, done, error in results:
                if done is not None:
                    notes.results.append((key, done.status, numbers[key], expires))
                elif error is not None:
                    notes.note(error)

    def _remove(self, client: BlockingClient, keys: list[str]) -> None:
        with self.journal.operation("remove", dict.fromkeys(keys, 0)) as notes:
            if len(keys) == 1:
                client.remove(keys[0])
                notes.results.append((keys[0], "removed"))
                return
            for key, _, error in client.remove_many(keys):
                if error is None:
                    notes.results.append((key, "removed"))
                else:
                    notes.note(error)

    def _flush(self, client: BlockingClient) -> None:
        with self.journal.operation("flush") as notes:
            client.flush()
            notes.results.append(("", "flushed"))

    # --- what is kept ----------------------------------------------------------------------------

    def _keep(self, client: BlockingClient, family: Family, choice: int) -> None:
        """One more that is pinned hard; of too many, the oldest goes."""
        self._kept_count += 1
        name = self.settings.epoch * EPOCH_KEYS + self._kept_count
        key, number = key_name(self.settings.number, family, name), self._number()
        with self.journal.operation(family, {key: number}) as notes:
            replicas = 1 + choice % 3
            done = client.put(
                key, value_of(key, number), replicas=replicas, pin="hard", durable=family == "durable"
            )
            # Where the own peer has no room, another one takes it.
            here = done.location == f"peer{self.settings.number}"
            notes.results.append((key, done.status, number, None, replicas, here))
            self._kept[family].append(key)
            self._publish_kept()
        if len(self._kept[family]) > KEPT_AT_ONCE:
            oldest = self._kept[family].pop(0)
            self._publish_kept()
            self._remove(client, [oldest])

    def _publish_kept(self) -> None:
        path = Path(self.settings.kept, str(self.settings.number))
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(self._kept))
        fresh.replace(path)

    def _kept_of(self, writer: int) -> dict[Family, list[str]]:
        try:
            kept: dict[Family, list[str]] = json.loads(Path(self.settings.kept, str(writer)).read_text())
        except FileNotFoundError:
            return {}
        return kept

    # --- reading ---------------------------------------------------------------------------------

    def _read(
        self,
        client: BlockingClient,
        kind: str,
        keys: list[str],
        family: Family,
        choice: int,
        notes: Notes,
    ) -> None:
        match kind:
            case "get" if family == "tensor":
                self._one(notes, keys[0], lambda key: _tensor_bytes(client.get_tensor(key)))
            case "get":
                wait = 0.5 if choice & 15 == 0 else 0.0
                self._one(notes, keys[0], lambda key: memoryview(client.get(key, wait=wait)))
            case "get_into":
                buffer = self._buffers[0]
                self._one(notes, keys[0], lambda key: buffer[: client.get_into(key, buffer)])
            case "get_many" if choice % 3 == 0:
                self._many(notes, client.get_many_into(list(zip(keys, self._buffers, strict=True))))
            case "get_many":
                results: list[ItemResult[Any]]
                results = client.get_many(keys) if choice % 3 == 1 else client.take_leases(keys)
                for result in results:
                    if result.error is not None:
                        notes.fail(result.key, result.error)
                    else:
                        self._compare(notes, result.key, memoryview(result.unwrap()))
            case "transfers":
                requests = [
                    TransferRequest(key, buffer) for key, buffer in zip(keys, self._buffers, strict=True)
                ]
                with client.transfers(requests, limit=4) as batch:
                    self._many(notes, batch.results())
            case "prefetch":
                client.prefetch(keys)
            case "contains":
                client.contains_many(keys)
            case "match_prefix":
                client.match_prefix(keys)
            case "locate":
                client.locate(keys[0])
            case "list":
                client.list_keys(limit=20)
            case "pin":
                client.pin(keys[0], "soft", ttl=TTL_SECONDS)
            case "replicate":
                client.replicate(keys[0], 2)
            case _:
                raise ValueError(f"there is no operation {kind!r}")

    def _one(self, notes: Notes, key: str, read: Callable[[str], memoryview]) -> None:
        try:
            value = read(key)
        except (P2PStoreError, ValueError) as error:
            notes.fail(key, error)
            if isinstance(error, (NoLocalPeer, StoreClosed)):
                raise
        else:
            self._compare(notes, key, value)

    def _many(self, notes: Notes, results: list[ItemResult[Any]]) -> None:
        for (key, length, error), buffer in zip(results, self._buffers, strict=True):
            if error is not None:
                notes.fail(key, error)
            else:
                self._compare(notes, key, buffer[:length])

    def _compare(self, notes: Notes, key: str, value: memoryview) -> int | None:
        number = number_in(key, value)
        if number is None:
            notes.results.append((key, "wrong", f"{len(value):,} bytes, {bytes(value[:16]).hex()}..."))
        else:
            notes.results.append((key, "value", number))
        return number

    def _view(self, client: BlockingClient, key: str) -> None:
        """Look at a value in place, and again when others came."""
        with self.journal.operation("view") as notes:
            try:
                view = client.take_lease(key)
            except (P2PStoreError, ValueError) as error:
                notes.fail(key, error)
                if isinstance(error, (NoLocalPeer, StoreClosed)):
                    raise
                return
            number = self._compare(notes, key, view)
            if number is not None:
                self._views.append((key, number, view))
        if len(self._views) > VIEWS_AT_ONCE:
            self._release()

    def _release(self) -> None:
        key, number, view = self._views.popleft()
        with self.journal.operation("view, later") as notes:
            if number_in(key, view) != number:
                notes.results.append((key, "wrong", f"a view of number {number:#x} changed"))


def _tensor_bytes(tensor: Any) -> memoryview:
    if tensor.dtype != np.uint8 or tensor.ndim != 1:
        return memoryview(b"not what was put")
    return memoryview(tensor)


def main() -> None:
    parent, settings_text = sys.argv[1:]
    die_with_parent(int(parent))
    faulthandler.register(signal.SIGUSR1)  # prints the stack of a process that hangs
    settings = Settings(**json.loads(settings_text))
    journal = Journal(settings.events)
    actor = Actor(settings, journal)

    def end(number: int, frame: FrameType | None) -> None:
        actor.told_to_end = True

    signal.signal(signal.SIGTERM, end)
    threads = []
    if settings.publishes:
        threads.append(threading.Thread(target=publish, args=(settings, journal, actor.ending)))
    if settings.follows:
        threads.append(threading.Thread(target=follow, args=(settings, journal, actor.ending)))
    for thread in threads:
        thread.daemon = True
        thread.start()
    actor.run()


if __name__ == "__main__":
    main()
