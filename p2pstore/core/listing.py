"""Listing the keys of all peers, page by page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.effects import (
    Reply,
)
from p2pstore.core.operation import Operation
from p2pstore.core.serving import MAX_LIST_LIMIT, ListHereOperation
from p2pstore.gossip.records import PeerId
from p2pstore.local.messages import KeyEntry
from p2pstore.transfer.messages import (
    DataKind,
    Keys,
    ListKeys,
)

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

LIST_TIMEOUT_SECONDS: Final = 2.0
NAMED_PEERS: Final = 8
"""Holders named per key; `copies` counts them all."""


@dataclass(slots=True)
class ListedPage:
    """A page of keys, in order. `silent` peers did not answer in time."""

    items: list[KeyEntry]
    more: bool
    silent: list[PeerId] = field(default_factory=list)


class ListOperation(Operation):
    """One page of keys over all live peers."""

    def __init__(self, core: PeerCore, request: ListKeys, *, local: bool) -> None:
        super().__init__(core)
        self._request = request
        self._local = local
        self._pending: dict[int, PeerId] = {}
        self._answers: list[tuple[PeerId, Keys]] = []
        self._silent: list[PeerId] = []
        self._here: ListHereOperation | None = None

    def start(self, now: float) -> None:
        if not self._local:
            for tag, peer_id in enumerate(self.core.live_peers()):
                self._pending[tag] = peer_id
                self.ask(tag, peer_id, DataKind.LIST, self._request, LIST_TIMEOUT_SECONDS)
        self._here = ListHereOperation(self.core, self._request, on_finish=self._listed_here)
        self.core.start(self._here, now)

    def cancel(self, now: float) -> None:
        here, self._here = self._here, None
        if here is not None:
            here.cancel(now)
        super().cancel(now)

    def _listed_here(self, result: Any, now: float) -> None:
        self._here = None
        if isinstance(result, Keys):
            self._answers.append((self.core.peer_id, result))
            self._settle(now)

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        peer_id = self._pending.pop(tag)
        if isinstance(reply, Keys) and is_page_of(reply, self._request):
            self._answers.append((peer_id, reply))
        else:
            self._silent.append(peer_id)
        self._settle(now)

    def _settle(self, now: float) -> None:
        if not self._pending and self._here is None:
            self.finish(
                merge_pages(
                    min(self._request.limit, MAX_LIST_LIMIT),
                    self._answers,
                    self._silent,
                    self.core.name_of,
                ),
                now,
            )


def is_page_of(page: Keys, request: ListKeys) -> bool:
    """Whether a page is what was asked for: keys in order, each once, after `after`, with the prefix.

    Anything else could send a client that pages through the keys in circles.
    """
    keys = [item.key for item in page.items]
    return (
        all(earlier < later for earlier, later in pairwise([request.after, *keys]))
        and all(key.startswith(request.prefix) for key in keys)
        and (bool(keys) or not page.more)
    )


def merge_pages(
    limit: int,
    answers: Sequence[tuple[PeerId, Keys]],
    silent: list[PeerId],
    name_of: Callable[[PeerId], str],
) -> ListedPage:
    """Merge sorted pages: the newest version of each key speaks for it.

    A page that says `more` ends the merged page at its last key: behind it that peer may hold keys
    that it did not list.
    """
    horizon = min(
        (page.items[-1].key for _, page in answers if page.more and page.items), default=None
    )
    merged: dict[str, KeyEntry] = {}
    for peer_id, page in answers:
        for item in page.items:
            if horizon is not None and item.key > horizon:
                break
            known = merged.get(item.key)
            if known is not None and (known.clock, known.writer) > (item.clock, item.writer):
                continue
            same = known is not None and (known.clock, known.writer) == (item.clock, item.writer)
            merged[item.key] = KeyEntry(
                item.key,
                item.length,
                known.copies + 1 if known is not None and same else 1,
                [*(known.peers if known is not None and same else []), name_of(peer_id)][
                    :NAMED_PEERS
                ],
                item.pin,
                item.soft,
                item.expires_unix_ms,
                item.clock,
                item.writer,
            )
    keys = sorted(merged)
    return ListedPage(
        [merged[key] for key in keys[:limit]], horizon is not None or len(keys) > limit, silent
    )
