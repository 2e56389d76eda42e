"""The objects that are read most. Pure.

Keys may be secret, and the page is for anybody: it tells of each of them only of which namespace it is, unless the peer
was told otherwise. Who may use the peer's socket gets the keys from `stats --json`.
"""

from __future__ import annotations

from typing import Any, Final

from p2pstore.core.peer_core import PeerCore
from p2pstore.status.text import MAX_KEY_LETTERS, shown

MAX_HOTTEST: Final = 10
MAX_LOOKED_UP: Final = 40
"""Of what was read most some has left memory meanwhile."""


def hottest(core: PeerCore, now: float, *, with_keys: bool) -> list[dict[str, Any]]:
    """What is read most here, of what is in memory. `now` is monotonic."""
    segment, unix = core.segment, core.unix(now)
    read = segment.objects.most_read.most(MAX_LOOKED_UP, unix)
    found = [
        (entry, rate) for digest, rate in read if (entry := segment.find(digest, unix)) is not None
    ]
    return [
        {
            "namespace": shown(entry.namespace),
            "key": shown(entry.key, MAX_KEY_LETTERS) if with_keys else None,
            "bytes": entry.length,
            "reads_per_second": round(rate, 3),
        }
        for entry, rate in found[:MAX_HOTTEST]
    ]
