"""What a peer says of itself over HTTP: to Prometheus, and to whoever wants to know whether it works."""

from __future__ import annotations

from collections.abc import Awaitable
from http import HTTPStatus
from typing import Final

from p2pstore.peer.node import Node
from p2pstore.runtime.stepping import Steps
from p2pstore.runtime.trio_tasks import in_turns
from p2pstore.status.metrics.metrics_server import Answer, Pages, text_answer
from p2pstore.status.source import StatusSource
from p2pstore.status.statistics import peer_document

DATA_HEADERS: Final = (("Cross-Origin-Resource-Policy", "same-origin"),)
"""Other sites' pages are not to have it, should they run in the browser of somebody who can reach this peer."""


def metrics_pages(node: Node, status: StatusSource) -> Pages:
    """The pages of one peer, by their paths."""
    # What most peers do without is not imported for them.
    from prometheus_client.exposition import generate_latest
    from prometheus_client.process_collector import ProcessCollector
    from prometheus_client.registry import CollectorRegistry

    from p2pstore.status.metrics.metrics import CONTENT_TYPE, exposition
    from p2pstore.status.page import page_bytes, page_headers

    html, headers = page_bytes(), page_headers()

    def page() -> Answer:
        return Answer(HTTPStatus.OK, "text/html; charset=utf-8", html, headers)

    def document() -> Answer:
        return Answer(HTTPStatus.OK, "application/json", status.document_bytes(), DATA_HEADERS)

    process = CollectorRegistry()
    ProcessCollector(registry=process)  # CPU time, memory and descriptors, by Prometheus' own names

    def metrics() -> Answer | Awaitable[Answer]:
        return in_turns(metrics_in_steps())

    def metrics_in_steps() -> Steps[Answer]:
        peer = peer_document(node, private=False)
        yield
        body = yield from exposition(peer, node.config.cluster, node.watch.measures)
        body += generate_latest(process)
        return Answer(HTTPStatus.OK, CONTENT_TYPE, body)

    def alive() -> Answer:
        return text_answer(HTTPStatus.OK, "alive")

    def ready() -> Answer:
        if node.leave_requested.is_set() or node.core.closing:
            return text_answer(HTTPStatus.SERVICE_UNAVAILABLE, "leaving")
        if node.config.bootstrap and not node.settled.is_set():
            return text_answer(HTTPStatus.SERVICE_UNAVAILABLE, "no bootstrap peer has answered yet")
        return text_answer(HTTPStatus.OK, "ready")

    return {
        "/": page,
        "/status.json": document,
        "/metrics": metrics,
        "/livez": alive,
        "/readyz": ready,
    }
