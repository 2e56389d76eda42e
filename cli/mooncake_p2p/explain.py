"""`get --explain`: the course of one get, for people and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from mooncake_p2p.output import format_rate, printable
from p2pstore.objects import format_bytes

if TYPE_CHECKING:
    from p2pstore.transfer.transfer_trace import FetchTrace, TransportTry

REASON_COLUMNS: Final = 80
RDMA: Final = "rdma"
NOT_FOR_CLIENTS: Final = "not tried, only peers read by it, for large gets, leases and copies"


def explanation(trace: FetchTrace) -> list[str]:
    """One line per stage, for stderr."""
    lines = [f"lookup    {_lookup(trace)}"]
    if not trace.local:
        lines += [f"tried     {printable(each)}" for each in _tries(trace)]
    if trace.source:
        lines.append(f"source    {printable(trace.source)}, {trace.tier}, over {trace.transport}")
        if not trace.local:
            lines.append(f"queue     {_milliseconds(trace.queue_seconds)} until connected")
        rate = format_rate(trace.length_bytes, trace.transfer_seconds)
        lines.append(
            f"transfer  {_milliseconds(trace.transfer_seconds)} for "
            f"{format_bytes(trace.length_bytes)} ({rate})"
        )
        verify = "in the same pass as the copy"
        if trace.verify_seconds is not None:
            verify = f"{_milliseconds(trace.verify_seconds)} for the checksums"
        lines.append(f"verify    {verify}")
    return lines


def document(trace: FetchTrace) -> dict[str, Any]:
    """The same for `--json`."""
    return {**asdict(trace), "not_tried": {} if _by_rdma(trace) else {RDMA: NOT_FOR_CLIENTS}}


def _by_rdma(trace: FetchTrace) -> bool:
    return any(each.transport == RDMA for each in trace.tries)


def _lookup(trace: FetchTrace) -> str:
    if trace.local and not trace.lookup_seconds:
        return "in the local peer's memory; no peer was asked"
    copies = "1 copy" if trace.copies_known == 1 else f"{trace.copies_known} copies"
    if trace.copies_unreachable:
        copies += f" and {trace.copies_unreachable} that cannot be reached"
    homes = "no other peer was asked"
    if trace.homes_asked:
        homes = f"home peers asked: {trace.homes_asked}"
    return f"{_milliseconds(trace.lookup_seconds)}, {copies}; {homes}"


def _tries(trace: FetchTrace) -> Iterator[str]:
    several = sum(each.length_bytes > 0 for each in trace.tries) > 1
    for each in trace.tries:
        brought = f", {format_bytes(each.length_bytes)}" if several and each.length_bytes else ""
        yield f"{each.peer or 'a peer'} over {each.transport}: {_outcome(each)}{brought}"
    if trace.tries and not _by_rdma(trace):
        yield f"{RDMA}: {NOT_FOR_CLIENTS}"


def _outcome(each: TransportTry) -> str:
    if not each.tried:
        return f"not tried, {_short(each.outcome)}"
    return f"{_short(each.outcome) or 'interrupted'} after {_milliseconds(each.seconds)}"


def _short(reason: str) -> str:
    """The cause, without the cure, which the error names."""
    return textwrap.shorten(reason.partition("; ")[0], REASON_COLUMNS, placeholder=" ..")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
