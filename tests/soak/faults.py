"""Doing the faults of a plan: each begins, and ends when its time is over; the timeline hears of both."""

import heapq
import math
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from p2pstore.errors import P2PStoreError
from tests.soak.events import Client, Events
from tests.soak.peers import Peer
from tests.soak.plan import Fault
from tests.soak.stage import ClientProcess, Stage
from tests.soak.timeline import Timeline, Trouble

DRAIN_SECONDS: Final = 15.0
KEY_STEPS: Final = ("add", "promote", "retire")

Complain = Callable[[str, str], None]
"""(invariant, what was seen)."""

SERVES: Final = "who starts serves"
LIVES: Final = "no peer ends by itself"
LEAVES: Final = "who is asked to end does, with status 0"
CLEAN: Final = "nothing is left behind"
INVARIANTS: Final = (SERVES, LIVES, LEAVES, CLEAN)


class Processes:
    """Peers and clients: which are to run, which are starting or ending, and the deadlines for that."""

    def __init__(
        self,
        stage: Stage,
        timeline: Timeline,
        events: Events,
        complain: Complain,
        *,
        seed: int,
        rate: float,
        ready_seconds: float,
        end_seconds: float,
    ) -> None:
        self.stage = stage
        self.clients: dict[int, tuple[ClientProcess, Client]] = {}
        self.ended_cleanly = 0
        self.lives = 0
        """How many have served."""
        self._timeline = timeline
        self._events = events
        self._complain = complain
        self._seed = seed
        self._rate = rate
        self._ready_seconds = ready_seconds
        self._end_seconds = end_seconds
        self._epochs: dict[int, int] = defaultdict(int)
        self._starting: dict[int, float] = {}
        """Deadlines."""
        self._ending: dict[int, tuple[float, Callable[[], None]]] = {}
        """Deadlines, and what comes then."""
        self._away = {peer.number for peer in stage.peers}

    @property
    def all_serve(self) -> bool:
        """Whether no peer is away, starting or ending."""
        return not (self._starting or self._ending or self._away)

    def serves(self, peer: Peer) -> bool:
        """Whether it is there, and not on the way up or down."""
        number = peer.number
        return not (number in self._starting or number in self._ending or number in self._away)

    # --- peers -----------------------------------------------------------------------------------

    def start(self, peer: Peer) -> None:
        """Start a peer that is away; `look` sees that it serves."""
        peer.start(self.stage.bootstrap_of(peer))
        self._away.discard(peer.number)
        self._starting[peer.number] = time.monotonic() + self._ready_seconds

    def kill(self, peer: Peer) -> None:
        """kill -9."""
        self._timeline.end_life(peer.number, time.monotonic())
        self._starting.pop(peer.number, None)
        self._away.add(peer.number)
        peer.kill()

    def ask_to_end(self, peer: Peer, then: Callable[[], None], seconds: float = 0.0) -> None:
        """SIGTERM. `then` is called when it has ended. `seconds` more than usual are granted."""
        self._timeline.end_life(peer.number, time.monotonic())
        self._ending[peer.number] = (time.monotonic() + seconds + self._end_seconds, then)
        peer.signal(signal.SIGTERM)

    def ask_to_leave(self, peer: Peer, then: Callable[[], None]) -> None:
        """As `mooncake-p2p leave --drain` does."""
        try:
            with peer.connect() as client:
                client.leave(drain=DRAIN_SECONDS)
        except P2PStoreError as error:
            self._complain(LEAVES, f"{peer.name} cannot be asked to leave: {error!r}")
            self.ask_to_end(peer, then)
            return
        self._timeline.end_life(peer.number, time.monotonic())
        self._ending[peer.number] = (time.monotonic() + DRAIN_SECONDS + self._end_seconds, then)

    def put_off(self, seconds: float) -> None:
        """The machine stood still for `seconds`: extend the deadlines of processes that start or end."""
        self._starting = {peer: deadline + seconds for peer, deadline in self._starting.items()}
        self._ending = {
            peer: (deadline + seconds, then) for peer, (deadline, then) in self._ending.items()
        }

    def look(self) -> None:
        """See who serves by now, who has ended, and who is late."""
        now = time.monotonic()
        for peer in self.stage.peers:
            number = peer.number
            if number in self._ending:
                self._look_at_ending(peer, now)
            elif number in self._starting:
                self._look_at_starting(peer, now)
            elif number not in self._away and not peer.running:
                self._complain(LIVES, f"{peer.name} ended by itself with status {peer.exit_status}")
                self._timeline.end_life(number, now)
                self.start(peer)

    def _look_at_starting(self, peer: Peer, now: float) -> None:
        if not peer.running:
            if not peer.disk_was_full(self._starting[peer.number] - self._ready_seconds):
                self._complain(SERVES, f"{peer.name} ended with status {peer.exit_status} at its start")
        elif peer.is_ready():
            del self._starting[peer.number]
            self._timeline.begin_life(peer.number, time.monotonic())
            self.lives += 1
            return
        elif now > self._starting[peer.number]:
            self._complain(SERVES, f"{peer.name} is not ready after {self._ready_seconds:g} s")
        else:
            return
        peer.kill()
        self.start(peer)

    def _look_at_ending(self, peer: Peer, now: float) -> None:
        deadline, then = self._ending[peer.number]
        if peer.running:
            if now <= deadline:
                return
            self._complain(LEAVES, f"{peer.name} has not ended in time")
            peer.kill()
        elif peer.exit_status != 0:
            self._complain(LEAVES, f"{peer.name} ended with status {peer.exit_status}")
        else:
            self.ended_cleanly += 1
            for left in peer.left_behind():
                self._complain(CLEAN, f"{peer.name} ended and left {left}")
        del self._ending[peer.number]
        self._away.add(peer.number)
        then()

    # --- clients ---------------------------------------------------------------------------------

    def start_client(self, peer: Peer) -> None:
        """A life of its client, the next one."""
        number = peer.number
        epoch = self._epochs[number]
        self._epochs[number] += 1
        process = self.stage.start_client(peer, self._seed, epoch, self._rate)
        client = self._events.add(number, Path(process.settings.events))
        self.clients[number] = (process, client)

    def kill_client(self, number: int) -> None:
        """kill -9; what it had begun has no end."""
        process, client = self.clients.pop(number)
        process.kill()
        client.gone = True

    def look_at_clients(self) -> list[str]:
        """Which clients ended by themselves, and with what status: none should."""
        return [
            f"the client of peer{number} ended with status {process.exit_status}"
            for number, (process, _) in self.clients.items()
            if process.exit_status is not None
        ]


class Faults:
    """The faults of a plan, from `begin` on."""

    def __init__(
        self,
        processes: Processes,
        timeline: Timeline,
        hosts: Sequence[int],
        disturbed: Callable[[], None],
        leaves: Callable[[Peer], Callable[[], None]],
        tell: Callable[[str], None],
    ) -> None:
        """`hosts` says of each peer on which host it is; `disturbed` is called before anything is done, `leaves` before
        a peer is asked to end, and what it returns when that has ended."""
        self.done: list[tuple[float, float, Fault]] = []
        self._processes = processes
        self._stage = processes.stage
        self._timeline = timeline
        self._hosts = hosts
        self._disturbed = disturbed
        self._leaves = leaves
        self._tell = tell
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._under_way = 0
        self._began = 0.0
        self._end = math.inf

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way

    @property
    def over(self) -> bool:
        """Whether nothing is left to do. Actions put off beyond the end are not done."""
        return not self._under_way and all(when > self._end for when, _, _ in self._due)

    def begin(self, faults: Sequence[Fault]) -> None:
        """Their time begins now."""
        self._began = time.monotonic()
        for fault in faults:
            self._at(self._began + fault.at, partial(self._start, fault))

    def end_by(self, when: float) -> None:
        """No fault begins that would end after that time."""
        self._end = when

    def put_off(self, seconds: float) -> None:
        """The machine stood still for `seconds`: put all due actions off by that, so that they keep their distances."""
        self._due = [(when + seconds, count, action) for when, count, action in self._due]

    def turn(self) -> None:
        """Do what is due."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (when, self._count, action))

    def _start(self, fault: Fault) -> None:
        began = time.monotonic()
        if began + fault.seconds > self._end or not self._is_possible(fault):
            return
        self._disturbed()
        self._under_way += 1
        self._tell(f"{fault.kind} {fault.targets or ''} for {fault.seconds:.1f} s")
        match fault.kind:
            case "kill" | "restart" | "leave":
                self._end_peer(fault, began)
            case "kill client":
                (number,) = fault.targets
                self._processes.kill_client(number)
                again = partial(self._processes.start_client, self._stage.peers[number])
                self._later(fault, began, again)
            case "stall":
                (peer,) = (self._stage.peers[number] for number in fault.targets)
                trouble = self._timeline.begin_trouble(fault.targets, began)
                peer.signal(signal.SIGSTOP)
                self._later(fault, began, partial(peer.signal, signal.SIGCONT), trouble)
            case "full disk":
                (peer,) = (self._stage.peers[number] for number in fault.targets)
                peer.fill_disk()
                self._later(fault, began, peer.free_disk)
            case "split" | "link down" | "bad link":
                self._part(fault, began)
            case "new key":
                self._turn_key(fault, began)

    def _is_possible(self, fault: Fault) -> bool:
        """Whether who is to be ended is there: what went before may have taken longer than was planned."""
        if fault.kind in ("kill", "restart", "leave"):
            return self._processes.serves(self._stage.peers[fault.targets[0]])
        return fault.kind != "kill client" or fault.targets[0] in self._processes.clients

    def _later(
        self, fault: Fault, began: float, action: Callable[[], None], trouble: Trouble | None = None
    ) -> None:
        def end() -> None:
            action()
            self._ended(fault, began, trouble)

        self._at(began + fault.seconds, end)

    def _ended(self, fault: Fault, began: float, trouble: Trouble | None = None) -> None:
        now = time.monotonic()
        if trouble is not None:
            trouble.ended = now
        self._under_way -= 1
        self.done.append((began, now, fault))

    def _end_peer(self, fault: Fault, began: float) -> None:
        peer = self._stage.peers[fault.targets[0]]

        def again() -> None:
            # `seconds` are those in which it is away, however long its leaving takes.
            self._at(time.monotonic() + fault.seconds, start)

        def start() -> None:
            self._processes.start(peer)
            self._ended(fault, began)

        if fault.kind == "kill":
            self._processes.kill(peer)
            again()
            return
        has_left = self._leaves(peer)

        def gone() -> None:
            has_left()
            again()

        if fault.kind == "restart":
            self._processes.ask_to_end(peer, gone, DRAIN_SECONDS)
        else:
            self._processes.ask_to_leave(peer, gone)

    def _part(self, fault: Fault, began: float) -> None:
        apart = [number for number, host in enumerate(self._hosts) if host in fault.targets]
        trouble = self._timeline.begin_trouble(apart, began, apart=True)
        network = self._stage.network
        host = fault.targets[0]
        match fault.kind:
            case "split":
                network.split(fault.targets)
                self._later(fault, began, partial(network.join, fault.targets), trouble)
            case "link down":
                network.take_down(host)
                self._later(fault, began, partial(network.bring_up, host), trouble)
            case _:
                network.spoil(host)
                self._later(fault, began, partial(network.mend, host), trouble)

    def _turn_key(self, fault: Fault, began: float) -> None:
        step_seconds = fault.seconds / len(KEY_STEPS)
        for number, step in enumerate(KEY_STEPS):
            self._at(began + number * step_seconds, partial(self._stage.turn_key, step))
        self._later(fault, began, lambda: None)
