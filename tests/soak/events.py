"""From the lines that clients write to what the ledger is told, and to counts and latencies. Reads files; else pure."""

import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.ledger import Ledger
from tests.soak.timeline import Timeline

_PUTS = ("put", "overwrite", "kept", "durable")


@dataclass
class Client:
    """One life of a client: the file that it writes, and what it has begun."""

    number: int
    path: Path
    read_bytes: int = 0
    open: dict[int, dict[str, Any]] = field(default_factory=dict)
    gone: bool = False


@dataclass
class Traffic:
    """Counts and latencies of clients' operations, for the report. Latencies are (when, seconds), by operation."""

    operations: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    latencies: defaultdict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )


class Events:
    """All clients' files, read as they grow, and told to the ledger in the order of their times."""

    def __init__(self, ledger: Ledger, timeline: Timeline) -> None:
        self.traffic = Traffic()
        self.clients: list[Client] = []
        self.last_update_at = -math.inf
        """When the update of the checkpoint began that was acknowledged last, and to which version."""
        self.last_version = 0
        self._ledger = ledger
        self._timeline = timeline
        self._waiting: list[tuple[float, int, Client, dict[str, Any]]] = []
        self._lines = 0
        self._flushed: dict[int, set[str]] = defaultdict(set)

    def add(self, number: int, path: Path) -> Client:
        """One more life of client `number`."""
        path.touch()
        self.clients.append(Client(number, path))
        return self.clients[-1]

    def take(self, now: float) -> None:
        """Tell the ledger of all events before `now`. A value's put is written down before any client can read it, so
        the puts of all values read before now are known."""
        for client in self.clients:
            self._read(client)
        self._waiting.sort(key=lambda each: each[:2])
        count = sum(1 for each in self._waiting if each[0] <= now)
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        for at, _, client, event in ready:
            if "begin" in event:
                self._begin(client, event, at)
            else:
                self._end(client, event, at)

    def look_for_hangs(self, now: float) -> list[Client]:
        """Clients with an operation that is over its limit; each is told of once."""
        hanging = []
        for client in self.clients:
            if client.gone:
                continue
            late = [
                identity
                for identity, event in client.open.items()
                if self._ledger.hangs(client.number, event["do"], event["at"], now)
            ]
            for identity in late:
                del client.open[identity]
            if late:
                hanging.append(client)
        return hanging

    def _read(self, client: Client) -> None:
        with client.path.open("rb") as file:
            file.seek(client.read_bytes)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        client.read_bytes += len(whole)
        for line in whole.splitlines():
            event = json.loads(line)
            self._lines += 1
            self._waiting.append((event["at"], self._lines, client, event))

    def _begin(self, client: Client, event: dict[str, Any], at: float) -> None:
        client.open[event["begin"]] = event
        if event["do"] in _PUTS:
            for key, number in event["keys"].items():
                self._ledger.issued(client.number, key, number, at)
                if key.startswith("flush "):
                    self._flushed[client.number].add(key)
        elif event["do"] == "remove":
            self._ledger.removal_begins(event["keys"], at)

    def _end(self, client: Client, event: dict[str, Any], at: float) -> None:
        begun = client.open.pop(event["end"], None)
        if begun is None:
            return  # it was told of as hanging
        what, since = begun["do"], begun["at"]
        self.traffic.operations[what] += 1
        self.traffic.errors.update(event["errors"])
        self.traffic.latencies[what].append((since, at - since))
        self._ledger.ended(
            *(client.number, what, event["errors"], since, at),
            unclear=event["unclear"],
            said=event["said"],
        )
        for key, outcome, *rest in event["results"]:
            self.traffic.outcomes[outcome] += 1
            self._result(client.number, what, key, outcome, rest, since, at)

    def _result(
        self, number: int, what: str, key: str, outcome: str, rest: list[Any], since: float, at: float
    ) -> None:
        ledger = self._ledger
        match outcome:
            case "created" | "unchanged":
                value, expires, *kept = rest
                ledger.stored(
                    key,
                    value,
                    at,
                    overwrite=what == "overwrite" and outcome == "created",
                    expires=math.inf if expires is None else expires,
                )
                if what in ("kept", "durable"):
                    wanted, here = kept
                    ledger.kept(key, value, at, wanted=wanted, here=here, durable=what == "durable")
            case "kept_existing":
                ledger.refused(key, rest[0])
            case "removed":
                ledger.removed([key], at)
            case "flushed":
                ledger.removed(self._flushed[number], at, "flushed")
            case "value":
                ledger.read(number, key, rest[0], since, at)
                ledger.delivered(number, key)
            case "missing":
                ledger.read(number, key, None, since, at)
            case "failed":
                ledger.failed(number, key, rest[0], since, at)
            case "wrong":
                ledger.wrong(number, key, rest[0], at)
            case "switched":
                self.last_update_at, self.last_version = since, int(key)
