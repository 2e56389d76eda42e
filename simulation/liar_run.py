"""Whole peers, one of which lies: what the honest ones put stays, is found, and is what they put.

The honest peers' clients put, overwrite, remove and read keys; the liar does nothing of that, by right or not, but lies
(`lies`) from some moment on, in one way or in several. What must hold: no read returns bytes that were never put under
that key; reads of what a living honest peer holds succeed, 99 in 100, once the attack has gone on for ten seconds; and
when the liar is gone, every honest peer reads the newest value of everything that was put and not removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final

from p2pstore.core.operation import PutEnd
from p2pstore.errors import P2PStoreError
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.objects import ZERO_VERSION, Version, key_digest, namespace_digest
from p2pstore.put_facts import PutStatus
from simulation.cluster import NAMESPACE, SimulatedCluster, SimulatedPeer
from simulation.liar import LyingPeer
from simulation.lies import BEHAVIOURS, Behaviour
from simulation.network import Faults
from simulation.scenario import ScenarioOutcome, ScenarioRun

STEP_SECONDS: Final = 0.1
BELIEVED_SECONDS: Final = 10.0
"""Seconds for which an attack may harm reads."""
GET_SECONDS: Final = 10.0
"""A read that takes longer has failed."""
GONE_SECONDS: Final = 30.0
"""This long after a removal, no peer serves what it forbids."""
FLOORS_SECONDS: Final = 150.0
"""Shortest attack on the dropping of floors: a minute passes before the first ones may go."""
LET_GO_SECONDS: Final = 0.001
"""After a read its copy goes: others may have waited for the same one."""
MAX_WAIT_SECONDS: Final = 10.0
"""Of removals, because floors are crowded."""
MAX_BEHAVIOURS: Final = 4
MIN_AVAILABLE: Final = 0.99


@dataclass(frozen=True, slots=True)
class LiarScenario:
    """Times in virtual seconds. `behaviour` is one of `lies.BEHAVIOURS`, 'none' for an honest fifth peer, or '' for
    one or several by seed."""

    peers: int = 5
    seconds: float = 25.0
    """How long the attack goes on."""
    behaviour: str = ""
    keys: int = 200
    operations_per_second: float = 20.0
    largest_value_bytes: int = 2_000
    floors_per_second: float = 25.0
    """Keys removed besides, which no peer holds: floors are crowded by them."""
    floor_limit: int = 2_000
    floor_kept_seconds: float = 10.0
    settle_seconds: float = 40.0
    """From the liar's end to the last reads."""
    faults: Faults = field(default_factory=Faults)


@dataclass(slots=True)
class LiarOutcome(ScenarioOutcome):
    behaviours: list[str] = field(default_factory=list)
    """How the liar behaved, each with its times."""
    lies: int = 0
    puts: int = 0
    puts_failed: int = 0
    """Of those ten seconds after the attack began."""
    reads: int = 0
    """Of what a living honest peer holds and the reader does not, ten seconds after the attack began."""
    reads_failed: int = 0
    wrong: int = 0
    """Reads that gave bytes never put under that key, or removed long ago."""
    lost: int = 0
    """Keys whose newest value some honest peer could not read in the end."""
    longest_read_seconds: float = 0.0
    longest_wait_seconds: float = 0.0
    """For removals."""
    most_floors: int = 0
    most_members: int = 0
    """That an honest peer believed alive."""
    most_locations: int = 0


@dataclass(slots=True)
class _Key:
    """What honest clients did with one key."""

    values: dict[bytes, float] = field(default_factory=dict)
    """All that was ever put, and until when it may be read; infinite while it was not removed."""
    newest: bytes = b""
    version: Version = ZERO_VERSION
    """What must be there; nothing while this is empty."""
    changing: bool = False
    """A put or a removal is under way."""
    changes: int = 0


class LiarRun(ScenarioRun):
    """Runs one scenario from one seed."""

    def __init__(self, seed: int, scenario: LiarScenario) -> None:
        self.scenario = scenario
        self.outcome = LiarOutcome(seed)
        self.liar_number = Random(seed).randrange(scenario.peers)
        super().__init__(self.outcome, scenario.peers, salt=0x11A12, make_peer=self._make_peer)
        liar = self.cluster.peers[self.liar_number]
        assert isinstance(liar, LyingPeer)
        self.liar = liar
        self.honest = [peer for peer in self.cluster.peers if peer is not liar]
        self._keys = {f"key-{number}": _Key() for number in range(scenario.keys)}
        self._values = 0
        self._lies: list[Behaviour] = []
        self._floors_due = 0.0
        self._attack_at = float("inf")
        self._seconds = scenario.seconds
        self._plan = self._choose_behaviours()
        self._example = ""
        """One read that failed."""

    def _make_peer(self, cluster: SimulatedCluster, number: int, memory_bytes: int) -> SimulatedPeer:
        kind = LyingPeer if number == self.liar_number else SimulatedPeer
        return kind(cluster, number, memory_bytes)

    def _choose_behaviours(self) -> list[tuple[str, float, float]]:
        """(name, begin, end) after the attack's beginning."""
        rng, names = self.rng, [self.scenario.behaviour]
        if names == ["none"]:
            return []
        if names == [""]:
            count = 1 if rng.random() < 0.5 else rng.randint(2, MAX_BEHAVIOURS)
            names = rng.sample(sorted(BEHAVIOURS), count)
        if "floors" in names:
            self._seconds = max(self._seconds, FLOORS_SECONDS)
            names = ["floors", *(name for name in names if name != "floors")]
        seconds = self._seconds
        plan = [(names[0], 0.0, seconds)]
        for name in names[1:]:
            begin = rng.uniform(0.0, seconds / 2)
            plan.append((name, begin, rng.uniform(begin + 2.0, seconds)))
        return plan

    # --- the course --------------------------------------------------------------------------

    def go(self) -> LiarOutcome:
        """Boot, put, attack under work, end the liar, read everything everywhere."""
        self._configure()
        late = self.rng.choice(self.honest[1:]) if self.rng.random() < 0.5 else None
        self._boot_but(late)
        for key in sorted(self._keys)[: self.scenario.keys // 2]:
            self._put(self.rng.choice(self._running()), key)
            self.run_for(0.02)
        self.run_for(1.0)
        self.network.faults = self.scenario.faults
        self._attack(late)
        self._end()
        self._check_final_reads()
        self._count()
        self.close_books()
        return self.outcome

    def _configure(self) -> None:
        partitioned = any(name == "homes" for name, _, _ in self._plan) or self.rng.random() < 0.25
        self.cluster.gossip_config = GossipConfig(
            cluster="sim",
            directory_setting="partitioned" if partitioned else "auto",
            cluster_record_limit=self.scenario.floor_limit,
            floor_kept_seconds=self.scenario.floor_kept_seconds,
        )
        for peer in self.honest:
            peer.keeps_memory = True

    def _boot_but(self, late: SimulatedPeer | None) -> None:
        """Start all but one, which comes while the attack goes on."""
        for peer in self.cluster.peers:
            if peer is not late:
                self._boot(peer)
        self.run_for(5.0)

    def _boot(self, peer: SimulatedPeer) -> None:
        others = [other.address for other in self.cluster.peers if other is not peer]
        peer.boot(others)

    def _running(self) -> list[SimulatedPeer]:
        return [peer for peer in self.honest if peer.core is not None]

    def _attack(self, late: SimulatedPeer | None) -> None:
        scenario, kernel = self.scenario, self.kernel
        begin = self._attack_at = kernel.now
        for name, start, end in self._plan:
            behaviour_begins = partial(self._begin_lie, name, end - start)
            kernel.at(begin + start, behaviour_begins)
        for _ in range(int(scenario.operations_per_second * self._seconds)):
            kernel.at(begin + self.rng.uniform(0.0, self._seconds), self._operate)
        if late is not None:
            kernel.at(begin + self.rng.uniform(0.0, 8.0), partial(self._boot, late))
        if self.rng.random() < 0.5:
            victim = self.rng.choice([peer for peer in self.honest if peer is not late])
            at = begin + self.rng.uniform(0.0, self._seconds - 8.0)
            kernel.at(at, victim.crash)
            kernel.at(at + self.rng.uniform(0.5, 5.0), partial(self._boot, victim))
        while kernel.now < begin + self._seconds:
            self.run_for(STEP_SECONDS)
            for lie in list(self.liar.lies):
                lie.step()
            self._remove_nothing()
            self._note_sizes()

    def _begin_lie(self, name: str, seconds: float) -> None:
        lie = BEHAVIOURS[name](self.liar, Random(f"{self.outcome.seed} {name}"))
        begun = self.kernel.now - self._attack_at
        self.outcome.behaviours.append(f"{name}{lie.variant} {begun:.1f}-{begun + seconds:.1f} s")
        self.liar.lies.append(lie)
        self._lies.append(lie)
        self.kernel.after(seconds, partial(self._end_lie, lie))

    def _end_lie(self, lie: Behaviour) -> None:
        if lie in self.liar.lies:
            self.liar.lies.remove(lie)
            lie.end()

    def _end(self) -> None:
        """The liar's machine is switched off; operations under way end."""
        for lie in self._lies:
            self._end_lie(lie)
        self.liar.crash()
        self.network.faults = Faults()
        for peer in self.honest:
            if peer.core is None:
                self._boot(peer)
        self.run_for(self.scenario.settle_seconds)

    # --- what clients do ---------------------------------------------------------------------

    @property
    def _counts(self) -> bool:
        """Whether what begins now has to succeed."""
        return self._attack_at + BELIEVED_SECONDS <= self.kernel.now

    def _operate(self) -> None:
        running = self._running()
        peer, choice = self.rng.choice(running), self.rng.random()
        key = f"key-{self.rng.randrange(self.scenario.keys)}"
        if choice < 0.15:
            self._put(peer, key, overwrite=self.rng.random() < 0.3)
        elif choice < 0.2:
            self._remove(peer, key)
        else:
            self._read_elsewhere(key)

    def _put(self, peer: SimulatedPeer, key: str, *, overwrite: bool = False) -> None:
        known = self._keys[key]
        if known.changing:
            return
        self._values += 1
        filler = self.rng.randbytes(self.rng.randrange(self.scenario.largest_value_bytes))
        value = f"{key} {self._values} ".encode() + filler
        counts, held = self._counts, self._holders(key_digest(key, NAMESPACE))
        operation = peer.put(key, value, overwrite=overwrite, replicas=self.rng.choice((1, 1, 2)))
        if operation is None:
            return
        known.values[value] = float("inf")
        known.changing = True
        self.outcome.puts += counts

        def done() -> None:
            known.changing = False
            end = operation.result
            if isinstance(end, PutEnd) and end.status == PutStatus.CREATED:
                known.changes += 1
                if (end.version.clock, end.version.writer) > known.version[:2]:
                    known.newest, known.version = value, end.version
            elif not isinstance(end, PutEnd | P2PStoreError):
                self.problem(f"a put of {key} ended as {end!r}")
            elif not (isinstance(end, PutEnd) and held):
                self.outcome.puts_failed += counts

        life = peer.life
        peer.when_done(operation, done)
        self.kernel.after(30.0, partial(self._give_up, known, peer, life))

    def _give_up(self, key: _Key, peer: SimulatedPeer, life: int) -> None:
        """The process that changed a key is gone: nothing is known of how that ended."""
        if key.changing and peer.life != life:
            key.changing, key.newest = False, b""

    def _remove(self, peer: SimulatedPeer, key: str) -> None:
        known = self._keys[key]
        if known.changing:
            return
        known.changing, known.newest = True, b""
        known.changes += 1
        operation = peer.remove(key)

        def done() -> None:
            known.changing = False
            known.changes += 1
            if operation.result == [True]:  # else no copy was known, and nothing was forbidden
                gone_at = self.kernel.now + GONE_SECONDS
                known.values = {v: min(until, gone_at) for v, until in known.values.items()}

        peer.when_done(operation, done)
        self.kernel.after(30.0, partial(self._give_up, known, peer, peer.life))

    def _holders(self, digest: bytes) -> list[SimulatedPeer]:
        """The honest peers that hold a key now."""
        return [
            peer
            for peer in self._running()
            if peer.core is not None and peer.core.objects.find(digest, self.kernel.now) is not None
        ]

    def _read_elsewhere(self, key: str) -> None:
        """Have a peer that does not hold the key read it, and let go of it again as a read into a buffer does."""
        digest = key_digest(key, NAMESPACE)
        holders = self._holders(digest)
        readers = [peer for peer in self._running() if peer not in holders]
        if not readers:
            return
        reader, known, began = self.rng.choice(readers), self._keys[key], self.kernel.now
        changes = known.changes
        counts = self._counts and bool(holders) and not known.changing
        life, ended = reader.life, [False]

        def done(result: bytes | Exception) -> None:
            ended[0] = True
            if isinstance(result, bytes):
                self._judge(reader, key, result, began)
                self.kernel.after(LET_GO_SECONDS, partial(self._let_go, reader, digest))
            took = self.kernel.now - began
            if counts and known.changes == changes:
                self._count_read(reader, key, result, took)

        def late() -> None:
            if not ended[0] and reader.life == life and counts and known.changes == changes:
                self._count_read(reader, key, TimeoutError("no answer"), GET_SECONDS)

        reader.get(digest, done)
        self.kernel.after(GET_SECONDS, late)

    def _count_read(
        self, reader: SimulatedPeer, key: str, result: bytes | Exception, took: float
    ) -> None:
        if took > GET_SECONDS:
            return  # counted as it became late
        self.outcome.reads += 1
        self.outcome.longest_read_seconds = max(self.outcome.longest_read_seconds, took)
        if not isinstance(result, bytes):
            self.outcome.reads_failed += 1
            if self.outcome.reads_failed <= 3:
                self._example = f"{reader.address} read {key} at {self.kernel.now:.2f} s: {result!r}"

    def _judge(self, reader: SimulatedPeer, key: str, value: bytes, began: float) -> None:
        until = self._keys[key].values.get(value)
        if until is None:
            self.outcome.wrong += 1
            self.problem(f"{reader.address} read bytes of {key} that nobody put")
        elif began > until:
            self.outcome.wrong += 1
            self.problem(f"{reader.address} read a value of {key} that was removed long ago")

    def _let_go(self, reader: SimulatedPeer, digest: bytes) -> None:
        core, now = reader.core, self.kernel.now
        entry = None if core is None else core.objects.find(digest, now)
        if core is not None and entry is not None and entry.soft:
            core.objects.withdraw(entry, now)
            reader.settle()

    def _remove_nothing(self) -> None:
        """Floors of keys that no peer holds, by all honest peers in turn: as many as they may write."""
        self._floors_due += STEP_SECONDS * self.scenario.floors_per_second
        waited = self._floors_due / self.scenario.floors_per_second
        self.outcome.longest_wait_seconds = max(self.outcome.longest_wait_seconds, waited)
        wanted, running = int(self._floors_due), self._running()
        if not wanted:
            return
        peer = self.rng.choice(running)
        core, now = peer.core, self.kernel.now
        assert core is not None
        allowed = core.floor_budget.may_write(wanted, now)
        self._floors_due -= allowed
        if allowed:  # as removals do it
            digests = [self.rng.randbytes(16) for _ in range(allowed)]
            version = core.version_above(ZERO_VERSION, now)
            core.floors.write_keys(digests, namespace_digest(NAMESPACE), version, now)
            peer.settle()

    # --- what must hold ----------------------------------------------------------------------

    def _note_sizes(self) -> None:
        for peer in self._running():
            assert peer.core is not None
            gossip, outcome = peer.core.gossip, self.outcome
            outcome.most_members = max(outcome.most_members, len(gossip.membership.live()))
            outcome.most_floors = max(outcome.most_floors, gossip.cluster_records.floors.count)
            outcome.most_locations = max(outcome.most_locations, gossip.directory.record_count)

    def _check_final_reads(self) -> None:
        for key, known in self._keys.items():
            if not known.newest:
                continue
            digest = key_digest(key, NAMESPACE)
            for peer in self._running():
                result = self.read_now(peer, digest)
                if isinstance(result, bytes):
                    self._judge(peer, key, result, self.kernel.now)
                if result != known.newest:
                    self.outcome.lost += 1
                    what = "older bytes" if isinstance(result, bytes) else repr(result)
                    self.problem(f"lost: {peer.address} at the end, {key}: {what}")
                    break

    def _count(self) -> None:
        outcome = self.outcome
        outcome.lies = self.liar.lies_told
        if outcome.longest_wait_seconds > MAX_WAIT_SECONDS:
            self.problem(f"removals waited for {outcome.longest_wait_seconds:.0f} s")
        if outcome.reads_failed > (1 - MIN_AVAILABLE) * outcome.reads:
            self.problem(f"{outcome.reads_failed} of {outcome.reads} reads failed: {self._example}")


def run_liar(seed: int, scenario: LiarScenario | None = None) -> LiarOutcome:
    return LiarRun(seed, scenario or LiarScenario()).go()
