"""`bench`: the cost of the local peer next to plain memory, in one run: medians of both, measured in turns."""

from __future__ import annotations

import os
import platform
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from mooncake_p2p.options import DEFAULT_TIMEOUT, Json, Socket, Timeout, connected, option, parse_timeout
from mooncake_p2p.output import (
    CommandFailed,
    Interrupts,
    print_json,
    print_table,
    printable,
    progress,
    remark,
)
from p2pstore.errors import P2PStoreError
from p2pstore.objects import chunk_sums, format_bytes, parse_bytes

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient

MIN_SAMPLES: Final = 3
MAX_SAMPLES: Final = 2000
DEFAULT_SIZES: Final = ("4KiB", "1MiB", "64MiB")
SHARE_OF_FREE: Final = 20
"""At most a twentieth of the free memory is used, so that no other object is evicted."""
TTL_SECONDS: Final = 600.0
"""Lifetime of the objects that a killed bench leaves behind."""
MAX_SECONDS: Final = 60.0
MANY: Final = 1000
MAX_OTHERS: Final = 3
PLAIN: Final = "memcpy + xxh3"


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. `against` names what it was compared with in the same run; `ratio` is value / baseline."""

    name: str
    value: float
    unit: str
    against: str = ""
    baseline: float | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """Medians of one operation in seconds; `length_bytes` is 0 for what moves nothing."""

    name: str
    length_bytes: int
    seconds: float
    against: str = ""
    baseline_seconds: float | None = None

    def results(self) -> Iterator[Result]:
        """The median in us and, for what moves bytes, GB/s."""
        base = self.baseline_seconds
        ratio = self.seconds / base if base else None
        scaled = None if base is None else base * 1e6
        yield Result(f"{self.name}, median", self.seconds * 1e6, "us", self.against, scaled, ratio)
        if self.length_bytes:
            rate = None if base is None else self.length_bytes / base / 1e9
            value = self.length_bytes / self.seconds / 1e9
            faster = value / rate if rate else None
            yield Result(f"{self.name}, rate", value, "GB/s", self.against, rate, faster)


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def medians_in_turns(
    action: Callable[[], float], baseline: Callable[[], float], seconds: float
) -> tuple[float, float]:
    """Medians of what both return, called in turns for `seconds`, at least three times each. The first
    turn, in which memory is touched for the first time, does not count."""
    action(), baseline()
    end = time.monotonic() + seconds
    own: list[float] = []
    plain: list[float] = []
    while len(own) < MIN_SAMPLES or (time.monotonic() < end and len(own) < MAX_SAMPLES):
        own.append(action())
        plain.append(baseline())
    return statistics.median(own), statistics.median(plain)


def document(figures: list[Figure]) -> dict[str, Any]:
    """The document of `--json`, in the shape of the scripts' files."""
    results = [asdict(result) for figure in figures for result in figure.results()]
    return {"results": results, "machine": machine()}


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model.partition(":")[2].strip(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": os.getloadavg()[0],
    }


def bench(
    size: Annotated[
        list[str] | None,
        option("SIZE", "Length of the values; may be repeated  [default: 4KiB 1MiB 64MiB]."),
    ] = None,
    seconds: Annotated[str, option("SECONDS", "How long each figure is measured.")] = "0.5",
    socket: Socket = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    json: Json = False,
) -> None:
    """Measure the local peer, against plain memory.

    Puts, gets and leases of values of each size, and how long it takes to ask for keys: medians, and
    GB/s beside those of a plain copy with the same checksums, taken in turns. RATIO is the time taken
    by the time of the plain copy. With other peers of the cluster on this machine (up to three), also
    gets from those, by the transport that they came over; for peers on other machines use
    `mooncake-p2p doctor --peer HOST:PORT`.

    Works in a namespace of its own, which is emptied at the end, also after Ctrl-C. It uses at most
    5 % of a peer's free memory; sizes that do not fit are left out, and it says so.
    """
    sizes = [parse_bytes(each, "--size") for each in size or DEFAULT_SIZES]
    if not all(sizes):
        raise ValueError("--size: must be at least 1 byte")
    seconds_each = parse_timeout(seconds, "--seconds")
    if seconds_each > MAX_SECONDS:
        raise ValueError(f"--seconds: {seconds!r} is above {MAX_SECONDS:g}")
    namespace = f"bench-{os.getpid()}-{secrets.token_hex(4)}"
    figures: list[Figure] = []
    with Interrupts() as interrupts, connected(socket, namespace, timeout) as client:
        peer = _measured(client)
        others = _others(peer, namespace, timeout)
        try:
            with interrupts.allowed(), progress("measuring") as bar:
                for figure in _measure(peer, others, sizes, seconds_each, timeout):
                    figures.append(figure)
                    bar.relabel(f"measured {figure.name}")
        finally:
            for each in (peer, *others):
                each.empty(timeout)
            for other in others:
                other.client.close()
    if json:
        print_json(document(figures))
    else:
        _show(figures)


# --- peers to measure ----------------------------------------------------------------------------


@dataclass
class _Measured:
    """A peer of this machine, and a client of it in the bench's namespace."""

    client: BlockingClient
    peer_id: str
    name: str
    room_bytes: int
    keys: int = 0
    used_bytes: int = 0

    def put(self, value: memoryview) -> float:
        """Put under a fresh key; returns the seconds. Starts over when the room is used up."""
        if self.used_bytes + _footprint(len(value)) > self.room_bytes:
            self.client.flush()
            self.used_bytes = 0
        self.keys += 1
        self.used_bytes += _footprint(len(value))
        put = partial(self.client.put, f"k{self.keys}", value, ttl=TTL_SECONDS)
        return timed(put)

    def empty(self, timeout: str) -> None:
        """Remove all; by a connection of its own, as a signal may have ended a request halfway."""
        if not self.keys:
            return
        try:
            with connected(self.client.socket_path, self.client.namespace, timeout) as client:
                client.flush()
        except P2PStoreError as error:  # the other peers are emptied all the same
            remark(
                f"what was put on {printable(self.name)} stays up to {TTL_SECONDS / 60:.0f} minutes: {error}"
            )


def _footprint(length_bytes: int) -> int:
    """Bytes of a peer's memory that a value takes up, with its trailer."""
    return -(-length_bytes // 4096) * 4096 + 4096


def _measured(client: BlockingClient) -> _Measured:
    own = client.statistics(cluster=False)["peer"]
    free = own["memory_capacity_bytes"] - own["memory_used_bytes"]
    return _Measured(client, own["peer_id"], own["name"], free // SHARE_OF_FREE)


def _others(peer: _Measured, namespace: str, timeout: str) -> list[_Measured]:
    """Up to three live peers of the same cluster whose sockets are on this machine."""
    from p2pstore import blocking
    from p2pstore.local.socket_paths import live_sockets

    members = {member.peer_id for member in peer.client.peers() if not member.me}
    found: list[_Measured] = []
    for path in live_sockets():
        if len(found) == MAX_OTHERS or not members:
            break
        if str(path) == peer.client.socket_path:
            continue
        try:
            client = blocking.connect(path, namespace=namespace, timeout=parse_timeout(timeout))
            other = _measured(client)
        except P2PStoreError as error:
            remark(f"left out the peer at {path}: {error}")
            continue
        if other.peer_id in members:
            members.remove(other.peer_id)
            found.append(other)
        else:
            client.close()
    if members:
        remark(
            f"left out {len(members)} more of the cluster's peers: `mooncake-p2p doctor --peer HOST:PORT` measures the "
            "way to a peer"
        )
    return found


# --- what is measured ----------------------------------------------------------------------------


def _measure(
    peer: _Measured, others: list[_Measured], sizes: list[int], seconds: float, timeout: str
) -> Iterator[Figure]:
    fitting = [each for each in sizes if _fits(peer, each)]
    if not fitting:
        raise CommandFailed(
            f"no size fits into 5 % of {printable(peer.name)}'s free memory "
            f"({format_bytes(peer.room_bytes)}): give a smaller --size"
        )
    for length in fitting:
        yield from _measure_values(peer, length, seconds)
    yield from _measure_questions(peer, seconds)
    for other in others:
        for length in fitting:
            if _fits(other, length):
                yield _measure_remote(peer, other, length, seconds, parse_timeout(timeout))


def _fits(peer: _Measured, length: int) -> bool:
    if _footprint(length) <= peer.room_bytes:
        return True
    remark(
        f"left out {format_bytes(length)} on {printable(peer.name)}: 5 % of its free memory is "
        f"{format_bytes(peer.room_bytes)}"
    )
    return False


def _plain_copy(length: int) -> Callable[[], float]:
    """A copy of `length` bytes with the checksums that a put or get makes."""
    source, target = memoryview(os.urandom(length)), memoryview(bytearray(length))

    def copy() -> None:
        target[:] = source
        chunk_sums(target)

    return lambda: timed(copy)


def _measure_values(peer: _Measured, length: int, seconds: float) -> Iterator[Figure]:
    client, plain = peer.client, _plain_copy(length)
    value, target = memoryview(os.urandom(length)), memoryview(bytearray(length))

    def lease(key: str) -> None:
        with client.lease(key) as view:
            view[0]

    taken = medians_in_turns(lambda: peer.put(value), plain, seconds)
    yield _figure("put", length, taken)
    key = f"k{peer.keys}"
    taken = medians_in_turns(lambda: timed(lambda: client.get_into(key, target)), plain, seconds)
    yield _figure("get", length, taken)
    if target != value:
        raise CommandFailed(f"a get of {format_bytes(length)} came out wrong; please report it")
    taken = medians_in_turns(lambda: timed(lambda: lease(key)), plain, seconds)
    yield _figure("lease", length, taken, moves=False)


def _measure_questions(peer: _Measured, seconds: float) -> Iterator[Figure]:
    client, here = peer.client, f"k{peer.keys}"
    keys = [here] * MANY
    for name, ask in (
        ("contains", lambda: client.contains(here)),
        (f"contains_many, {MANY:,} times one key", lambda: client.contains_many(keys)),
        (f"match_prefix, {MANY:,} times one key", lambda: client.match_prefix(keys)),
    ):
        taken, _ = medians_in_turns(partial(timed, ask), float, seconds)
        yield Figure(name, 0, taken)


def _measure_remote(
    peer: _Measured, other: _Measured, length: int, seconds: float, wait: float
) -> Figure:
    """Gets of one value that only `other` holds."""
    from p2pstore.transfer.transfer_trace import FetchTrace

    value, target = memoryview(os.urandom(length)), memoryview(bytearray(length))
    peer.keys += 1  # both use one namespace: no key twice
    other.keys = peer.keys
    key = f"k{peer.keys}"
    other.client.put(key, value, ttl=TTL_SECONDS)
    ways: set[str] = set()

    def get() -> float:
        trace = FetchTrace()
        taken = timed(lambda: peer.client.get_into(key, target, wait=wait, trace=trace))
        ways.add("this peer" if trace.local else trace.transport)
        return taken

    taken = medians_in_turns(get, _plain_copy(length), seconds)
    other.client.remove(key)
    if target != value:
        raise CommandFailed(f"a get from {printable(other.name)} came out wrong; please report it")
    over = ", ".join(sorted(ways))
    return _figure(f"get from {printable(other.name)} over {over}", length, taken)


def _figure(what: str, length: int, taken: tuple[float, float], *, moves: bool = True) -> Figure:
    return Figure(f"{what}, {format_bytes(length)}", length if moves else 0, taken[0], PLAIN, taken[1])


# --- for people --------------------------------------------------------------------------------


def _show(figures: list[Figure]) -> None:
    def ratio(figure: Figure) -> str:
        base = figure.baseline_seconds
        return "-" if base is None else f"{figure.seconds / base:.2f}"

    print_table(
        figures,
        {
            "WHAT": lambda figure: figure.name,
            ">MEDIAN": lambda figure: _length(figure.seconds),
            ">RATE": lambda figure: _rate(figure.length_bytes, figure.seconds),
            ">PLAIN COPY": lambda figure: _length(figure.baseline_seconds),
            ">ITS RATE": lambda figure: _rate(figure.length_bytes, figure.baseline_seconds),
            ">RATIO": ratio,
        },
    )


def _length(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:,.1f} us" if seconds < 0.001 else f"{seconds * 1e3:,.2f} ms"


def _rate(length_bytes: int, seconds: float | None) -> str:
    return f"{length_bytes / seconds / 1e9:.2f} GB/s" if length_bytes and seconds else "-"
