"""Checks without faults and writers: all peers agree on the locations, and deliver the objects; then all objects are
removed, and nothing may be left."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from random import Random
from typing import Final

from p2pstore import blocking
from p2pstore.blocking import BlockingClient
from p2pstore.errors import NoSuchKey, P2PStoreError
from tests.soak.ledger import Ledger
from tests.soak.observer import pinned_in
from tests.soak.peers import CLIENT_SECONDS, Peer
from tests.soak.stage import wait_for
from tests.soak.values import number_in

AGREE_SECONDS: Final = 40.0
"""Until all know the same locations, after all see all (scaled)."""
GIVEN_UP: Final = ("gone_last_copy", "gone_copy_elsewhere", "gone_soft_copy")
"""Counters of evictions by a peer: reads keep copies, and those need room. Expiry and replacement are no excuse."""
REPAIR_SECONDS: Final = 60.0
"""Until kept objects have as many copies as wanted: repair begins half a minute after a loss (scaled)."""
EMPTY_SECONDS: Final = 40.0
"""After everything was removed, until all memory is free (scaled)."""
MAX_KEYS: Final = 150
"""Keys that are looked up at each peer; the others are only counted."""
PAGE: Final = 2000
PAUSE_SECONDS: Final = 1.0

AGREES: Final = "locations agree"
DELIVERS: Final = "what is somewhere is read everywhere"
BALANCES: Final = "memory is free in the end"
REPAIRED: Final = "lost copies are made again"
INVARIANTS: Final = (REPAIRED, AGREES, DELIVERS, BALANCES)

Complain = Callable[[str, str], None]


class LastLook:
    """Checks of peers that are no longer disturbed."""

    def __init__(
        self,
        peers: Sequence[Peer],
        ledger: Ledger,
        complain: Complain,
        checked: Counter[str],
        tell: Callable[[str], None],
        *,
        patience: float,
        seed: int,
    ) -> None:
        self.figures: dict[str, float] = {}
        self._peers = peers
        self._ledger = ledger
        self._complain = complain
        self._checked = checked
        self._tell = tell
        self._patience = patience
        self._rng = Random(f"last look {seed}")
        self._namespaces = ["soak", *(f"flushed-{peer.number}" for peer in peers)]

    def repair(self) -> None:
        """Kept objects have as many copies as their writers wanted, unless all copies were lost."""
        began = time.monotonic()
        with ExitStack() as stack:
            clients = [stack.enter_context(peer.connect()) for peer in self._peers]
            copies = _pinned_copies(clients)
            self._checked[REPAIRED] += sum(map(self._ledger.is_kept, copies))

            def is_repaired() -> bool:
                return not self._ledger.lacking(_pinned_copies(clients))

            if not wait_for(is_repaired, REPAIR_SECONDS * self._patience, PAUSE_SECONDS):
                copies = _pinned_copies(clients)
                for key in self._ledger.lacking(copies)[:5]:
                    self._complain(REPAIRED, f"{key!r} has {copies[key]} copies")
        self.figures["seconds until lost copies are made again"] = time.monotonic() - began
        self._tell(f"lost copies are made again after {time.monotonic() - began:.1f} s")

    def agree(self) -> None:
        """All peers name the same holders of each key, and these are those that have it."""
        began = time.monotonic()
        with ExitStack() as stack:
            clients = self._connect(stack)
            self._differ = sorted(self._truth(clients))
            self._rng.shuffle(self._differ)
            self._differ = self._differ[:MAX_KEYS]
            self._checked[AGREES] += len(self._differ) * len(self._peers)
            if not wait_for(
                lambda: self._same_by_now(clients), AGREE_SECONDS * self._patience, PAUSE_SECONDS
            ):
                for namespace, key in self._differ[:5]:
                    self._complain(AGREES, self._describe(clients, namespace, key))
        self.figures["seconds until locations agree"] = time.monotonic() - began
        self._tell(f"locations agree after {time.monotonic() - began:.1f} s")

    def read_all(self) -> None:
        """Every peer reads every object that any peer holds, unless all its holders evicted it meanwhile, and counted
        that."""
        with ExitStack() as stack:
            clients = self._connect(stack)
            given_up = self._given_up(clients)
            held = self._truth(clients)
            chosen = self._rng.sample(sorted(held), min(MAX_KEYS, len(held)))
            self.figures["keys in the end"] = len(held)
            not_found: dict[tuple[str, str], list[str]] = {}
            for peer in self._peers:
                with peer.host.inside():
                    for namespace, key in chosen:
                        if not self._read(peer, clients[peer.number, namespace], key):
                            not_found.setdefault((namespace, key), []).append(peer.name)
            still_held = self._truth(clients)
            given_up = self._given_up(clients) - given_up
        self.figures["keys evicted in the last look"] = len(not_found.keys() - still_held.keys())
        for complaint in unexcused(not_found, held, still_held, given_up):
            self._complain(DELIVERS, complaint)
        self._tell(f"read {len(chosen)} of {len(held)} keys at every peer")

    def empty(self) -> None:
        """Remove everything, by its writers' peers; then no byte is used, leased, or written on an SSD."""
        with ExitStack() as stack:
            clients = self._connect(stack)
            everything = sorted(self._truth(clients))
            self._ledger.removal_begins([key for _, key in everything], time.monotonic())
            for namespace, key in everything:
                if namespace == "soak":
                    self._remove(clients, key)
            for namespace in self._namespaces:
                clients[0, namespace].flush()
            began = time.monotonic()
            self._checked[BALANCES] += len(self._peers)
            limit = EMPTY_SECONDS * self._patience
            for peer in self._peers:
                client = clients[peer.number, "soak"]
                left = max(1.0, began + limit - time.monotonic())
                if not wait_for(lambda: not any(held_by(client).values()), left):  # noqa: B023 - it is called here
                    directory = client.statistics(cluster=False)["peer"]["directory"]
                    self._complain(
                        BALANCES, f"{peer.name} still has {held_by(client)}; directory: {directory}"
                    )
        self._tell(f"everything was removed, and given back within {time.monotonic() - began:.1f} s")

    # --- steps -----------------------------------------------------------------------------------

    def _connect(self, stack: ExitStack) -> dict[tuple[int, str], BlockingClient]:
        return {
            (peer.number, namespace): stack.enter_context(
                blocking.connect(str(peer.socket), namespace=namespace, timeout=CLIENT_SECONDS)
            )
            for peer in self._peers
            for namespace in self._namespaces
        }

    def _truth(self, clients: dict[tuple[int, str], BlockingClient]) -> dict[tuple[str, str], set[str]]:
        """The holders of each key, as each peer says of itself. Without keys that expire: some would meanwhile."""
        held: dict[tuple[str, str], set[str]] = {}
        for peer in self._peers:
            for namespace in self._namespaces:
                page = clients[peer.number, namespace].list_keys(local=True, limit=PAGE)
                for each in page.keys:
                    if each.expires_unix is not None:
                        continue
                    held.setdefault((namespace, each.key), set()).add(peer.name)
        return held

    def _given_up(self, clients: dict[tuple[int, str], BlockingClient]) -> Counter[str]:
        """How many objects each peer has evicted in its life."""
        told: Counter[str] = Counter()
        for peer in self._peers:
            document = clients[peer.number, "soak"].statistics(cluster=False)["peer"]
            told[peer.name] = sum(document["counters"].get(name, 0) for name in GIVEN_UP)
        return told

    def _same_by_now(self, clients: dict[tuple[int, str], BlockingClient]) -> bool:
        held = self._truth(clients)
        self._differ = [
            (namespace, key)
            for namespace, key in self._differ
            if not all(
                self._is_right(
                    peer,
                    self._named(clients[peer.number, namespace], key),
                    held.get((namespace, key), set()),
                )
                for peer in self._peers
            )
        ]
        return not self._differ

    def _is_right(self, peer: Peer, named: set[str], held: set[str]) -> bool:
        """A peer that keeps a part of the directory asks for more than its own copy only when it has none."""
        if peer.role.partitioned:
            return named <= held and bool(named) == bool(held)
        return named == held

    def _named(self, client: BlockingClient, key: str) -> set[str]:
        return {each.peer for each in client.locate(key) if each.reachable}

    def _describe(self, clients: dict[tuple[int, str], BlockingClient], namespace: str, key: str) -> str:
        held = self._truth(clients).get((namespace, key), set())
        named = {
            peer.name: sorted(self._named(clients[peer.number, namespace], key)) for peer in self._peers
        }
        return f"{key!r} is held by {sorted(held)}, and is said to be held by {named}"

    def _read(self, peer: Peer, client: BlockingClient, key: str) -> bool:
        """Whether the peer found it; if so, it was the right value, or a complaint."""
        begun = time.monotonic()
        try:
            value = client.get(key)
        except NoSuchKey:
            return False
        except P2PStoreError as error:
            self._complain(DELIVERS, f"{peer.name} cannot read {key!r}: {error!r}")
            return True
        self._checked[DELIVERS] += 1
        number = number_in(key, value)
        now = time.monotonic()
        if number is None:
            self._ledger.wrong(peer.number, key, f"{len(value):,} bytes", now)
        else:
            self._ledger.read(peer.number, key, number, begun, now)
        return True

    def _remove(self, clients: dict[tuple[int, str], BlockingClient], key: str) -> None:
        clients[int(key.split()[1]), "soak"].remove(key)


def unexcused(
    not_found: Mapping[tuple[str, str], Sequence[str]],
    held: Mapping[tuple[str, str], set[str]],
    still_held: Mapping[tuple[str, str], set[str]],
    given_up: Mapping[str, int],
) -> Iterator[str]:
    """Complaints about keys not found although a peer still holds them, or although not all holders (`held`) have
    `given_up` as many objects since."""
    lost: Counter[str] = Counter()
    for (namespace, key), readers in not_found.items():
        if (namespace, key) in still_held:
            holders = sorted(still_held[namespace, key])
            yield f"{', '.join(readers)} do not find {key!r}, which {', '.join(holders)} hold"
        else:
            lost.update(held[namespace, key])
    for peer, count in sorted(lost.items()):
        if count > given_up[peer]:
            yield f"{peer} has lost {count} keys, and evicted {given_up[peer]} objects"


def _pinned_copies(clients: Sequence[BlockingClient]) -> dict[str, int]:
    """How many peers say that they hold it pinned hard, by key."""
    copies: Counter[str] = Counter()
    for client in clients:
        page = client.list_keys(local=True, pinned=True, limit=PAGE)
        copies.update(pinned_in(page))
    return dict(copies)


def held_by(client: BlockingClient) -> dict[str, int]:
    """Counts that a peer reports and that should be 0."""
    document = client.statistics(cluster=False)["peer"]
    counts = ("memory_used_bytes", "leased_bytes", "objects", "operations", "known_locations")
    held = {name: int(document[name]) for name in counts}
    # Cached locations are forgotten with time, whatever becomes of the objects.
    if "ssd" in document:
        held["ssd_live_bytes"] = int(document["ssd"]["live_bytes"])
        held["ssd_objects"] = int(document["ssd"]["objects"])
    return held
