"""The plan of a soak as a function of a seed: faults, and the load of each client. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

FaultKind = Literal[
    "kill",
    "stall",
    "restart",
    "leave",
    "full disk",
    "kill client",
    "split",
    "link down",
    "bad link",
    "new key",
]
Family = Literal["cycle", "flush", "tensor", "kept", "durable"]
OperationKind = Literal[
    "put", "overwrite", "put_many", "remove", "remove_many", "get", "get_into", "get_many", "view", "transfers",
    "prefetch", "contains", "locate", "match_prefix", "list", "pin", "replicate", "flush", "new kept", "new durable",
]  # fmt: skip

FIRST_FAULT_SECONDS: Final = 5.0
CALM_EVERY_SECONDS: Final = 240.0
"""From one calm to the next. A run that is shorter has one, at its end."""
CALM_SECONDS: Final = 60.0
"""Time without faults, in which the cluster settles and is checked."""
MEAN_PAUSE_SECONDS: Final = 6.0
"""Between the beginnings of two faults, on average."""
MAX_PEERS_AT_ONCE: Final = 2
"""Peers that are disturbed at once, not counting splits of the network."""
BATCH: Final = 6
KEPT_AT_ONCE: Final = 6
"""Keys of each of the families that are kept, per writer: with one more, the oldest is removed."""
KEYS: Final[dict[Family, int]] = {"cycle": 24, "flush": 8, "tensor": 6}
"""Keys that a writer has of each family whose keys are used again and again."""

_FAULTS: Final[dict[FaultKind, tuple[float, float, float]]] = {
    # kind: (weight, shortest, longest), in seconds
    "kill": (5, 0.5, 25),
    "stall": (5, 0.3, 20),
    "restart": (2, 0.5, 10),
    "leave": (2, 1, 10),
    "full disk": (2, 5, 30),
    "kill client": (3, 0.1, 2),
    "split": (3, 3, 40),
    "link down": (2, 1, 20),
    "bad link": (2, 10, 30),
    "new key": (0.7, 40, 40),
}
_ON_NETWORK: Final = ("split", "link down", "bad link", "new key")
_ENDING: Final = ("kill", "restart", "leave", "full disk", "kill client")
"""Not done to peers that are to live from beginning to end."""
_TELLING: Final = 45.0
"""Time after an absence, or a split, in which its peers are left alone, so that there is something to disturb."""

_LOAD: Final[dict[OperationKind, float]] = {
    "put": 14, "overwrite": 8, "put_many": 3, "remove": 4, "remove_many": 1, "get": 22, "get_into": 10,
    "get_many": 6, "view": 9, "transfers": 2, "prefetch": 2, "contains": 3, "locate": 2, "match_prefix": 1,
    "list": 0.5, "pin": 1, "replicate": 1, "flush": 0.3, "new kept": 0.4, "new durable": 0.4,
}  # fmt: skip
_READ_FAMILIES: Final[dict[Family, float]] = {
    "cycle": 10,
    "flush": 2,
    "tensor": 2,
    "kept": 3,
    "durable": 2,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One disturbance: when it begins, in seconds since the load began; what; to whom, by number (peers, for `split`,
    `link down` and `bad link` hosts); and for how long."""

    at: float
    kind: FaultKind
    targets: tuple[int, ...]
    seconds: float

    @property
    def until(self) -> float:
        return self.at + self.seconds


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """All that is done to a cluster in a run of `seconds`, and the calms in between, as (from, to)."""

    seconds: float
    faults: tuple[Fault, ...]
    calms: tuple[tuple[float, float], ...]


def plan_faults(seed: int, seconds: float, hosts: Sequence[int], steady: Sequence[int]) -> FaultPlan:
    """`hosts` is the host of each peer. Peers in `steady` are never ended: growth is measured in them.

    Raises `ValueError` when there is no other peer, or only one host.
    """
    if len(set(hosts)) < 2 or len(steady) >= len(hosts):
        raise ValueError("faults need two hosts, and a peer that may end")
    rng = Random(f"faults {seed}")
    calms = _calms(seconds)
    faults: list[Fault] = []
    now = FIRST_FAULT_SECONDS
    while now < seconds:
        calm = next((end for begin, end in calms if begin <= now < end), None)
        if calm is not None:
            now = calm
            continue
        fault = _fault(rng, now, faults, hosts, steady)
        limit = min([seconds, *(begin for begin, _ in calms if begin > now)])
        if fault is not None and fault.until < limit:
            faults.append(fault)
        now += rng.expovariate(1 / MEAN_PAUSE_SECONDS)
    return FaultPlan(seconds, tuple(faults), calms)


def _calms(seconds: float) -> tuple[tuple[float, float], ...]:
    calms = []
    end = CALM_EVERY_SECONDS
    while end < seconds - CALM_EVERY_SECONDS / 2:
        calms.append((end - CALM_SECONDS, end))
        end += CALM_EVERY_SECONDS
    return tuple(calms)


def _fault(
    rng: Random, now: float, earlier: Sequence[Fault], hosts: Sequence[int], steady: Sequence[int]
) -> Fault | None:
    """The next one, or None where what was drawn would be too much at once."""
    kinds = list(_FAULTS)
    kind = rng.choices(kinds, [_FAULTS[each][0] for each in kinds])[0]
    _, shortest, longest = _FAULTS[kind]
    seconds = shortest + (longest - shortest) * rng.random() ** 2
    targets = _targets(rng, kind, hosts, steady)
    under_way = [each for each in earlier if each.until + (0 if each.kind in _ON_NETWORK else 5) > now]
    on_peers = [each for each in under_way if each.kind not in _ON_NETWORK]
    on_network = [each for each in under_way if each.kind in _ON_NETWORK]
    if kind in _ON_NETWORK:
        if on_network or (kind == "new key" and under_way):
            return None
    elif len(on_peers) >= MAX_PEERS_AT_ONCE or any(
        set(each.targets) & set(targets) for each in on_peers
    ):
        return None
    if kind == "leave" and under_way:
        return None  # it has to find a peer that takes its objects
    if any(each.kind in ("leave", "new key") for each in under_way):
        return None
    ended = [
        each for each in earlier if each.kind in ("kill", "restart", "leave") and each.targets == targets
    ]
    if (
        kind in ("kill", "restart", "leave")
        and ended
        and ended[-1].until + _TELLING > now
        and rng.random() < 0.8
    ):
        return None  # mostly it has had time to fetch something
    return Fault(now, kind, targets, seconds)


def _targets(
    rng: Random, kind: FaultKind, hosts: Sequence[int], steady: Sequence[int]
) -> tuple[int, ...]:
    if kind == "new key":
        return ()
    if kind in ("link down", "bad link"):
        return (rng.choice(sorted(set(hosts))),)
    if kind == "split":
        all_hosts = sorted(set(hosts))
        return tuple(sorted(rng.sample(all_hosts, rng.randint(1, len(all_hosts) // 2))))
    candidates = [number for number in range(len(hosts)) if kind not in _ENDING or number not in steady]
    return (rng.choice(candidates),)


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of a client: what, of which keys (writer, family, number), and a number below 2^32 from which it takes
    whatever else there is to choose. `pause_seconds` come before it."""

    kind: OperationKind
    keys: tuple[tuple[int, Family, int], ...]
    choice: int
    pause_seconds: float


def plan_load(seed: int, actor: int, epoch: int, writers: int, rate: float) -> Iterator[Operation]:
    """All operations of client `actor` in life number `epoch`; `rate` operations a second. It writes only keys
    of its own, and reads those of all. Of the kept families, numbers count from the newest key backwards."""
    rng = Random(f"load {seed} {actor} {epoch}")
    kinds = list(_LOAD)
    weights = list(_LOAD.values())
    while True:
        kind = rng.choices(kinds, weights)[0]
        keys = tuple(_keys(rng, kind, actor, writers))
        yield Operation(kind, keys, rng.getrandbits(32), rng.expovariate(rate))


def _keys(
    rng: Random, kind: OperationKind, actor: int, writers: int
) -> Iterator[tuple[int, Family, int]]:
    match kind:
        case "put" | "overwrite":
            family: Family = rng.choices(("cycle", "flush", "tensor"), (8, 2, 2))[0]
            yield actor, family, rng.randrange(KEYS[family])
        case "remove":
            yield actor, "cycle", rng.randrange(KEYS["cycle"])
        case "put_many" | "remove_many":
            for number in rng.sample(range(KEYS["cycle"]), BATCH):
                yield actor, "cycle", number
        case "new kept":
            yield actor, "kept", 0
        case "new durable":
            yield actor, "durable", 0
        case "flush":
            yield actor, "flush", 0
        case "pin" | "replicate":
            yield rng.randrange(writers), "cycle", rng.randrange(KEYS["cycle"])
        case _:
            families = list(_READ_FAMILIES)
            shares = list(_READ_FAMILIES.values())
            batch = kind in ("get_many", "transfers", "prefetch", "contains", "match_prefix")
            family = "cycle" if batch else rng.choices(families, shares)[0]
            for _ in range(BATCH if batch else 1):
                yield rng.randrange(writers), family, rng.randrange(KEYS.get(family, KEPT_AT_ONCE))
