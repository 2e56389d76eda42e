"""How far the accusations of others count: each member may cause a bounded number of looks at others. Pure.

An accusation is a reason for an own probe, and nothing else (see `membership`). That probe costs something, so

1. a member whose accusations call for more probes than `ACCUSATIONS_A_SECOND` is passed over for the moment, and
2. an accusation is passed over for `DISBELIEVED_SECONDS` when the same member accused the same one
   `REFUTATIONS` times, and this peer heard from the accused after each.

The accuser is the peer on whose channel the accusation came, never a name inside it. An honest member passes on
what its own probes found, so nobody loses its word by what others say, or say in its name. A member that is passed
over still counts where this peer's own probe of the accused has failed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeVar

from p2pstore.gossip.exchange.message_budget import MessageBudget
from p2pstore.gossip.records import Member

ACCUSATIONS_A_SECOND: Final = 2.0
ACCUSATIONS_AT_ONCE: Final = 64
"""Many die at once when a rack loses power, and each survivor tells of all of them."""
REFUTATIONS: Final = 2
DISBELIEVED_SECONDS: Final = 180.0
MAX_ACCUSERS: Final = 512
MAX_PAIRS: Final = 4096
"""Those that were heard of last are kept."""


Key = TypeVar("Key")
Value = TypeVar("Value")


class Accusers:
    """See the module's docstring. Members are named by their short names."""

    def __init__(self) -> None:
        self._budgets: OrderedDict[Member, MessageBudget] = OrderedDict()
        self._unrefuted: OrderedDict[Member, set[Member]] = OrderedDict()
        """Accused -> who accused it since this peer heard from it last."""
        self._refuted: OrderedDict[tuple[Member, Member], tuple[int, float]] = OrderedDict()
        """(accuser, accused) -> how often that was refuted, and when last."""

    def __len__(self) -> int:
        """How many entries are kept."""
        return len(self._budgets) + len(self._unrefuted) + len(self._refuted)

    def may_accuse(self, accuser: Member, accused: Member, now: float) -> bool:
        """Whether to look at the accused for what `accuser` says. Counts it, if so."""
        times, at = self._refuted.get((accuser, accused), (0, 0.0))
        if times >= REFUTATIONS and now < at + DISBELIEVED_SECONDS:
            return False
        if not self.may_claim(accuser, now):
            return False
        _put(self._unrefuted, accused, self._unrefuted.get(accused, set()) | {accuser}, MAX_PAIRS)
        return True

    def may_claim(self, accuser: Member, now: float) -> bool:
        """Whether this member's budget of claims has room for one more. Counts it, if so."""
        budget = self._budgets.get(accuser)
        if budget is None:
            budget = MessageBudget(ACCUSATIONS_A_SECOND, ACCUSATIONS_AT_ONCE)
        if not budget.has(1, now):
            return False
        budget.take(1, now)
        _put(self._budgets, accuser, budget, MAX_ACCUSERS)
        return True

    def heard(self, accused: Member, now: float) -> None:
        """Something came from the accused itself: what was said of it before is refuted."""
        for accuser in self._unrefuted.pop(accused, ()):
            times, at = self._refuted.get((accuser, accused), (0, 0.0))
            times = times + 1 if now < at + DISBELIEVED_SECONDS else 1
            _put(self._refuted, (accuser, accused), (times, now), MAX_PAIRS)

    def died(self, accused: Member) -> None:
        """This peer believes it, too."""
        self._unrefuted.pop(accused, None)


def _put(table: OrderedDict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Keep an entry as the newest of at most so many."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)
