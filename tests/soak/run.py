"""A soak: real peers on hosts of their own, under load and faults, watched all the time and taken apart at the end."""

import math
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Final

from p2pstore.errors import P2PStoreError
from tests.soak.checkpoints import version_in_use
from tests.soak.events import Events, Traffic
from tests.soak.faults import CLEAN, DRAIN_SECONDS, LEAVES, LIVES, SERVES, Faults, Processes
from tests.soak.faults import INVARIANTS as OF_PROCESSES
from tests.soak.flatness import Growth, GrowthLimit, growth_of
from tests.soak.heartbeat import Heartbeat
from tests.soak.known_lines import why_known
from tests.soak.last_look import INVARIANTS as OF_THE_END
from tests.soak.last_look import LastLook
from tests.soak.ledger import INVARIANTS as OF_CLIENTS
from tests.soak.ledger import SPREAD_SECONDS, Complaint, Ledger, Limits
from tests.soak.observer import KEPT_LIMIT, Observer, Sample, pinned_in
from tests.soak.peers import ROLES, Peer, error_lines, left_over, listening
from tests.soak.plan import Fault, FaultPlan, plan_faults
from tests.soak.stage import Stage, wait_for
from tests.soak.timeline import Timeline

TICK_SECONDS: Final = 0.1
SETTLE_SECONDS: Final = 40.0
"""After the last fault, until all see all (scaled)."""
READY_SECONDS: Final = 30.0
"""(scaled)"""
END_SECONDS: Final = 15.0
"""(scaled)"""
QUIET_LOAD_SECONDS: Final = 20.0
"""Time of undisturbed load after the last fault; in short runs a sixth of the run."""
UPDATE_SECONDS: Final = 60.0
"""Until an update that begins then is in use everywhere; one begins every half minute (scaled)."""
OBSERVER_SECONDS: Final = 20.0

SETTLES: Final = "all see all"
LOGS: Final = "no error is logged"
CLIENTS: Final = "no client ends by itself"
FLAT: Final = "nothing grows"
HANDED: Final = "who leaves hands over"
FOLLOWS: Final = "updates reach followers"
INVARIANTS: Final = (
    *OF_CLIENTS,
    *OF_PROCESSES,
    HANDED,
    FOLLOWS,
    SETTLES,
    LOGS,
    CLIENTS,
    *OF_THE_END,
    FLAT,
)

GROWTH_LIMITS: Final = {
    "python_blocks": GrowthLimit(40_000, 0.0, 800_000),
    "resident_bytes": GrowthLimit(12e6, 0.06, 160e6),
    "descriptors": GrowthLimit(6, 0.10, 200),
    "threads": GrowthLimit(4, 0.25, 60),
    "memfds": GrowthLimit(1, 0.0, 12),
    "mappings": GrowthLimit(40, 0.10, 800),
}
"""Of the second half of each life. Blocks of memory that Python uses rise by garbage until a full collection, of some
20,000 containers. The heap of C gives back no room below its newest block: it keeps that of the largest burst, an
update of the checkpoint, of 7 MB, and may keep it twice."""
LIFE_SECONDS: Final = 120.0
"""Shorter lives say nothing of what grows."""


@dataclass(frozen=True)
class Setting:
    """Settings of a run. `patience` scales the limits marked as scaled: 1 for a machine with cores to spare."""

    seed: int
    seconds: float
    rate: float
    patience: float
    output: Path


@dataclass(frozen=True)
class Grown:
    """How something of one life of a peer grew, and whether it may."""

    peer: int
    what: str
    growth: Growth
    allowed: bool


@dataclass
class Outcome:
    """All that came of a run. `complaints` is empty when every promise was kept. Times are of one clock."""

    setting: Setting
    plan: FaultPlan
    began: float = 0.0
    """The load did."""
    ended: float = 0.0
    complaints: list[Complaint] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    traffic: Traffic = field(default_factory=Traffic)
    done: list[tuple[float, float, Fault]] = field(default_factory=list)
    """Faults as they happened: from, to."""
    samples: dict[tuple[int, int], list[Sample]] = field(default_factory=lambda: defaultdict(list))
    """By peer and life (its process id)."""
    settled: list[float] = field(default_factory=list)
    """Seconds that it took all to see all, in each calm."""
    known_lines: Counter[str] = field(default_factory=Counter)
    """Errors that were logged, by their known cause."""
    standstills: list[tuple[float, float]] = field(default_factory=list)
    longest_seconds: float = 0.0
    grown: list[Grown] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


class Soak:
    """One run on a stage."""

    def __init__(self, setting: Setting, stage: Stage, tell: Callable[[str], None]) -> None:
        hosts = [role.host for role in ROLES]
        steady = [number for number, role in enumerate(ROLES) if role.steady]
        self.outcome = Outcome(setting, plan_faults(setting.seed, setting.seconds, hosts, steady))
        self._setting = setting
        self._stage = stage
        self._tell_line = tell
        self._timeline = Timeline(len(ROLES))
        limits = Limits(operation=20 * setting.patience, reach=10 * setting.patience)
        askers = frozenset(number for number, role in enumerate(ROLES) if role.partitioned)
        self._ledger = Ledger(self._timeline, limits, askers)
        self._events = Events(self._ledger, self._timeline)
        self.outcome.traffic = self._events.traffic
        self._processes = Processes(
            stage,
            self._timeline,
            self._events,
            self._complain,
            seed=setting.seed,
            rate=setting.rate,
            ready_seconds=READY_SECONDS * setting.patience,
            end_seconds=END_SECONDS * setting.patience,
        )
        self._faults = Faults(
            self._processes, self._timeline, hosts, self._disturbed, self._leaves, self._tell
        )
        self._queue: Queue[Sample] = Queue()
        self._coming: list[Sample] = []
        self._latest: dict[int, Sample] = {}
        self._observers: list[Observer] = []
        self._log_bytes: dict[Path, int] = defaultdict(int)
        self._evicted: dict[int, tuple[int, int]] = {}
        self._quiet_since = math.inf
        self._settled = False
        self._heartbeat = Heartbeat()
        self._turns = 0
        self._told = 0

    def run(self) -> Outcome:
        """All of it. Raises `SoakFailed` when it cannot even begin."""
        outcome = self.outcome
        self._begin()
        outcome.began = time.monotonic()
        self._faults.begin(outcome.plan.faults)
        end = outcome.began + self._setting.seconds
        self._faults.end_by(end)
        while time.monotonic() < end or not (self._faults.over and self._processes.all_serve):
            self._turn()
            if time.monotonic() > end + 10 * SETTLE_SECONDS * self._setting.patience:
                break  # it was complained of
        self._tell("faults are over")
        self._settle_and_load()
        self._end_clients()
        self._finish()
        return outcome

    # --- the beginning ---------------------------------------------------------------------------

    def _begin(self) -> None:
        first, *others = sorted(self._stage.peers, key=lambda peer: not peer.role.steady)
        patience = self._setting.patience
        for group in ([first], others):
            for peer in group:
                self._processes.start(peer)
            if not wait_for(lambda: self._serve(group), READY_SECONDS * patience):  # noqa: B023 - it is called here
                raise SoakFailed("not all peers are ready at the beginning")
        self._observers = [Observer(peer, self._queue) for peer in self._stage.peers]
        self._quiet_since = time.monotonic()
        if not wait_for(self._sees_all_by_now, SETTLE_SECONDS * patience):
            raise SoakFailed("the peers do not find each other")
        for peer in self._stage.peers:
            self._processes.start_client(peer)

    def _serve(self, peers: list[Peer]) -> bool:
        self._processes.look()
        return all(self._processes.serves(peer) for peer in peers)

    def _sees_all_by_now(self) -> bool:
        self._take_samples(time.monotonic())
        return self._all_see_all()

    # --- turns -----------------------------------------------------------------------------------

    def _turn(self) -> None:
        now = time.monotonic()  # of what came before, all standstills are known below
        for began, ended in self._heartbeat.gaps():
            self._timeline.stood_still(began, ended)
            self.outcome.standstills.append((began, ended))
            self._faults.put_off(ended - began)
            self._processes.put_off(ended - began)
            self._tell(f"the machine stood still for {ended - began:.1f} s")
        self._faults.turn()
        self._processes.look()
        self._take_samples(now)
        self._see_whether_calm()
        self._turns += 1
        if self._turns % 20 == 0:
            self._look_at_logs()
            self._look_at_clients(now)
        self._pass_complaints()
        time.sleep(TICK_SECONDS)

    def _take_samples(self, now: float) -> None:
        """Those that were answered before `now`, and what clients had written by then."""
        if not all(observer.works for observer in self._observers):
            raise SoakFailed("an observer ended by itself: stderr says why")
        with suppress(Empty):
            while True:
                self._coming.append(self._queue.get_nowait())
        # First: an object missing in a sample was removed before the sample, and the ledger must know that.
        self._events.take(now)
        ready = [sample for sample in self._coming if sample.at <= now]
        self._coming = [sample for sample in self._coming if sample.at > now]
        for sample in ready:
            self._latest[sample.peer] = sample
            self.outcome.samples[sample.peer, sample.pid].append(sample)
            self._ledger.listed(sample.peer, sample.pinned, sample.asked, sample.answered)
            evicted = int(sample.statistics.get("ssd", {}).get("evicted_objects", 0))
            if evicted > self._evicted.get(sample.peer, (sample.pid, 0))[1]:
                self._ledger.reclaimed(sample.peer, sample.at)
            self._evicted[sample.peer] = (sample.pid, evicted)

    def _disturbed(self) -> None:
        self._ledger.calm_ends(time.monotonic())
        self._quiet_since = math.inf
        self._settled = False

    def _see_whether_calm(self) -> None:
        now = time.monotonic()
        if not (self._faults.quiet and self._processes.all_serve):
            self._quiet_since = math.inf
            return
        if self._quiet_since == math.inf:
            self._quiet_since = now
        if not self._settled and self._all_see_all():
            self._settled = True
            took = now - self._quiet_since
            self.outcome.settled.append(took)
            self.outcome.checked[SETTLES] += 1
            self._ledger.calm_begins(now)
            self._tell(f"all see all, {took:.1f} s after the last disturbance")
        limit = SETTLE_SECONDS * self._setting.patience
        waited = now - self._quiet_since - self._timeline.standstill(self._quiet_since, now)
        if not self._settled and waited > limit:
            self._settled = True
            seen = {peer: sorted(sample.alive) for peer, sample in self._latest.items()}
            self._complain(SETTLES, f"not {limit:g} s after the last disturbance: {seen}")

    def _all_see_all(self) -> bool:
        """By samples that were taken since nothing is disturbed."""
        names = {peer.name for peer in self._stage.peers}
        return all(
            peer.number in self._latest
            and self._latest[peer.number].at > self._quiet_since
            and self._latest[peer.number].alive == names
            for peer in self._stage.peers
        )

    def _look_at_logs(self) -> None:
        for peer in self._stage.peers:
            if not peer.log.exists():
                continue
            since = self._log_bytes[peer.log]
            lines, self._log_bytes[peer.log], count = error_lines(peer.log, since)
            self.outcome.checked[LOGS] += count
            for line in lines:
                why = why_known(line)
                if why is None:
                    self._complain(LOGS, f"{peer.name}: {line[:1000]}")
                else:
                    self.outcome.known_lines[why] += 1

    def _look_at_clients(self, now: float) -> None:
        for hanging in self._events.look_for_hangs(now):
            if hanging.number in self._processes.clients:
                self._processes.clients[hanging.number][0].signal(signal.SIGUSR1)
        for text in self._processes.look_at_clients():
            self._complain(CLIENTS, text)
        for number, (process, _) in list(self._processes.clients.items()):
            if process.exit_status is not None:
                self._processes.kill_client(number)
                self._processes.start_client(self._stage.peers[number])

    def _leaves(self, peer: Peer) -> Callable[[], None]:
        """A peer is about to hand over what it has: what it has pinned must be somewhere when it has gone."""
        began, log_bytes = time.monotonic(), peer.log.stat().st_size
        try:
            with peer.connect() as client:
                page = client.list_keys(local=True, pinned=True, limit=KEPT_LIMIT)
        except P2PStoreError:
            return lambda: None  # it is complained of if it does not end
        pinned = set(pinned_in(page))

        def has_left() -> None:
            quiet = self._timeline.quiet(began - SPREAD_SECONDS, time.monotonic(), but=peer.number)
            if not quiet or left_over(peer.log, log_bytes):
                return
            there = set()
            for other in self._stage.peers:
                if self._processes.serves(other):
                    with other.connect() as client:
                        page = client.list_keys(local=True, pinned=True, limit=KEPT_LIMIT)
                    there |= set(pinned_in(page))
            self._events.take(time.monotonic())
            self.outcome.checked[HANDED] += len(pinned)
            for key in sorted(pinned - there):
                if self._ledger.is_kept(key):
                    self._complain(HANDED, f"{key!r} was at {peer.name}, which left, and is nowhere")

        return has_left

    # --- the end ---------------------------------------------------------------------------------

    def _settle_and_load(self) -> None:
        deadline = time.monotonic() + 2 * SETTLE_SECONDS * self._setting.patience
        while not self._settled and time.monotonic() < deadline:
            self._turn()
        deadline = time.monotonic() + min(QUIET_LOAD_SECONDS, self._setting.seconds / 6)
        while time.monotonic() < deadline:
            self._turn()
        self._follow_to_the_end()

    def _follow_to_the_end(self) -> None:
        """An update of the checkpoint that begins when nothing is disturbed comes into use at all who follow."""
        began = time.monotonic()
        deadline = began + UPDATE_SECONDS * self._setting.patience
        while time.monotonic() < deadline:
            self._turn()
            version = self._events.last_version
            if self._events.last_update_at > self._quiet_since and all(
                version_in_use(peer.follows) == version
                for peer in self._stage.peers
                if peer.role.follows
            ):
                self.outcome.checked[FOLLOWS] += sum(role.follows for role in ROLES)
                self._tell(f"all followers use a new version after {time.monotonic() - began:.1f} s")
                return
        used = {
            peer.name: version_in_use(peer.follows) for peer in self._stage.peers if peer.role.follows
        }
        self._complain(FOLLOWS, f"the newest version is {self._events.last_version}, used are {used}")

    def _end_clients(self) -> None:
        self.outcome.ended = time.monotonic()
        clients = list(self._processes.clients.items())
        for _, (process, _) in clients:
            process.signal(signal.SIGTERM)
        limit = 30 * self._setting.patience
        wait_for(lambda: all(p.exit_status is not None for _, (p, _) in clients), limit)
        for number, (process, client) in clients:
            if process.exit_status is None:
                process.signal(signal.SIGUSR1)
                time.sleep(1.0)  # it writes down where it is
                self._complain(CLIENTS, f"the client of peer{number} has not ended in {limit:g} s")
            elif process.exit_status:
                self._complain(
                    CLIENTS, f"the client of peer{number} ended with status {process.exit_status}"
                )
            process.kill()
            client.gone = True
        self._processes.clients.clear()
        self._events.take(time.monotonic())

    def _finish(self) -> None:
        outcome = self.outcome
        look = LastLook(
            self._stage.peers, self._ledger, self._complain, outcome.checked, self._tell,
            patience=self._setting.patience, seed=self._setting.seed,
        )  # fmt: skip
        look.repair()
        look.agree()
        look.read_all()
        look.empty()
        outcome.figures |= look.figures
        for observer in self._observers:
            observer.end(OBSERVER_SECONDS)
        self._observers.clear()
        self._take_samples(time.monotonic())
        self._end_peers()
        self._look_at_logs()
        self._judge_growth()
        self._heartbeat.end()
        outcome.checked += self._ledger.checked
        outcome.checked[SERVES] = outcome.checked[LIVES] = self._processes.lives
        outcome.checked[CLIENTS] = len(self._events.clients)
        outcome.longest_seconds = self._ledger.longest_seconds
        outcome.done = self._faults.done
        self._pass_complaints()

    def _end_peers(self) -> None:
        for peer in self._stage.peers:
            self._processes.ask_to_end(peer, lambda: None, DRAIN_SECONDS)
        limit = DRAIN_SECONDS + END_SECONDS * self._setting.patience + 5
        wait_for(self._nobody_runs, limit)
        self.outcome.checked[LEAVES] += self._processes.ended_cleanly
        self.outcome.checked[CLEAN] += self._processes.ended_cleanly
        for host in self._stage.network.hosts:
            for address in listening(host):
                self._complain(CLEAN, f"somebody still listens at {address} of {host.address}")
        for path in Path("/dev/shm").iterdir():
            self._complain(CLEAN, f"{path} is left")

    def _nobody_runs(self) -> bool:
        self._processes.look()
        return not any(peer.running for peer in self._stage.peers)

    def _judge_growth(self) -> None:
        for (peer, _), samples in self.outcome.samples.items():
            load = [each for each in samples if each.at <= self.outcome.ended]
            if not load or load[-1].at - load[0].at < LIFE_SECONDS:
                continue
            for what, limit in GROWTH_LIMITS.items():
                growth = growth_of([(each.at, each.resources[what]) for each in load])
                if growth is None:
                    continue
                self.outcome.checked[FLAT] += 1
                allowed = limit.allows(growth)
                self.outcome.grown.append(Grown(peer, what, growth, allowed))
                if not allowed:
                    self._complain(
                        FLAT,
                        f"{what} of peer{peer} rises by {growth.rise:,.0f} in {growth.seconds:.0f} s, from about "
                        f"{growth.median:,.0f}",
                    )

    # --- telling ---------------------------------------------------------------------------------

    def _complain(self, invariant: str, text: str) -> None:
        complaint = Complaint(invariant, time.monotonic(), text)
        self.outcome.complaints.append(complaint)
        self._tell(f"BROKEN {invariant}: {text}")

    def _pass_complaints(self) -> None:
        fresh = self._ledger.complaints[self._told :]
        self._told += len(fresh)
        for complaint in fresh:
            self.outcome.complaints.append(complaint)
            self._tell(f"BROKEN {complaint.invariant}: {complaint.text}")

    def _tell(self, line: str) -> None:
        since = time.monotonic() - self.outcome.began if self.outcome.began else 0.0
        self._tell_line(f"{since:7.1f} s  {line}")


class SoakFailed(Exception):
    """It cannot be run here, or did not get to its load; says why."""
