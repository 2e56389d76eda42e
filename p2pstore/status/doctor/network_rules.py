"""Judgements about ports, kernel settings, network interfaces, RDMA devices and GPUs. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from p2pstore.objects import counted, format_bytes
from p2pstore.status.doctor.finding import Finding, Status, broken, fine, skipped, warning
from p2pstore.transfer.rdma.rdma_rules import GidEntry, choose_gid
from p2pstore.transfer.rdma.rdma_topology import Machine, Matrix

CONTROL_PORT: Final = 17946
DATA_PORT: Final = 17947
BACKLOG: Final = 512
"""Backlog of the peer's listeners."""
JUMBO_SPEED_MEGABITS: Final = 25_000
"""From here on, 1,500-byte frames cost more CPU than the copy."""
JUMBO_MTU_BYTES: Final = 4096
PACING: Final = frozenset({"bbr"})


def judge_port(port: int, what: str, problem: str, user: str) -> Finding:
    """`problem`: why it cannot be listened on, or nothing. `user`: the local peer that has it."""
    name = f"port {port}"
    if user:
        return fine(name, f"used by the peer {user}")
    if problem:
        cause = f"the usual {what} port is taken, and not by a peer that answers here"
        cure = f"find out by whom (`ss -ltnp sport = :{port}`), or join with another port"
        return warning(name, problem, cause, cure)
    return fine(name, f"free ({what})")


def judge_congestion_control(default: str, used: str) -> Finding:
    """`default`: the system's; `used`: what a data connection of p2pstore gets."""
    name = "congestion control"
    if used in PACING:
        cause = "bbr paces: it halves the throughput on loopback and within a rack"
        cure = "`modprobe tcp_cubic`, or allow cubic or reno in net.ipv4.tcp_allowed_congestion_control"
        return warning(name, used, cause, cure)
    return fine(name, used if used == default else f"{used} for data (the default is {default})")


def judge_backlog(somaxconn: int) -> Finding:
    if somaxconn < BACKLOG:
        cause = "many peers or clients that connect at once are turned away"
        cure = f"`sysctl net.core.somaxconn={BACKLOG}` or more"
        return warning("somaxconn", str(somaxconn), cause, cure)
    return fine("somaxconn", str(somaxconn))


@dataclass(frozen=True, slots=True)
class InterfaceReading:
    """A network interface. `speed_megabits` and `numa_node` are None where the driver does not say."""

    name: str
    up: bool
    mtu_bytes: int
    speed_megabits: int | None
    numa_node: int | None
    driver: str = ""


def judge_interface(reading: InterfaceReading) -> Finding:
    name = f"interface {reading.name}"
    speed = "speed not known"
    if reading.speed_megabits is not None:
        speed = f"{reading.speed_megabits / 1000:g} Gb/s"
    parts = ["up" if reading.up else "down", speed, f"MTU {reading.mtu_bytes:,}"]
    if reading.numa_node is not None:
        parts.append(f"NUMA node {reading.numa_node}")
    if reading.driver:
        parts.append(reading.driver)
    text = ", ".join(parts)
    fast = (reading.speed_megabits or 0) >= JUMBO_SPEED_MEGABITS
    if reading.up and fast and reading.mtu_bytes < JUMBO_MTU_BYTES:
        cause = "small frames keep a core busy at this speed"
        cure = f"set MTU 9000 on every host and switch of this network (`ip link set {reading.name} mtu 9000`)"
        return warning(name, text, cause, cure)
    return fine(name, text)


USED_PORT: Final = 1


@dataclass(frozen=True, slots=True)
class RdmaPortReading:
    """One port of an RDMA device. `gids` are its addresses in use."""

    device: str
    port: int
    active: bool
    state: str
    link_layer: str
    rate: str
    gids: tuple[GidEntry, ...]


def judge_rdma(ports: Sequence[RdmaPortReading], *, pyverbs_problem: str) -> list[Finding]:
    """One finding per port, and one for pyverbs, with the problem of loading it, where there is a device."""
    if not ports:
        return [fine("rdma", "no device: data goes by shared memory and TCP")]
    findings = [_judge_rdma_port(port) for port in ports]
    if pyverbs_problem:
        cause = f"there is an RDMA device, and no library to use it with: {pyverbs_problem}"
        cure = "install python3-pyverbs of the distribution (pip's does not build everywhere)"
        findings.append(warning("pyverbs", "does not load", cause, cure))
    else:
        findings.append(fine("pyverbs", "loads"))
    return findings


def _judge_rdma_port(port: RdmaPortReading) -> Finding:
    name = f"rdma {port.device}/{port.port}"
    text = f"{port.state.lower()}, {port.link_layer}, {port.rate}"
    if not port.active:
        return warning(
            name, text, "the link is down", "plug the cable in, bring the interface up, or ignore it"
        )
    if port.port != USED_PORT:
        return fine(name, f"{text}; peers use port {USED_PORT} only")
    if port.link_layer.lower() != "ethernet":
        cause = "peers use RoCE v2 only, not InfiniBand yet"
        cure = "give peers an address on this network (IP over InfiniBand): they use TCP there"
        return warning(name, text, cause, cure)
    chosen = choose_gid(port.gids)
    if chosen is None:
        cause = "no RoCE v2 address that other machines reach"
        cure = "give the interface an IP address, and enable RoCE v2 in the driver"
        return warning(name, text, cause, cure)
    address = ipaddress.IPv6Address(chosen.gid)
    return fine(name, f"{text}, RoCE v2 as {address.ipv4_mapped or address} (GID {chosen.index})")


def judge_topology(machine: Machine, matrix: Matrix, *, told: bool) -> list[Finding]:
    """One finding per memory location, and one for devices whose NUMA node matters and is not known, unless
    a setting `told` where they are. Nothing without devices."""
    findings = []
    for location, choice in matrix.items():
        text = ", ".join(choice.preferred) or "none preferred"
        if choice.fallback:
            text += f"; else {', '.join(choice.fallback)}"
        findings.append(fine(f"rdma for {location}", text))
    lost = [nic.name for nic in machine.nics if nic.place.numa_node is None]
    if lost and len(machine.nodes) > 1 and not told:
        cause = "the firmware does not say which NUMA node these devices are near"
        cure = "say it: `--rdma-topology FILE` of join, or numa_node in their folder under /sys"
        findings.append(warning("rdma topology", f"not known: {', '.join(lost)}", cause, cure))
    return findings


def judge_wrong_topology(problem: str) -> Finding:
    """`problem`: of the given matrix."""
    cure = "correct it: a peer does not start with it. Without one, this command shows what the machine says"
    return broken("rdma topology", "", problem, cure)


@dataclass(frozen=True, slots=True)
class GpuReading:
    """A display or 3D controller on the PCI bus."""

    address: str
    vendor: str
    numa_node: int | None


def judge_gpus(gpus: Sequence[GpuReading]) -> Finding:
    if not gpus:
        return fine("gpus", "none on the PCI bus")
    listed = ", ".join(
        f"{gpu.address} {gpu.vendor}"
        + (f" (NUMA node {gpu.numa_node})" if gpu.numa_node is not None else "")
        for gpu in gpus
    )
    return fine("gpus", f"{len(gpus)}: {listed}")


# --- SSDs of peers ---------------------------------------------------------------------------


def judge_ssd(name: str, ssd: Mapping[str, Any]) -> Finding:
    """The SSD of a peer on this machine, by its statistics."""
    read_p99_ms = ssd["read_latency"].get("p99_ms") or 0.0
    text = (
        f"{format_bytes(ssd['live_bytes'])} of {format_bytes(ssd['capacity_bytes'])}, "
        f"{counted(ssd['objects'], 'object')}, 99 % of reads in {read_p99_ms:.1f} ms"
    )
    measured = {"read_p99_ms": read_p99_ms, "capacity_bytes": ssd["capacity_bytes"]}
    if ssd["state"] != "ok":
        state = "is only read" if ssd["state"] == "read_only" else "is not used any more"
        cure = ssd.get("cure") or "start the peer again"
        return broken(f"{name}: ssd", f"{state}: {text}", ssd["why"], cure)
    if ssd["damaged"]:
        what = f"{text}; {counted(ssd['damaged'], 'damaged object')}"
        cause = "what was read was not what had been written; other copies were used, if there were any"
        return warning(f"{name}: ssd", what, cause, "if that number grows, replace the disk", **measured)
    return fine(f"{name}: ssd", text, **measured)


def judge_local_peer(document: Mapping[str, Any], own_version: str) -> list[Finding]:
    """A peer on this machine by its statistics document: its problems in its own words, and readings of it that are as
    they should be."""
    peer, cluster = document["peer"], document["cluster"]
    name, software = f"peer {peer['name']}", peer["software"]
    members = counted(cluster["peers"], "live member")
    findings = [fine(name, f"p2pstore {software}, cluster {cluster['name']}, {members}")]
    if "problems" not in peer:
        findings.append(
            skipped(f"{name}: problems", "it is older, and does not say: see its status page")
        )
    problems = [_finding(name, each) for each in peer.get("problems", ())]
    told = {finding.name for finding in problems}
    ahead = peer.get("clock_ahead_seconds")  # of this machine's clock, against the median of the others'
    if ahead is not None and f"{name}: clock" not in told:
        findings.append(_clock(name, ahead))
    if "ssd" in peer and f"{name}: ssd" not in told:
        findings.append(judge_ssd(name, peer["ssd"]))
    if software != own_version:
        cause = "this command and its peer are of different versions"
        cure = "neighbouring versions work together; upgrade the older one"
        findings.append(warning(f"{name}: this command", f"is of p2pstore {own_version}", cause, cure))
    return [*findings, *problems]


def _clock(name: str, ahead: float) -> Finding:
    text = f"{abs(ahead):.3f} s {'ahead of' if ahead > 0 else 'behind'} the other peers'"
    return fine(f"{name}: clock", text, clock_ahead_seconds=ahead)


def _finding(name: str, problem: Mapping[str, str]) -> Finding:
    make = broken if problem["status"] == Status.BROKEN else warning
    return make(f"{name}: {problem['name']}", problem["what"], problem["cause"], problem["cure"])


def absent_local_peer(socket: str, reason: str) -> Finding:
    """The named socket has no peer, or none that this user may ask."""
    cure = "if it is to run, the end of its log says why it ended (`journalctl -u`, peer.log in its state directory)"
    return broken(f"peer at {socket}", "none to talk to", reason, cure)


def silent_local_peer(socket: str, reason: str) -> Finding:
    """The process at the socket does not answer."""
    cure = "it is stopped, hung or overloaded: look at its log; end it and start it again"
    return broken(f"peer at {socket}", "no answer", reason, cure)
