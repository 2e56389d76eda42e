"""Judgements about a running peer, by what it says of itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from p2pstore.doctor.finding import Finding, broken, fine, warning
from p2pstore.objects import format_bytes

CLOCK_OFF_SECONDS: Final = 1.0
CLOCK_REFUSED_SECONDS: Final = 10.0
"""What a peer writes is refused by others from here on."""
LATE_MS: Final = 100.0
"""For one in a hundred looks at the event loop; a probe waits half a second."""
ENOUGH_LOOKS: Final = 1200
"""A minute of them: a start is no sign of trouble."""
DISTRUST: Final = 3
"""Of 8: probes and suspicions take four times as long, and more."""
LEASED_SHARE: Final = 0.9
FAILED_SHARE: Final = 0.01
"""Of puts, or of reads."""
FEW: Final = 10
"""So many may fail by chance."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What is judged. Counts are since the peer's start. `clock_ahead_seconds`: of this machine's clock against the
    median of the others'; None where it is not known. `late_ms`: what 99 of 100 looks at the event loop did not
    exceed."""

    clock_ahead_seconds: float | None = None
    late_ms: float = 0.0
    local_health: int = 0
    memory_bytes: int = 0
    leased_bytes: int = 0
    puts: int = 0
    puts_failed: int = 0
    received: int = 0
    received_failed: int = 0
    fallbacks: int = 0
    spoilt: int = 0


def vitals_of(peer: Mapping[str, Any]) -> Vitals:
    """From a peer's statistics; an older one says less."""
    counted, received = peer.get("counters", {}), peer.get("received", {})
    lag = peer.get("latencies", {}).get("event_loop_lag", {}).get("lag", {})
    return Vitals(
        clock_ahead_seconds=peer.get("clock_ahead_seconds"),
        late_ms=lag.get("p99_ms", 0.0) if lag.get("count", 0) >= ENOUGH_LOOKS else 0.0,
        local_health=peer.get("gossip", {}).get("local_health", 0),
        memory_bytes=peer.get("memory_capacity_bytes", 0),
        leased_bytes=peer.get("leased_bytes", 0),
        puts=counted.get("client_puts", 0),
        puts_failed=counted.get("client_puts_failed", 0),
        received=sum(use["objects"] for use in received.values()),
        received_failed=sum(use["failures"] for use in received.values()),
        fallbacks=counted.get("transport_fallbacks", 0),
        spoilt=counted.get("objects_spoilt", 0),
    )


def judge_vitals(name: str, vitals: Vitals) -> Iterator[Finding]:
    """What is not as it should be, and the clock in any case. `name` is the peer's."""
    yield from _judge_clock(f"{name}: clock", vitals)
    yield from _judge_process(f"{name}: event loop", f"{name}: gossip", vitals)
    yield from _judge_memory(f"{name}: memory", vitals)
    yield from _judge_requests(f"{name}: puts", f"{name}: reads", vitals)


def _judge_clock(name: str, vitals: Vitals) -> Iterator[Finding]:
    ahead = vitals.clock_ahead_seconds
    if ahead is None:
        return
    text = f"{abs(ahead):.3f} s {'ahead of' if ahead > 0 else 'behind'} the other peers'"
    cure = "run chrony, ntpd or systemd-timesyncd here, and look at `timedatectl`"
    if abs(ahead) >= CLOCK_REFUSED_SECONDS:
        cause = "what is stamped over 10 s ahead is refused, so puts on one side are not seen on the other"
        yield broken(name, text, cause, cure)
    elif abs(ahead) >= CLOCK_OFF_SECONDS:
        cause = "it is this machine's clock, or most of the others', that is wrong"
        yield warning(name, text, cause, cure)
    else:
        yield fine(name, text, clock_ahead_seconds=ahead)


def _judge_process(loop: str, gossip: str, vitals: Vitals) -> Iterator[Finding]:
    if vitals.late_ms >= LATE_MS:
        yield warning(
            loop,
            f"one turn in a hundred was late by more than {vitals.late_ms / 2:.0f} ms",
            "the process gets too little CPU, its memory is swapped, or it does something for too long at once",
            "look at `top`, and at cpu.stat of the cgroup (throttled); give the container more CPU",
        )
    if vitals.local_health > DISTRUST:
        yield warning(
            gossip,
            f"it distrusts its own probes ({vitals.local_health} of 8)",
            "its probes fail, or others accuse it: too little CPU, or a network that loses packets",
            "look at `top` and `ip -s link`; `doctor --peer` checks the way to another peer",
        )


def _judge_memory(name: str, vitals: Vitals) -> Iterator[Finding]:
    if vitals.memory_bytes and vitals.leased_bytes > LEASED_SHARE * vitals.memory_bytes:
        yield warning(
            name,
            f"{format_bytes(vitals.leased_bytes)} of {format_bytes(vitals.memory_bytes)} are leased",
            "programs hold views of nearly all of it, so that nothing else has room",
            "let them go of views sooner, or give the peer more --memory",
        )
    if vitals.spoilt:
        yield broken(
            name,
            f"{vitals.spoilt:,} objects were spoilt",
            "a program here wrote to the shared memory by mistake, or the memory is faulty; checksums found it",
            "look for memory errors (`dmesg | grep -i -e edac -e mce`), and for what else uses this socket",
        )


def _judge_requests(puts: str, reads: str, vitals: Vitals) -> Iterator[Finding]:
    if _too_many(vitals.puts_failed, vitals.puts):
        yield warning(
            puts,
            f"{vitals.puts_failed:,} failed, {vitals.puts:,} did not",
            "most often memory is full of what may not be evicted: leases, hard pins, quotas",
            "`mooncake-p2p stats` and `ls --pinned` show it; unpin, or give the peer more --memory",
        )
    if _too_many(vitals.received_failed, vitals.received):
        yield warning(
            reads,
            f"{vitals.received_failed:,} reads at other peers failed, {vitals.received:,} did not",
            "these peers end, hang or are cut off while they are read",
            "`mooncake-p2p peers --reads` says which; `doctor --peer HOST:PORT` examines the way there",
        )
    if _too_many(vitals.fallbacks, vitals.received):
        yield warning(
            reads,
            f"a transport gave way to another one {vitals.fallbacks:,} times",
            "shared memory or RDMA is offered, and does not work",
            "the peer's log says once for each peer why; `get --explain` for one read",
        )


def _too_many(failed: int, succeeded: int) -> bool:
    return failed >= FEW and failed > FAILED_SHARE * (failed + succeeded)
