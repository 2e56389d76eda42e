"""Judgements about the way to another peer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from p2pstore.gossip.records import PeerRecord, format_peer_id
from p2pstore.objects import counted
from p2pstore.status.doctor.finding import Failure, Finding, broken, fine, warning
from p2pstore.wire import Code

SMALL_MTU_BYTES: Final = 1280
LARGE_SKEW_SECONDS: Final = 5.0
"""Stamps 10 s ahead are refused."""
SMALL_SKEW_SECONDS: Final = 1.0
SLOW_BYTES_PER_SECOND: Final = 100e6

GREETING: Final = b"\x13/multistream/1.0.0\n"
GREETING_SECONDS: Final = 0.25
NOT_CONTROL_CURE: Final = (
    "give the address behind `control` in its `ready` line, not its data or metrics port"
)
ALLOW_LIST_WORDS: Final = "allow list"
"""The refusal of a peer with an allow list."""


def format_seconds(seconds: float) -> str:
    """`0.41 ms` or `1.20 s`."""
    return f"{seconds * 1000:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def judge_resolution(host: str, addresses: Sequence[str], problem: str) -> Finding:
    if problem or not addresses:
        cause = problem or "the name has no address"
        cure = "check the spelling, /etc/hosts and DNS, or give an IP address"
        return broken("name", host, cause, cure, Failure.UNREACHABLE)
    return fine("name", f"{host} is {', '.join(addresses)}" if [host] != list(addresses) else host)


@dataclass(frozen=True, slots=True)
class ConnectAttempt:
    """One address that was tried: how long it took, or why it failed."""

    address: str
    seconds: float
    problem: str = ""
    refused: bool = False


def judge_connect(attempts: Sequence[ConnectAttempt], timeout_seconds: float) -> Finding:
    """The last attempt is the one that succeeded, if any did."""
    last = attempts[-1]
    failed = [each for each in attempts if each.problem]
    if last.problem:
        listed = "; ".join(f"{each.address}: {each.problem}" for each in failed)
        if any(each.refused for each in failed):
            cause = f"the machine answers, but nothing listens there ({listed})"
            cure = "start the peer, and compare the port with its `ready` line; see its --listen"
        else:
            cause = f"no way to the machine within {timeout_seconds:g} s ({listed})"
            cure = "check that it runs, the route to it, and firewalls in between for this port"
        return broken("tcp", "", cause, cure, Failure.UNREACHABLE)
    text = f"{last.address} in {format_seconds(last.seconds)}"
    if failed:
        listed = "; ".join(f"{each.address}: {each.problem}" for each in failed)
        return warning("tcp", text, listed, "remove dead addresses from the name")
    return fine("tcp", text, seconds=round(last.seconds, 6))


def judge_greeting(address: str, greeting: bytes | None) -> Finding | None:
    """Judge the other side's first bytes: None for none so far, empty when it closed. A peer names its protocol."""
    if greeting is None or greeting.startswith(GREETING[: max(1, len(greeting))]):
        return None
    said = greeting.decode("ascii", "backslashreplace").strip()
    cause = f"{address} closes every connection at once"
    if greeting:
        cause = f"another program listens at {address}: it begins with {said!r}"
    return broken("noise", "", cause, NOT_CONTROL_CURE)


def judge_no_noise(address: str, reason: str, elapsed: float, timeout_seconds: float) -> Finding:
    """Connected, and then no authenticated encryption came about."""
    if elapsed >= 0.95 * timeout_seconds:
        return broken(
            "noise",
            "",
            f"{address} takes connections, and does not answer as a peer within {timeout_seconds:g} s: the "
            "peer is stopped or hung, or another program listens there",
            "look at the peer's process (`kill -CONT` if it is stopped) and its log, and at the port",
            Failure.DEADLINE,
        )
    cause = f"what listens at {address} is not a peer's control port: {reason}"
    return broken("noise", "", cause, NOT_CONTROL_CURE)


def judge_no_admission(
    reason: str,
    code: Code | None,
    elapsed: float,
    timeout_seconds: float,
    *,
    keyless: bool,
    cluster: str,
) -> Finding:
    """Authenticated, and then not admitted."""
    if code is Code.AUTHENTICATION_FAILED and ALLOW_LIST_WORDS in reason:
        cause = "the peer has an allow list, and this command a new identity: it gets no further"
        cure = "see the log of the peer that cannot join; its id must be in the file of --allow-file"
        return warning("admission", "the key is right", cause, cure)
    if code is Code.AUTHENTICATION_FAILED:
        cure = "copy the cluster's key file to this machine, and name it with --cluster-key-file"
        if keyless:
            cure = "give the cluster's key with --cluster-key-file FILE"
        return broken("admission", "refused", reason, cure)
    if code is Code.WRONG_CLUSTER:
        cure = f"give the cluster's name with --cluster (now {cluster!r}); it stands in its `stats`"
        return broken("admission", "refused", reason, cure)
    if code is Code.PROTOCOL_MISMATCH:
        return broken("admission", "refused", reason, "upgrade p2pstore on the older side")
    if elapsed >= 0.95 * timeout_seconds:
        return broken(
            "admission",
            "",
            f"no answer for {timeout_seconds:g} s after the encryption was set up: the peer hangs, or is "
            "overloaded",
            "look at its process and its log",
            Failure.DEADLINE,
        )
    return broken("admission", "", reason, "look at the peer's log")


def judge_who(
    record: PeerRecord, members: int, own_software: str, own_protocols: tuple[int, int]
) -> Finding:
    """The answering peer by its own signed record, and how many members it knows."""
    text = (
        f"{record.name}, {format_peer_id(record.peer_id)}, p2pstore {record.software}, "
        f"protocol {record.min_protocol} to {record.max_protocol}, knows {counted(members, 'member')}"
    )
    if record.software != own_software:
        cause = f"this machine has p2pstore {own_software}, protocol {own_protocols[0]} to {own_protocols[1]}"
        cure = "neighbouring versions work together; upgrade the older side"
        return warning("peer", text, cause, cure)
    return fine("peer", text)


def judge_round_trip(name: str, seconds: Sequence[float]) -> Finding:
    """Of small requests, one after the other."""
    ordered = sorted(seconds)
    middle = ordered[len(ordered) // 2]
    return fine(
        name,
        f"{format_seconds(middle)} (best {format_seconds(ordered[0])}, worst {format_seconds(ordered[-1])})",
        median_seconds=round(middle, 6),
        best_seconds=round(ordered[0], 6),
        worst_seconds=round(ordered[-1], 6),
    )


def judge_path_mtu(mtu_bytes: int, segment_bytes: int) -> Finding:
    text = f"{mtu_bytes:,} bytes (TCP segments of {segment_bytes:,})"
    if mtu_bytes < SMALL_MTU_BYTES:
        cause = "something on the way takes small packets only"
        cure = "look for tunnels and VPNs on the way, and for a wrong MTU of an interface"
        return warning("path MTU", text, cause, cure, mtu_bytes=mtu_bytes)
    return fine("path MTU", text, mtu_bytes=mtu_bytes, segment_bytes=segment_bytes)


def judge_clock_skew(offset_seconds: float, uncertainty_seconds: float) -> Finding:
    """`offset_seconds`: how far the other clock is ahead of this one."""
    ahead = "ahead" if offset_seconds > 0 else "behind"
    text = f"{format_seconds(abs(offset_seconds))} {ahead} (+- {format_seconds(uncertainty_seconds)})"
    certain = abs(offset_seconds) - uncertainty_seconds
    cure = "run chrony, ntpd or systemd-timesyncd on both machines"
    if certain > LARGE_SKEW_SECONDS:
        return broken(
            "clock skew", text, "peers refuse stamps that are 10 s ahead of their own clock", cure
        )
    if certain > SMALL_SKEW_SECONDS:
        return warning("clock skew", text, "the clocks of the two machines differ", cure)
    return fine("clock skew", text, offset_seconds=round(offset_seconds, 6))


def judge_rate(name: str, moved_bytes: int, seconds: float, how: str) -> Finding:
    """`how`: over what it was moved, such as one connection."""
    rate = moved_bytes / max(seconds, 1e-9)
    text = f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"
    text += f" ({moved_bytes / 1e6:,.0f} MB in {seconds:.2f} s, {how})"
    if rate < SLOW_BYTES_PER_SECOND:
        cause = "slower than a network of 1 Gb/s"
        cure = "look at the speed of the interfaces, at load, and at packet loss (`nstat -az | grep Retrans`)"
        return warning(name, text, cause, cure, bytes_per_second=round(rate))
    return fine(name, text, bytes_per_second=round(rate))


def judge_data_failure(
    name: str, address: str, reason: str, failure: Failure, *, loopback_elsewhere: bool = False
) -> Finding:
    """A data address that does not work. `loopback_elsewhere`: it is a loopback address of another machine."""
    if loopback_elsewhere:
        cause = "the peer tells others a loopback address, which leads each of them to itself"
        cure = "give the peer --data-listen (or --data-advertise) with an address that others can reach"
        return broken(name, address, cause, cure)
    cure = "check firewalls for this port; give the peer a fixed one with --data-listen"
    if failure is Failure.BROKEN:
        cure = "look at the peer's log"
    return broken(name, address, reason, cure, failure)


def stalled(name: str, timeout_seconds: float) -> Finding:
    """Small requests pass, bulk does not."""
    return broken(
        name,
        "",
        f"bulk bytes stopped for {timeout_seconds:g} s, though small requests pass: large packets may be lost "
        "on the way (an MTU that is too large, with ICMP blocked)",
        "`ping -M do -s 1472 HOST` finds the largest packet; lower the MTU, or allow ICMP",
        Failure.DEADLINE,
    )
