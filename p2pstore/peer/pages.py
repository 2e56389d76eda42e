"""What a peer says of itself over HTTP: to Prometheus, and to whoever wants to know whether it works."""

from __future__ import annotations

from http import HTTPStatus

from p2pstore.peer.metrics_server import Answer, Pages, text_answer
from p2pstore.peer.node import Node
from p2pstore.peer.statistics import cluster_document, peer_document


def metrics_pages(node: Node) -> Pages:
    """The pages of one peer, by their paths."""
    # What most peers do without is not imported for them.
    from prometheus_client.exposition import generate_latest
    from prometheus_client.process_collector import ProcessCollector
    from prometheus_client.registry import CollectorRegistry

    from p2pstore.peer.metrics import CONTENT_TYPE, exposition

    process = CollectorRegistry()
    ProcessCollector(registry=process)  # CPU time, memory and descriptors, by Prometheus' own names

    def metrics() -> Answer:
        peer = peer_document(node, private=False)
        cluster = cluster_document(node.core, node.now)
        body = exposition(peer, cluster, node.watch.measures) + generate_latest(process)
        return Answer(HTTPStatus.OK, CONTENT_TYPE, body)

    def alive() -> Answer:
        return text_answer(HTTPStatus.OK, "alive")

    def ready() -> Answer:
        if node.leave_requested.is_set() or node.core.closing:
            return text_answer(HTTPStatus.SERVICE_UNAVAILABLE, "leaving")
        if node.config.bootstrap and not node.settled.is_set():
            return text_answer(HTTPStatus.SERVICE_UNAVAILABLE, "no bootstrap peer has answered yet")
        return text_answer(HTTPStatus.OK, "ready")

    return {"/metrics": metrics, "/livez": alive, "/readyz": ready}
