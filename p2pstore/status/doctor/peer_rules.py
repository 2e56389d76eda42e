"""What is said of a running peer: what it says itself is wrong, and what only who asks it can see. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2pstore.status.doctor.finding import Finding, Status, broken, fine, skipped, warning
from p2pstore.status.doctor.network_rules import SsdReading, judge_ssd


@dataclass(frozen=True, slots=True)
class LocalPeerReading:
    """A peer on this machine as it answered. `clock_ahead_seconds`: of this machine's clock against the median of the
    others'; None where it is not known. `problems`: as its status page shows them; None of an older peer, which does
    not say."""

    name: str
    software: str
    cluster: str
    live: int
    clock_ahead_seconds: float | None = None
    ssd: SsdReading | None = None
    problems: Sequence[Mapping[str, str]] | None = ()


def judge_local_peer(reading: LocalPeerReading, own_version: str) -> list[Finding]:
    """The peer, its problems in its own words, and readings of it that are as they should be."""
    name = f"peer {reading.name}"
    members = f"{reading.live} live {'member' if reading.live == 1 else 'members'}"
    text = f"p2pstore {reading.software}, cluster {reading.cluster}, {members}"
    findings = [fine(name, text)]
    if reading.problems is None:
        findings.append(
            skipped(f"{name}: problems", "it is older, and does not say: see its status page")
        )
    problems = [_finding(name, each) for each in reading.problems or ()]
    told = {finding.name for finding in problems}
    if reading.clock_ahead_seconds is not None and f"{name}: clock" not in told:
        findings.append(_clock(name, reading.clock_ahead_seconds))
    if reading.ssd is not None and f"{name}: ssd" not in told:
        findings.append(judge_ssd(name, reading.ssd))
    if reading.software != own_version:
        findings.append(
            warning(
                f"{name}: this command",
                f"is of p2pstore {own_version}",
                "this command and its peer are of different versions",
                "neighbouring versions work together; upgrade the older one",
            )
        )
    return [*findings, *problems]


def _clock(name: str, ahead: float) -> Finding:
    text = f"{abs(ahead):.3f} s {'ahead of' if ahead > 0 else 'behind'} the other peers'"
    return fine(f"{name}: clock", text, clock_ahead_seconds=ahead)


def _finding(name: str, problem: Mapping[str, str]) -> Finding:
    make = broken if problem["status"] == Status.BROKEN else warning
    return make(f"{name}: {problem['name']}", problem["what"], problem["cause"], problem["cure"])


def absent_local_peer(socket: str, reason: str) -> Finding:
    """The socket was named, and there is nobody, or nobody whom this user may ask."""
    return broken(
        f"peer at {socket}",
        "none to talk to",
        reason,
        "if it is to run, the end of its log says why it ended (`journalctl -u`, peer.log in its state directory)",
    )


def silent_local_peer(socket: str, reason: str) -> Finding:
    """Somebody holds the socket and does not answer."""
    return broken(
        f"peer at {socket}",
        "no answer",
        reason,
        "it is stopped, hung or overloaded: look at its log; end it and start it again",
    )
