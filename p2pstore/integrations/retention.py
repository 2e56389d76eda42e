"""How long the pool should keep a request's blocks: the wishes of requests and orchestrators, as pins and ends."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from p2pstore.blocking import BlockingClient
from p2pstore.errors import NoSuchKey
from p2pstore.results import ItemResult

RETAIN_ACTION: Final = "kv.retain"
"""Of the KV hints of an orchestrator, by the drafts of Dynamo (`priority`, `ttl_seconds`) and vLLM (`directives`)."""
RETAINED_SECONDS: Final = 1800.0
"""Soft pin of a hint that says no time."""
MAX_RETAINED_SECONDS: Final = 86_400.0


class Retention(NamedTuple):
    """How long the pool should keep the blocks of a request."""

    pins: Sequence[tuple[float, float, float]] = ()
    """Of a range of tokens (after the first, up to the last) the seconds of its soft pin: it is evicted last."""
    ttl: float | None = None
    """Seconds until its blocks end everywhere; None: never."""

    def pin_seconds(self, last_token: float) -> float:
        """Of a block that ends with this token; 0 for no pin."""
        return max((each[2] for each in self.pins if each[0] < last_token <= each[1]), default=0.0)

    def pinning(self, names: Mapping[str, float]) -> Callable[[BlockingClient], None]:
        """The call that pins these objects; with each, the last token of its block."""

        def pin(client: BlockingClient) -> None:
            for name, last_token in names.items():
                seconds = self.pin_seconds(last_token)
                if seconds:
                    with contextlib.suppress(NoSuchKey):  # evicted already
                        client.pin(name, "soft", ttl=seconds, fetch=False)

        return pin

    def putting(
        self, items: Sequence[tuple[str, Any]]
    ) -> Callable[[BlockingClient], list[ItemResult[Any]]]:
        """The call that puts these objects, of any tokens, and pins them."""

        def put(client: BlockingClient) -> list[ItemResult[Any]]:
            results = client.put_many(items, ttl=self.ttl)
            self.pinning({name: math.inf for name, _ in items})(client)
            return results

        return put


def retention(
    parameters: Mapping[str, Any] | None, hints: Any, say: Callable[[str], None], prefix: str = ""
) -> Retention:
    """The wishes of a request, by its parameters `p2pstore_pin_seconds` and `p2pstore_ttl_seconds`, and of an
    orchestrator, by `hints`. Requests may not pin for good. The log names a wish without sense, which is left out."""
    try:
        given = parameters or {}
        pin, ttl = (
            given.get(prefix + name) for name in ("p2pstore_pin_seconds", "p2pstore_ttl_seconds")
        )
        pins = [(0.0, math.inf, _seconds(pin))] if pin is not None else []
        for action in getattr(hints, "actions", None) or ():
            if action.action_type == RETAIN_ACTION:
                pins += _retained(action.payload)
        return Retention(pins, None if ttl is None else _seconds(ttl))
    except (AttributeError, TypeError, ValueError) as error:
        say(f"how long blocks should be kept is not understood: {error}")
        return Retention()


def _seconds(value: Any) -> float:
    seconds = min(float(value), MAX_RETAINED_SECONDS)
    if not seconds > 0:
        raise ValueError(f"{value!r} is not a number of seconds above 0")
    return seconds


def _retained(payload: Mapping[str, Any]) -> Iterator[tuple[float, float, float]]:
    """The pins of a hint. A range of the output is not known here."""
    for each in payload.get("directives", [payload]):
        if each.get("priority", 1) > 0 and not each.get("covers_output"):
            end, seconds = each.get("end"), each.get("duration", each.get("ttl_seconds"))
            yield (
                float(each.get("start") or 0),
                math.inf if end is None else float(end),
                RETAINED_SECONDS if seconds is None else _seconds(seconds),
            )
