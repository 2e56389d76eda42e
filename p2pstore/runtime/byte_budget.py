"""Memory that others make this process hold: requests that are not whole yet, and answers that they do not read. Pure.

Every connection has an `Account`. Its owner is the member at the other end, within its host, and may have any number
of connections. There are two bounds:

1. An owner that holds its share or more has no room: its connections are not read until it holds less, which comes:
   requests that were read are answered meanwhile, and unfinished requests and unread answers have deadlines.
2. When all owners together hold more than the limit, the largest account of the largest owner of the largest host is
   ended. So an owner that hoards is ended by itself, and others that hold little never are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from p2pstore.objects import MIB

Key = TypeVar("Key")
LIMIT_BYTES: Final = 48 * MIB
"""With what the allocator adds the process grows by 64 MiB or so."""
SHARE_BYTES: Final = LIMIT_BYTES // 4
FREE_BYTES: Final = 8 * 1024
"""Of an account do not count: small messages come and go without a look at the books of all."""


class Owner(NamedTuple):
    """The member for which bytes are held, by its peer id, at a host (`crowding.host_group`)."""

    host: str
    member: bytes


class ByteBudget:
    """The accounts of one process."""

    def __init__(
        self,
        limit_bytes: int = LIMIT_BYTES,
        share_bytes: int = SHARE_BYTES,
        free_bytes: int = FREE_BYTES,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.share_bytes = share_bytes
        self.free_bytes = free_bytes
        self.ended = 0
        """Accounts that were ended for the limit."""
        self._accounts: set[Account] = set()
        self._of_host: dict[str, int] = {}
        self._of_owner: dict[Owner, int] = {}
        self.held_bytes = 0
        """By all accounts, as far as it counts."""
        self._ending_bytes = 0
        """Held by accounts that were told to end."""
        self._waiting: dict[Callable[[], None], Account] = {}

    def open(self, owner: Owner, end: Callable[[str], None]) -> Account:
        """An account that holds nothing yet. `end(why)` has its connection end soon; it may close the account."""
        account = Account(self, owner, end)
        self._accounts.add(account)
        return account

    def has_room(self, owner: Owner) -> bool:
        """Whether more may be taken on for this owner."""
        return (
            self._of_owner.get(owner, 0) < self.share_bytes
            and self.held_bytes <= self.limit_bytes  # ending accounts are still there
        )

    def has_plenty(self, owner: Owner) -> bool:
        own_bytes = self._of_owner.get(owner, 0)
        return 2 * own_bytes < self.share_bytes and 2 * self.held_bytes < self.limit_bytes

    def _change(self, account: Account, count: int) -> None:
        owner = account.owner
        self.held_bytes += count
        if account.is_ending:
            self._ending_bytes += count
        _add(self._of_host, owner.host, count)
        _add(self._of_owner, owner, count)
        if count > 0:
            while self.held_bytes - self._ending_bytes > self.limit_bytes:
                self._end_largest()
        elif self._waiting:
            self._wake()

    def _end_largest(self) -> None:
        """One that was told to end already counts as gone, as its host and its owner may have others."""
        largest = max(
            (each for each in self._accounts if not each.is_ending and each.counted_bytes),
            key=lambda each: (
                self._of_host[each.owner.host],
                self._of_owner[each.owner],
                each.held_bytes,
            ),
        )
        largest.is_ending = True
        self._ending_bytes += largest.counted_bytes
        self.ended += 1
        largest.end(
            f"it has {self._of_owner[largest.owner]:,} bytes held here, the most of all that hold "
            f"{self.held_bytes:,} together; {self.limit_bytes:,} are allowed"
        )

    def _wake(self) -> None:
        for wake, account in list(self._waiting.items()):
            if self.has_room(account.owner):
                del self._waiting[wake]
                wake()


def _add(counts: dict[Key, int], key: Key, count: int) -> None:
    if left := counts.get(key, 0) + count:
        counts[key] = left
    else:
        del counts[key]


class Account:
    """Bytes held for one connection."""

    __slots__ = ("_budget", "_free_bytes", "_is_closed", "end", "held_bytes", "is_ending", "owner")

    def __init__(self, budget: ByteBudget, owner: Owner, end: Callable[[str], None]) -> None:
        self.owner = owner
        self.end = end
        self.held_bytes = 0
        self.is_ending = False
        self._is_closed = False
        self._budget = budget
        self._free_bytes = budget.free_bytes

    @property
    def counted_bytes(self) -> int:
        """The held bytes that count."""
        return max(0, self.held_bytes - self._free_bytes)

    @property
    def has_room(self) -> bool:
        """Whether more may be taken on for it."""
        return self._budget.has_room(self.owner)

    @property
    def has_plenty(self) -> bool:
        """Whether more may be held for it that need not be: less than half of the limit is held by all, and less than
        half of the share by its owner."""
        return self._budget.has_plenty(self.owner)

    def hold(self, count: int) -> None:
        """`count` bytes more are held, less when negative; this may end an account, perhaps this one."""
        if self._is_closed:
            return
        before, self.held_bytes = self.held_bytes, self.held_bytes + count
        free = self._free_bytes
        if before > free or self.held_bytes > free:
            change = max(self.held_bytes, free) - max(before, free)
            if change:
                self._budget._change(self, change)

    def release(self, count: int) -> None:
        self.hold(-count)

    def when_room(self, wake: Callable[[], None]) -> None:
        """Call `wake`, once, when there may be room: look again then."""
        self._budget._waiting[wake] = self

    def give_up(self, wake: Callable[[], None]) -> None:
        """Forget a call of `when_room`."""
        self._budget._waiting.pop(wake, None)

    def close(self) -> None:
        """Its connection has ended; may be called twice. Later calls of `hold` and `release` do not count."""
        self.release(self.held_bytes)
        self._is_closed = True
        self._budget._accounts.discard(self)
