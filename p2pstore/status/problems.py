"""Problems of a running peer: what, why, and what to do. Pure.

The one set of rules for the status page, `stats` and `doctor`, which adds what it finds out about the machine. Nothing
here is secret, but for the addresses in facts that were gathered for this machine's users: the page is public.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from p2pstore.objects import MAX_CLOCK_SKEW_SECONDS, counted, listed
from p2pstore.status.doctor.finding import MAX_TEXT_LETTERS, Finding, Status, broken, shown, warning
from p2pstore.status.doctor.network_rules import judge_ssd

MAX_PROBLEMS: Final = 20
MAX_NAMES: Final = 5
"""Named in one sentence."""
CLOCK_OFF_SECONDS: Final = 1.0
DISTRUST: Final = 3
"""Of 8: probes and suspicions take four times as long, and more."""
LEASED_SHARE: Final = 0.9
FLOORS_PERMILLE: Final = 800
"""From here on removals are slowed down."""
FAILED_PUTS: Final = 0.01
"""Of all."""
OVERLOADED_PERMILLE: Final = 1000
# Drops, failed reads and waits are normal in a cache; rates above these are problems.
DROPPED_PER_SECOND: Final = 1.0
FULL: Final = 0.9
FAILED_READS_PER_SECOND: Final = 0.1
FAILED_READS: Final = 0.05
"""Of all."""
STALLED: Final = 0.01
"""Of all looks at how late the event loop is; and no fewer than:"""
STALLS: Final = 100
FALLBACKS: Final = 10


@dataclass(frozen=True, slots=True)
class FailedCheckpoint:
    """A member could not get a version of this name."""

    name: str
    member: str
    why: str


@dataclass(frozen=True, slots=True)
class Facts:
    """A peer's statistics document, and what is known beside it. `live` counts this peer too; of the dead and suspect
    members some are named. `lately`: growth of the peer's counters over the last `seconds`."""

    peer: Mapping[str, Any]
    seconds: float = 0.0
    lately: Mapping[str, int] = field(default_factory=dict)
    live: int = 1
    dead: Sequence[str] = ()
    dead_count: int = 0
    suspect: Sequence[str] = ()
    suspect_count: int = 0
    versions: Sequence[str] = ()
    failed_checkpoints: Sequence[FailedCheckpoint] = ()

    def total(self, name: str) -> int:
        """A counter since the peer's start."""
        count: int = self.peer["counters"].get(name, 0)
        return count

    def share(self, used: str) -> float:
        """How much of the peer's memory that is, of 1."""
        capacity = self.peer["memory_capacity_bytes"]
        return self.peer[used] / capacity if capacity else 0.0


def problems(facts: Facts) -> list[Finding]:
    """All there are, what is broken first."""
    found = [finding for judge in _JUDGES for finding in judge(facts)]
    return sorted(found, key=lambda finding: finding.status is not Status.BROKEN)


def problem_document(finding: Finding) -> dict[str, str]:
    """One problem as the page shows it."""
    texts = {"what": finding.value, "cause": finding.cause, "cure": finding.cure}
    cut = {name: shown(text, MAX_TEXT_LETTERS) for name, text in texts.items()}
    return {"status": str(finding.status), "name": finding.name, **cut}


def _this_peer(facts: Facts) -> Iterator[Finding]:
    peer = facts.peer
    looked_for = peer["bootstrap_addresses"] and (peer["joined"] or peer["bootstrap_silent"])
    if peer["state"] == "leaving":
        cause = "it was told to: it takes nothing new, and hands its last copies to others"
        cure = "if it is to stay, start it again when it has ended"
        yield warning("leaving", "This peer is leaving", cause, cure)
    elif looked_for and facts.live == 1 and not facts.dead_count + facts.suspect_count:
        yield _alone(facts)
    if facts.lately.get("refused_by_members", 0):
        cause = "it has another cluster key, cluster name or version than they, or is not on their allow list"
        cure = "the log has their words (`refused: ...`); bring it their key file and send it SIGHUP"
        yield broken("refused", f"Other members do not let this peer in{_lately(facts)}", cause, cure)
    if peer["state_problem"]:
        what = f"This peer's state directory cannot be written: {peer['state_problem']}"
        cause = "until it can, a restart forgets what was removed last and whom this peer knows; it goes on otherwise"
        cure = "free some space there (`--state-dir`), or mend its file system: it is tried again every 10 s"
        yield broken("state directory", what, cause, cure)
    if peer["state_damage"]:
        yield warning(
            "state directory",
            "This peer's state directory was damaged when it started",
            "; ".join(peer["state_damage"]),
            "what was lost comes from the other peers as long as this one is connected to any; check the disk, and who "
            "can write to the directory. The next start says so no more",
        )
    yield from _clock(facts)
    yield from _slow_process(facts)


def _alone(facts: Facts) -> Finding:
    """It was to find others. That it never did is worse than that they have gone."""
    joined, bootstrap = facts.peer["joined"], facts.peer.get("bootstrap", ())
    peers = "its bootstrap peer" if facts.peer["bootstrap_addresses"] == 1 else "any bootstrap peer"
    cause = f"it has not heard from {peers} since it started, and serves a cluster of its own"
    if joined:
        cause = "the others have gone, and no peer answers it any more"
    if unreached := facts.peer.get("unreached"):  # private, as the addresses are
        cause += f": {'; '.join(unreached)}"
    address = bootstrap[0] if bootstrap else "HOST:PORT"
    of_them = "" if bootstrap else " with a bootstrap address"
    cure = f"`mooncake-p2p doctor --peer {address}`{of_them}, run on this peer's machine, says why"
    return (warning if joined else broken)("alone", "This peer is alone", cause, cure)


def _clock(facts: Facts) -> Iterator[Finding]:
    peer = facts.peer
    if wrong := peer["wrong_clocks"]:
        cause = "it differs from this machine's and most others' by over 10 s; what is stamped too far ahead is refused"
        cure = "set it right on that machine (`timedatectl`, `chronyc tracking`)"
        yield warning("other clocks", f"The clock of {listed(wrong, MAX_NAMES)} is wrong", cause, cure)
    if peer["clock_problem"]:
        cause = peer["clock_problem"]
        cure = "look at chrony, ntpd or systemd-timesyncd (`timedatectl`, `chronyc tracking`)"
        yield broken("clock", "Nothing can be written through this peer", cause, cure)
        return
    if peer["stamps_ahead_seconds"] > MAX_CLOCK_SKEW_SECONDS:
        what = (
            f"The stamps of this peer are {peer['stamps_ahead_seconds']:,.0f} s ahead of its own clock"
        )
        cause = "its clock was fast before; it is alone, so no peer refuses them yet"
        cure = "nothing is to be done: new stamps are made as soon as another peer has told the time"
        yield warning("clock", what, cause, cure)
    ahead = peer["clock_ahead_seconds"]
    if ahead is None or abs(ahead) < CLOCK_OFF_SECONDS:
        return
    text = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the others"
    cause = "it is not kept in step with theirs; from 10 s on, what this peer writes is refused"
    cure = "look at chrony, ntpd or systemd-timesyncd (`timedatectl`, `chronyc tracking`)"
    yield warning("clock", f"This machine's clock is {text}", cause, cure)


def _slow_process(facts: Facts) -> Iterator[Finding]:
    stalls, looks = facts.lately.get("stalls", 0), facts.lately.get("looks", 0)
    if stalls >= max(STALLS, STALLED * looks):
        what = f"This peer's event loop stalled {counted(stalls, 'time')} for over 0.1 s{_lately(facts)}"
        cause = "it gets too little CPU, its memory is swapped, or something in it takes too long; all who ask it wait"
        cure = "look at the machine's load and the cgroup's CPU limit; else report it (`mooncake-p2p support-bundle`)"
        yield warning("stalls", what, cause, cure)
    if facts.peer["gossip"]["local_health"] > DISTRUST:
        cause = (
            "its probes fail, or others accuse it: it gets too little CPU, or its network loses packets"
        )
        cure = "look at the machine's load, and for dropped packets (`ip -s link`)"
        yield warning("gossip", "This peer does not trust its own view of the others", cause, cure)
    if (load := facts.peer["load_permille"]) >= OVERLOADED_PERMILLE:
        cause = f"it takes {load / 10:.0f} % of a core, or of its upload slots"
        cure = "let more peers hold what is read most (`put --replicas`); see the hottest objects below"
        yield warning("load", "This peer is busier than it can be", cause, cure)


def _members(facts: Facts) -> Iterator[Finding]:
    if facts.dead_count > facts.live:
        what = f"Of {facts.dead_count + facts.live:,} members this peer reaches {facts.live:,}"
        cause = "more are dead than alive, as it looks from here: its network is broken, or the others'"
        cure = "ask another peer's page; on this machine, `mooncake-p2p doctor --peer HOST:PORT` checks the way"
        yield broken("members", what, cause, cure)
    elif facts.dead_count:
        names = listed(facts.dead, MAX_NAMES, facts.dead_count)
        what = f"{counted(facts.dead_count, 'member is', 'members are')} dead: {names}"
        cause = "ended without leaving, or cut off; objects that no other peer held cannot be read until it is back"
        cure = (
            "start it again; `mooncake-p2p doctor --peer HOST:PORT` on this machine checks the way to it"
        )
        yield warning("members", what, cause, cure)
    if facts.suspect_count:
        names = listed(facts.suspect, MAX_NAMES, facts.suspect_count)
        what = f"{counted(facts.suspect_count, 'member does', 'members do')} not answer: {names}"
        cause = "others are asked whether it is dead; that takes some seconds"
        cure = "wait; if it comes again and again, its machine or the network loses packets or stalls"
        yield warning("members", what, cause, cure)
    if refused := facts.peer["members_refused"]:
        cause = "there are more than a cluster may have"
        cure = "make two clusters of it (`--cluster`)"
        yield broken("members", f"{refused:,} members were left out", cause, cure)
    if len(facts.versions) > 1:
        what = f"Members run different versions: {listed(facts.versions, MAX_NAMES)}"
        cause = "an upgrade is under way, or stopped half-way"
        cure = "neighbouring versions work together; upgrade the older ones"
        yield warning("versions", what, cause, cure)


def _copies(facts: Facts) -> Iterator[Finding]:
    dropped = facts.lately.get("last_copies_dropped", 0)
    if dropped > DROPPED_PER_SECOND * facts.seconds and facts.share("memory_used_bytes") >= FULL:
        what = f"{counted(dropped, 'object')} that no other peer held had to go{_lately(facts)}"
        cause = "memory is full of objects in use, and there is no SSD, or too little, for the rest"
        cure = "more `--memory`, an `--ssd`, or more peers; what must stay can be pinned (`mooncake-p2p pin`)"
        yield warning("data lost", what, cause, cure)
    if lacking := facts.peer["repair"]["lacking"]:
        what = f"{counted(lacking, 'object here has', 'objects here have')} fewer copies than wanted"
        cause = "holders were lost, or had no room; others are asked to make copies, one after the other"
        cure = "wait; if the number stays, no other peer has room: more `--memory`, or more peers"
        yield warning("copies", what, cause, cure)
    if (leased := facts.share("leased_bytes")) > LEASED_SHARE:
        cause = "programs hold views of nearly all of it, so that nothing else has room"
        cure = "let them go of views sooner, or give the peer more `--memory`"
        yield warning("leases", f"{100 * leased:.0f} % of this peer's memory are leased", cause, cure)
    failed = facts.lately.get("client_puts_failed", 0)
    if failed > FAILED_PUTS * (failed + facts.lately.get("client_puts", 0)):
        cause = "mostly no room for the value here or elsewhere, because leases and hard pins hold what is there"
        cure = "the log and `mooncake-p2p stats --slow` on its machine say more"
        yield warning("puts", f"{counted(failed, 'put')} failed{_lately(facts)}", cause, cure)
    lately, spoilt = facts.lately.get("objects_spoilt", 0), facts.total("objects_spoilt")
    if lately or spoilt:
        spoilt, when = (lately, _lately(facts)) if lately else (spoilt, " since it started")
        what = f"{counted(spoilt, 'object was', 'objects were')} spoilt in this peer's memory{when}"
        cause = "a client wrote where it must not, or the machine's memory is faulty; nothing wrong was delivered"
        cure = "look for memory errors (`dmesg`, EDAC), and for programs that write through stale views"
        yield (broken if lately else warning)("memory", what, cause, cure)
    if facts.total("memory_restored"):
        what = "A client wrote into the part of this peer's memory that only the peer may write"
        cause = "it was restored, and objects that could not be found for a while can be again"
        cure = "look for programs that write through stale views, or past the end of their buffers"
        yield warning("memory", what, cause, cure)


def _floors(facts: Facts) -> Iterator[Finding]:
    used, waited_for = facts.peer["floors_permille"], facts.peer["floors_wait_for"]
    if used >= FLOORS_PERMILLE:
        cause = "more keys are removed and overwritten than all peers can confirm to have heard of"
        cure = "wait, or remove less; whole namespaces are removed by one `mooncake-p2p flush`"
        if waited_for:
            cause = f"{listed(waited_for, MAX_NAMES)} did not confirm to have heard of them"
            cure = (
                "look at their clocks, load and version; living ones are waited for ten minutes, and an hour where "
                "most members are gone"
            )
        what = f"Removals are slowed down: {used / 10:.0f} % of the room to remember them is used"
        yield warning("removals", what, cause, cure)
    if disbelieved := facts.peer["floors_disbelieved"]:
        names = listed(disbelieved, MAX_NAMES)
        yield warning(
            "removals",
            f"{names} forgot removals of which this peer has not heard",
            "it is faulty or hostile; or this peer was not waited for, having confirmed no removals for ten minutes. "
            "Too few members say the same: they are not believed, and nothing is discarded",
            "look in its log and in this peer's; if it is right, this peer may show what was removed: restart this one "
            "after five minutes",
        )
    if distrusted := facts.total("horizons_missed"):
        what = f"This peer discarded older objects {counted(distrusted, 'time')} since it started"
        cause = "it was out of touch longer than others remember which keys were removed"
        cure = "look in the log for how long its network or process stood still; what others hold is not concerned"
        yield warning("removals", what, cause, cure)


def _kept(facts: Facts) -> Iterator[Finding]:
    if damaged := facts.total("kept_objects_damaged"):
        what = f"{counted(damaged, 'object')} of the kept memory {_were(damaged)} damaged when this peer started"
        cause = "something wrote to its file, or the memory is faulty; they were dropped, and copies elsewhere are good"
        cure = (
            "look for what else uses that file (`--memory-path`), and for memory errors (`dmesg`, EDAC)"
        )
        yield warning("kept memory", what, cause, cure)


def _transports(facts: Facts) -> Iterator[Finding]:
    fallbacks = facts.lately.get("transport_fallbacks", 0)
    if fallbacks >= FALLBACKS:
        what = f"A better transport gave way to a worse one {counted(fallbacks, 'time')}{_lately(facts)}"
        cause = "RDMA or shared memory to some peer does not work; reads go on by TCP, slower"
        cure = "the log says which and why; `mooncake-p2p doctor --peer HOST:PORT` checks the way"
        yield warning("transports", what, cause, cure)
    failed, came = facts.lately.get("in_failures", 0), facts.lately.get("in_objects", 0)
    if failed > FAILED_READS_PER_SECOND * facts.seconds and failed > FAILED_READS * (failed + came):
        what = f"{failed:,} of {failed + came:,} reads from other peers failed{_lately(facts)}"
        cause = "a holder is slow or gone, or the way to it loses packets; readers go on at the next one, later"
        cure = "`mooncake-p2p peers --reads` says with whom and by which transport; restart one that fails all"
        yield warning("reads", what, cause, cure)
    if lost := facts.peer.get("rdma", {}).get("lost_devices"):
        cause = "reads go by its other devices, or by TCP"
        cure = "`dmesg` and `rdma link` show what became of it; the peer uses it again after a restart"
        yield warning("rdma", f"{counted(lost, 'RDMA device')} of this peer failed", cause, cure)


def _ssd(facts: Facts) -> Iterator[Finding]:
    if (ssd := facts.peer.get("ssd")) is None:
        return
    finding = judge_ssd("this peer", ssd)
    if finding.status is not Status.OK:
        what = f"The SSD of this peer {finding.value.partition(':')[0]}"
        if finding.status is Status.WARNING:
            damaged = ssd["damaged"]
            what = f"{counted(damaged, 'object')} on the SSD of this peer {_were(damaged)} damaged"
        yield Finding("ssd", finding.status, what, finding.cause, finding.cure)


def _checkpoints(facts: Facts) -> Iterator[Finding]:
    by_name: dict[str, list[FailedCheckpoint]] = {}
    for failed in facts.failed_checkpoints:
        by_name.setdefault(failed.name, []).append(failed)
    for name, members in by_name.items():
        names = listed([each.member for each in members], MAX_NAMES)
        what = f"Checkpoint {name} failed on {counted(len(members), 'member')}: {names}"
        cause = members[0].why or "it does not say why"
        cure = "mend that on the member's machine and fetch again: what is there already is kept"
        yield warning("checkpoint", what, cause, cure)


def _places(facts: Facts) -> Iterator[Finding]:
    for what in ("control", "data"):
        places, refused = facts.peer["places"][what], facts.lately.get(f"{what}_refused", 0)
        if places["taken"] < FULL * places["limit"] and not refused:
            continue
        most = places["largest"]
        host = f" at {most['host']}" if most.get("host") else ""
        yield (broken if refused else warning)(
            f"{what} connections",
            f"{places['taken']:,} of {places['limit']:,} places for {what} connections are taken"
            + (f"; {refused:,} were refused{_lately(facts)}" if refused else ""),
            f"{shown(most['name']) or 'the largest member'} has {most['places']:,} of them; one host{host} has "
            f"{most['host_places']:,}",
            "restart that member, or take it off the allow list and send SIGHUP; unused ones make room by "
            "themselves",
        )
    ended = facts.lately.get("hoarders_ended", 0)
    if ended:
        cause = "a member sends requests that it does not finish, or does not read its answers"
        cure = "the log says which one (`held here`); restart it, or take it off the allow list and send SIGHUP"
        cut = f"{counted(ended, 'connection was', 'connections were')} cut{_lately(facts)}"
        yield warning("hoarding", f"{cut} for the memory held for them", cause, cure)


_JUDGES: Final = (
    _this_peer,
    _members,
    _copies,
    _floors,
    _kept,
    _ssd,
    _transports,
    _places,
    _checkpoints,
)


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _lately(facts: Facts) -> str:
    minutes = round(facts.seconds / 60)
    return f" in the last {counted(minutes, 'minute')}" if minutes else " in the last minute"
