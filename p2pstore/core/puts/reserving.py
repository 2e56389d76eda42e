"""Room for many values: at once where there is room, else with what has to go for it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from p2pstore.errors import P2PStoreError
from p2pstore.memory.entries import Reservation
from p2pstore.objects import check_object_length
from p2pstore.runtime.stepping import Steps

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

RESERVED_PER_STEP: Final = 64
"""Where there is room, at 2 us each."""

Reserved = Reservation | P2PStoreError | ValueError


def reserve_many(
    core: PeerCore,
    sizes: Sequence[tuple[int, int]],
    *,
    holder: Hashable,
    namespace: str,
    now: float,
) -> Steps[list[Reserved]]:
    """Room for each value, by length and trailer length, or why there is none. All is given back when the steps are
    closed."""
    made: list[Reserved] = []
    try:
        while len(made) < len(sizes):
            if made:
                yield
            some = sizes[len(made) : len(made) + RESERVED_PER_STEP]
            free = core.segment.reserve_free(some, holder=holder, namespace=namespace)
            made += free
            if len(free) == len(some):
                continue
            left = sizes[len(made) :]
            try:
                check_object_length(left[0][0])
                reservation = yield from core.objects.reserve(
                    *left[0],
                    holder=holder,
                    namespace=namespace,
                    now=now,
                    alike=sum(1 for _ in takewhile(left[0].__eq__, left)),
                )
            except (P2PStoreError, ValueError) as error:
                made.append(error)
            else:
                made.append(reservation)
    except BaseException:  # nobody will hear of them
        for each in made:
            if isinstance(each, Reservation):
                with suppress(ValueError):  # its holder may have gone meanwhile
                    core.segment.abort(each.number, holder=holder)
        raise
    return made
