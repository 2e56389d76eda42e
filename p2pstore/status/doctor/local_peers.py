"""The peers that run on this machine, asked over their local sockets. Shell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import p2pstore
from p2pstore import blocking
from p2pstore.config import split_address
from p2pstore.errors import NoLocalPeer, P2PStoreError
from p2pstore.local.socket_paths import find_socket, live_sockets
from p2pstore.status.doctor.checks import CHECK_SECONDS, Check
from p2pstore.status.doctor.finding import Finding, fine
from p2pstore.status.doctor.network_rules import SsdReading
from p2pstore.status.doctor.peer_rules import (
    LocalPeerReading,
    absent_local_peer,
    judge_local_peer,
    silent_local_peer,
)

ANSWER_SECONDS: Final = 2.0


@dataclass(slots=True)
class LocalPeers:
    """Who uses which port here; filled by the checks."""

    ports: dict[int, str] = field(default_factory=dict)

    def checks(self, socket: str | None, named: bool) -> list[Check]:
        """A check per peer. `named`: the socket was named, by option or environment, so it must answer."""
        paths = [find_socket(socket)] if named else live_sockets()
        if not paths:
            return [Check("peer", lambda: [fine("peer", "none runs on this machine")])]
        return [
            Check(f"peer at {path}", lambda path=path: self._examine(path), 2 * CHECK_SECONDS)  # type: ignore[misc]  # bound now
            for path in paths
        ]

    def _examine(self, path: Path) -> Sequence[Finding]:
        try:
            with blocking.connect(path, timeout=ANSWER_SECONDS) as client:
                document = client.statistics()
        except NoLocalPeer as error:
            return [absent_local_peer(str(path), str(error))]
        except (P2PStoreError, OSError) as error:
            return [silent_local_peer(str(path), str(error) or type(error).__name__)]
        peer = document["peer"]
        for address in (*peer.get("control", ()), *peer.get("data", ())):
            self.ports[split_address(address, "address")[1]] = peer["name"]
        return judge_local_peer(_reading(document), p2pstore.__version__)


def _reading(document: dict[str, Any]) -> LocalPeerReading:
    peer = document["peer"]
    return LocalPeerReading(
        name=peer["name"],
        software=peer["software"],
        cluster=document["cluster"]["name"],
        live=document["cluster"]["peers"],
        clock_ahead_seconds=peer.get("clock_ahead_seconds"),
        ssd=_ssd_reading(peer["ssd"]) if "ssd" in peer else None,
        problems=peer.get("problems"),
    )


def _ssd_reading(ssd: dict[str, Any]) -> SsdReading:
    return SsdReading(
        state=ssd["state"],
        why=ssd["why"],
        cure=ssd.get("cure", ""),
        capacity_bytes=ssd["capacity_bytes"],
        live_bytes=ssd["live_bytes"],
        objects=ssd["objects"],
        damaged=ssd["damaged"],
        read_p99_ms=ssd["read_latency"].get("p99_ms") or 0.0,
    )
