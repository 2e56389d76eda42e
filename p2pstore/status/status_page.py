"""The status page: its file, its JSON (made at most once a second), and the other pages of the port."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from itertools import islice
from typing import Any, Final

from p2pstore.runtime.stepping import Steps
from p2pstore.runtime.trio_tasks import in_turns
from p2pstore.status.checkup import (
    MAX_CHECKPOINTS,
    ObservedPeer,
    Progress,
    Survey,
    member_document,
    progress_document,
)
from p2pstore.status.doctor.finding import MAX_KEY_LETTERS, shown
from p2pstore.status.http_server import Answer, Pages, text_answer
from p2pstore.status.measures import SlowOperation, SlowOperations, Stage

FORMAT: Final = 1
"""Of the document. It only grows."""
KEPT_SECONDS: Final = 1.0
"""Time for which a document serves further requests."""
MAX_OF_A_CORE: Final = 0.01
"""That making documents may take: longer ones, of very large clusters, are kept for longer."""
MAX_NAMESPACES: Final = 32

_CURVES: Final = ("gets", "misses", "puts", "in_bytes", "out_bytes")


class StatusSource:
    """The page's data of one peer. `with_keys`: the public page shows keys."""

    def __init__(
        self,
        peer: ObservedPeer,
        *,
        with_keys: bool,
        cpu_seconds: Callable[[], float] = time.thread_time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peer = peer
        self._now = now
        self._cpu_seconds = cpu_seconds
        self._with_keys = with_keys
        self._keep_until = -math.inf
        self._made = b""

    def document_bytes(self) -> bytes:
        """The document, mostly not older than `KEPT_SECONDS`."""
        now = self._now()
        if now >= self._keep_until:
            began = self._cpu_seconds()
            self._made = json.dumps(self.document(), separators=(",", ":")).encode()
            took = self._cpu_seconds() - began
            self._keep_until = now + max(KEPT_SECONDS, took / MAX_OF_A_CORE)
        return self._made

    def document(self) -> dict[str, Any]:
        """The page's data. Sizes in bytes."""
        source, core, now = self._peer, self._peer.core, self._now()
        watch, gossip = source.watch, core.gossip
        peer = source.document(private=False)
        look = source.checkup.look(peer)
        members, checkpoints = look.members, look.checkpoints
        return {
            "format": FORMAT,
            "unix": round(time.time(), 3),
            "peer": {
                "name": shown(peer["name"]),
                "id": peer["peer_id"],
                "software": peer["software"],
                "incarnation": peer["incarnation"],
                "uptime_seconds": peer["uptime_seconds"],
                "state": peer["state"],
            },
            "problems": look.documents(),
            "problems_left_out": look.left_out,
            "cluster": _cluster(shown(gossip.config.cluster), members),
            "members": [
                member_document(member, state, now, watch.traffic.round_trip_seconds(member.peer_id))
                | ({"me": True} if member.peer_id == core.peer_id else {})
                for state, member in members.shown
            ],
            "memory": _memory(peer),
            "ssd": _ssd(peer.get("ssd")),
            "repair": peer["repair"],
            "totals": source.totals(),
            "lately": {"seconds": round(look.seconds, 1), **look.lately},
            "recent": source.checkup.recent.document(_CURVES),
            "received": peer["received"],
            "served": peer["served"],
            "reads": watch.measures.document()["reads"],
            "slow": slow_document(watch.slow, with_keys=self._with_keys),
            "checkpoints": [self._checkpoint(each) for each in checkpoints[:MAX_CHECKPOINTS]],
            "checkpoints_left_out": max(0, len(checkpoints) - MAX_CHECKPOINTS),
            "hottest": source.hottest(with_keys=self._with_keys),
            "with_keys": self._with_keys,
        }

    def _checkpoint(self, each: Progress) -> dict[str, Any]:
        core = self._peer.core
        switch = core.checkpoints.switched(each.head.digest)
        return progress_document(
            each,
            shown(core.name_of(each.head.publisher)),
            is_switched_to=switch is not None and switch.version == each.head.version,
        )


def _cluster(name: str, members: Survey) -> dict[str, Any]:
    left_out = sum(members.counts.values()) - members.counts["left"] - len(members.shown)
    return {
        "name": name,
        "live": members.live,
        "counts": members.counts,
        "members_left_out": max(0, left_out),
        "memory_capacity_bytes": members.memory_capacity,
        "memory_used_bytes": members.memory_used,
        "ssd_capacity_bytes": members.ssd_capacity,
        "ssd_used_bytes": members.ssd_used,
        "copies": members.copies,
    }


def _memory(peer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "capacity_bytes": peer["memory_capacity_bytes"],
        "used_bytes": peer["memory_used_bytes"],
        "leased_bytes": peer["leased_bytes"],
        "objects": peer["objects"],
        "quotas": [
            {"namespace": shown(namespace), **use}
            for namespace, use in islice(peer["quotas"].items(), MAX_NAMESPACES)
        ],
    }


def _ssd(ssd: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The shown part of the tier's statistics."""
    if ssd is None:
        return None
    names = ("state", "capacity_bytes", "live_bytes", "objects", "hits", "misses", "damaged")
    more = ("hit_rate", "queued_bytes", "write_amplification", "read_latency", "write_latency")
    errors = sum(ssd[f"{each}_errors"] for each in ("read", "write", "sync", "discard"))
    return {name: ssd[name] for name in (*names, *more)} | {"errors": errors}


_STYLE: Final = "/*style*/"
_SCRIPT: Final = "/*script*/"


def _source(name: str) -> str:
    return (files("p2pstore.status") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


@cache
def page_bytes() -> bytes:
    """HTML with its style and its script in it; nothing is asked for elsewhere."""
    whole = _source("page.html")
    return whole.replace(_STYLE, _source("page.css")).replace(_SCRIPT, _source("page.js")).encode()


@cache
def page_headers() -> tuple[tuple[str, str], ...]:
    """For that page alone: no script or style of others runs, even in its text, and it sends nothing anywhere."""
    policy = (
        "default-src 'none'",
        f"script-src {_hash(_source('page.js'))}",
        f"style-src {_hash(_source('page.css'))}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return (
        ("Content-Security-Policy", "; ".join(policy)),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Referrer-Policy", "no-referrer"),
    )


MAX_SLOW: Final = 5
MAX_STAGES: Final = 3
"""Of one operation: those that took longest."""


def slow_document(slow: SlowOperations, *, with_keys: bool) -> dict[str, Any]:
    """The latest of them, the last one first."""
    return {
        "threshold_seconds": slow.threshold_seconds,
        "latest": [_operation(each, with_keys=with_keys) for each in slow.latest(MAX_SLOW)],
    }


def _operation(operation: SlowOperation, *, with_keys: bool) -> dict[str, Any]:
    """Its outcome may name a key, so it is told only whether it failed."""
    longest = sorted(operation.stages, key=lambda stage: -stage.seconds)[:MAX_STAGES]
    return {
        "what": operation.request.what,
        "key": shown(operation.request.key, MAX_KEY_LETTERS) if with_keys else None,
        "keys": operation.request.keys,
        "unix": round(operation.request.unix, 3),
        "seconds": round(operation.seconds, 4),
        "waiting_seconds": round(operation.waiting_seconds, 4),
        "failed": operation.request.outcome != "ok",
        "stages": [_stage(each) for each in longest],
    }


def _stage(stage: Stage) -> dict[str, Any]:
    where = {"peer": shown(stage.peer), "transport": stage.transport}
    return {"what": stage.what, "seconds": round(stage.seconds, 4), **where}


DATA_HEADERS: Final = (("Cross-Origin-Resource-Policy", "same-origin"),)
"""Keeps other sites' pages in the same browser from reading it."""


def metrics_pages(peer: ObservedPeer, source: StatusSource) -> Pages:
    """The pages of one peer, by their paths."""
    # Parts that most peers do without are not imported for them.
    from prometheus_client.exposition import generate_latest
    from prometheus_client.process_collector import ProcessCollector
    from prometheus_client.registry import CollectorRegistry

    from p2pstore.status.metrics import CONTENT_TYPE, exposition

    html, headers = page_bytes(), page_headers()

    process = CollectorRegistry()
    ProcessCollector(registry=process)  # CPU time, memory and descriptors, by Prometheus' own names

    def metrics_in_steps() -> Steps[Answer]:
        document = peer.document(private=False)
        yield
        cluster = peer.core.gossip.config.cluster
        body = yield from exposition(document, cluster, peer.watch.measures)
        body += generate_latest(process)
        return Answer(HTTPStatus.OK, CONTENT_TYPE, body)

    def json_answer(body: bytes, *headers: tuple[str, str]) -> Answer:
        return Answer(HTTPStatus.OK, "application/json", body, headers)

    def ready() -> Answer:
        state = peer.state()
        if state == "joining":
            return text_answer(HTTPStatus.SERVICE_UNAVAILABLE, "no bootstrap peer has answered yet")
        status = HTTPStatus.OK if state == "ready" else HTTPStatus.SERVICE_UNAVAILABLE
        return text_answer(status, state)

    return {
        "/": lambda: Answer(HTTPStatus.OK, "text/html; charset=utf-8", html, headers),
        "/status.json": lambda: json_answer(source.document_bytes(), *DATA_HEADERS),
        "/metrics": lambda: in_turns(metrics_in_steps()),
        "/openapi.json": lambda: json_answer(_source("openapi.json").encode()),
        "/livez": lambda: text_answer(HTTPStatus.OK, "alive"),
        "/readyz": ready,
    }
