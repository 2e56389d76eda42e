"""Slow operations as the page tells of them: how slow, and where the time went; with keys only where told to. Pure."""

from __future__ import annotations

from typing import Any, Final

from p2pstore.status.slow_operations import SlowOperation, SlowOperations
from p2pstore.status.text import MAX_KEY_LETTERS, shown

MAX_SHOWN: Final = 5
MAX_STAGES: Final = 3
"""Of one operation: those that took longest."""


def slow_document(slow: SlowOperations, *, with_keys: bool) -> dict[str, Any]:
    """The latest of them, the last one first."""
    return {
        "threshold_seconds": slow.threshold_seconds,
        "latest": [_operation(each, with_keys=with_keys) for each in slow.latest(MAX_SHOWN)],
    }


def _operation(operation: SlowOperation, *, with_keys: bool) -> dict[str, Any]:
    """Its outcome may name a key, so it is told only whether it failed."""
    longest = sorted(operation.stages, key=lambda stage: -stage.seconds)[:MAX_STAGES]
    return {
        "what": operation.what,
        "key": shown(operation.key, MAX_KEY_LETTERS) if with_keys else None,
        "keys": operation.keys,
        "unix": round(operation.unix, 3),
        "seconds": round(operation.seconds, 4),
        "waiting_seconds": round(operation.waiting_seconds, 4),
        "failed": operation.outcome != "ok",
        "stages": [
            {
                "what": stage.what,
                "seconds": round(stage.seconds, 4),
                "peer": shown(stage.peer),
                "transport": stage.transport,
            }
            for stage in longest
        ],
    }
