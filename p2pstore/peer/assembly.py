"""Puts a peer together: memory, core, links, transports, servers. Shell."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import trio

import p2pstore
from p2pstore.access.keyring import Role
from p2pstore.checkpoint.peer.checkpoint_peer import CheckpointPeer
from p2pstore.checkpoint.peer.client_requests import ClientRequests, PeerCheckpoints
from p2pstore.config import PeerConfig
from p2pstore.core.copies.hand_over import coldest_use
from p2pstore.core.copies.repair import TIMING, RepairTiming
from p2pstore.core.peer_core import PeerCore
from p2pstore.errors import ConfigError, ProtocolError
from p2pstore.gossip.gossip_config import GossipConfig, preset
from p2pstore.gossip.homes.partition_homes import ModeLimits
from p2pstore.gossip.links.host import HostSettings, open_control_host
from p2pstore.gossip.links.identity import Ed25519Verifier
from p2pstore.gossip.machine import Gossip
from p2pstore.gossip.records import (
    PEER_RECORD_FORMAT,
    ClusterRecord,
    LogHead,
    PeerRecord,
    SegmentOffer,
    SignedRecord,
    TransportOffer,
)
from p2pstore.local.listener import serve_local
from p2pstore.local.socket_paths import answers as somebody_answers
from p2pstore.local.socket_paths import default_socket_path
from p2pstore.location_table import LocationTable, block_count, format_table, table_bytes
from p2pstore.memory.mapped.kept_file import KeptMemory
from p2pstore.memory.mapped.mapped_memory import SharedMemory, create_table_memory
from p2pstore.memory.policies import make_policy
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import SEGMENT_ID_BYTES, plan_geometry
from p2pstore.objects import HybridClock, clock_from_unix_seconds, parse_bytes
from p2pstore.peer.for_clients.local_backend import Erasing, PeerLocalBackend
from p2pstore.peer.for_peers.data_backend import PeerDataBackend, PeerStoreBackend
from p2pstore.peer.lifetime.credentials import Credentials, log_expelled, refuse_open_door
from p2pstore.peer.lifetime.peer_addresses import (
    advertised,
    control_listen_address,
    data_listen_addresses,
    link_bytes_per_second,
)
from p2pstore.peer.node import Node
from p2pstore.peer.segment_memory import (
    SegmentMemory,
    begin_with_kept,
    create_segment_memory,
    provide_pages,
    tell_what_returned,
    watch_earlier_clients,
)
from p2pstore.peer.ssd_opening import open_ssd
from p2pstore.runtime import linux
from p2pstore.runtime.linux import host_identity
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.runtime.trio_tasks import open_background_nursery
from p2pstore.state.folder import ephemeral, load_token_file
from p2pstore.state.places import MAX_LOCAL_PEERS
from p2pstore.state.state_directory import StateDirectory
from p2pstore.transfer.data_messages import MAX_DATA_VERSION, MIN_DATA_VERSION, over_tls
from p2pstore.transfer.rdma.rdma_rules import NAME as RDMA
from p2pstore.transfer.rdma.rdma_serving import PeerRdma, open_rdma
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.reading.shm_transport import ShmTransport
from p2pstore.transfer.reading.tcp_transport import TcpTransport
from p2pstore.transfer.serving.data_server import DataServer, open_data_listeners
from p2pstore.transfer.ticket_issuer import TicketIssuer
from p2pstore.transfer.transport import Transport
from p2pstore.wire import decode_body

logger = logging.getLogger("p2pstore.peer")

REPAIR_SHARE: Final = 0.1
"""Of the link, for copies that replace lost ones."""


async def open_memory(config: PeerConfig, state: StateDirectory | None) -> SegmentMemory:
    """Memory for the segment of a peer. Raises `ConfigError`."""
    if not config.keep_memory:
        return create_segment_memory(config)
    if state is None:
        raise ConfigError(
            "keep_memory: without a state directory (state_dir) the next life of this peer does not know what was "
            "removed, and what is its own"
        )
    # Opening looks at all kept objects: in a thread.
    return await trio.to_thread.run_sync(create_segment_memory, config, state.record.last_segment_id)


class Assembly:
    """Puts the parts of a peer together. The stack closes them, the last one first."""

    def __init__(
        self,
        stack: AsyncExitStack,
        config: PeerConfig,
        state: StateDirectory | None,
        memory: SegmentMemory,
    ) -> None:
        self.stack = stack
        self.config = config
        self.state = state
        self.memory = memory
        self.identity = state.identity() if state is not None else ephemeral()
        self.credentials = Credentials(config, self.identity.peer_id)
        self.verifier = Ed25519Verifier()
        self.rng = Random(os.urandom(16))
        unix_ms = int(time.time() * 1000)
        self.segment_id = os.urandom(SEGMENT_ID_BYTES)
        self.incarnation = (
            state.record.next_incarnation(unix_ms, self.segment_id) if state is not None else unix_ms
        )
        self.socket_path = local_socket_path(config)
        self.control: list[str] = []
        self.metrics: str | None = None
        self.data: list[str] = []
        self.location_memory: SharedMemory | None = None
        self.node: Node | None = None
        self.rdma: PeerRdma | None = None

    async def start(self) -> Node:
        """The running peer."""
        config = self.config
        listen = control_listen_address(config)
        listeners = await self._listen_for_data(listen[0])
        repair = self._repair_timing(listeners[0].getsockname()[0])
        core = self._make_core(await trio.to_thread.run_sync(self._make_segment), repair)
        if self.state is not None:
            self._restore(core, self.state)
            core.publishers.load(*self.state.load_publishers())
        node = Node(config=config, core=core, host_id=host_identity(), state=self.state, rng=self.rng)
        node.credentials = self.credentials
        issuer = TicketIssuer(self.identity, self.credentials.ring, core.timekeeping.ahead_of)
        await self._open_transports(node, issuer)
        await self._open_control(node, listen)
        core.gossip.addresses.add_bootstrap(config.bootstrap)
        await self.stack.enter_async_context(open_ssd(config, node))
        if isinstance(self.memory, KeptMemory):
            begin_with_kept(node, self.memory)
        core.timekeeping.started(node.now)
        self.node = node
        await self._serve(node, issuer, listeners)
        self.credentials.warn_if_open()
        if node.ssd is not None:  # the first thing of all when this peer ends
            self.stack.callback(node.ssd.ending.set)
        return node

    async def _listen_for_data(self, control_host: str) -> list[socket.socket]:
        config = self.config
        listeners = await open_data_listeners(data_listen_addresses(config, control_host))
        for listener in listeners:
            self.stack.callback(listener.close)
            refuse_open_door(config, "data_listen", listener.getsockname()[:2])
        self.data = advertised(
            [listener.getsockname()[:2] for listener in listeners],
            config.data_advertise,
            config,
            "data_advertise",
        )
        if config.data_tls == "on":
            self.data = [over_tls(address) for address in self.data]
        return listeners

    def _make_segment(self) -> Segment:
        segment = Segment(
            self.memory.view,
            segment_id=self.segment_id,
            incarnation=self.incarnation,
            geometry=plan_geometry(self.config.memory_bytes, self.config.max_objects),
            policy=make_policy(self.config.eviction_policy),
            quotas=self.config.quotas,
            caps=self.config.caps,
            marks=self.memory.marks if isinstance(self.memory, KeptMemory) else None,
            kept=self.memory.kept if isinstance(self.memory, KeptMemory) else None,
            now=time.time(),
            barrier=linux.memory_barrier,
        )
        self.stack.callback(segment.detach)
        self.stack.callback(segment.close)
        return segment

    def _make_location_table(self, max_rows: int) -> LocationTable | None:
        """An empty one, in memory that clients may map; None where there can be no such memory."""
        blocks = block_count(max_rows)
        try:
            memory = create_table_memory(table_bytes(blocks), "p2pstore-locations")
        except ConfigError as error:
            logger.warning("clients must ask this peer for what others hold: %s", error)
            return None
        self.stack.callback(memory.close)
        self.location_memory = memory
        return format_table(memory.mapping, blocks, self.rng.getrandbits(128))

    def _repair_timing(self, data_host: str) -> RepairTiming:
        timing = TIMING[self.config.network]
        link = link_bytes_per_second(data_host)
        return timing if link is None else replace(timing, bytes_per_second=REPAIR_SHARE * link)

    def _make_core(self, segment: Segment, repair: RepairTiming) -> PeerCore:
        clock = HybridClock(self.state.record.clock if self.state is not None else 0)
        config = self._gossip_config()
        table = self._make_location_table(config.directory.max_rows)
        gossip = Gossip(
            self.identity,
            self.verifier,
            self.incarnation,
            lambda: self._describe(segment),
            config,
            self.rng,
            wall_clock=lambda now: clock_from_unix_seconds(core.unix(now)),
            accepts_clock=lambda stamp, now: clock.observe(stamp, core.believed_unix(now)),
            accepts_peer=self.credentials.allowed.allows,
            location_table=table,
        )
        self.stack.callback(gossip.close)
        core = PeerCore(
            signer=self.identity,
            verifier=self.verifier,
            gossip=gossip,
            segment=segment,
            clock=clock,
            rng=self.rng,
            unix_offset_seconds=time.time() - time.monotonic(),
            repair=repair,
        )
        return core

    def _gossip_config(self) -> GossipConfig:
        config = self.config
        index_bytes = parse_bytes(config.index_memory, "index_memory")
        base, reads_only = preset(config.network), self.credentials.ring.role is not Role.MEMBER
        return replace(
            base,
            cluster=config.cluster,
            directory_setting=config.directory,
            mode_limits=ModeLimits(index_bytes=index_bytes),
            membership=replace(base.membership, observes=reads_only),
        )

    def _describe(self, segment: Segment) -> PeerRecord:
        """This peer's record; gossip fills in sequence and head, and signs."""
        ssd = self.node.ssd if self.node is not None else None
        return PeerRecord(
            format=PEER_RECORD_FORMAT,
            peer_id=self.identity.peer_id,
            cluster=self.config.cluster,
            name=self.config.name,
            incarnation=self.incarnation,
            sequence=0,
            host_id=host_identity(),
            control=self.control,
            data=self.data,
            socket=str(self.socket_path),
            transports=self._transport_offers(),
            segments=[SegmentOffer(segment.segment_id, segment.data_bytes)],
            memory_capacity=segment.data_bytes,
            memory_used=segment.used_bytes,
            memory_coldest=coldest_use(segment),
            ssd_capacity=ssd.capacity_bytes if ssd is not None else 0,
            ssd_used=ssd.tier.live_bytes if ssd is not None else 0,
            load_permille=self.node.load.told_permille if self.node is not None else 0,
            head=LogHead(),
            software=p2pstore.__version__,
            min_protocol=MIN_DATA_VERSION,
            max_protocol=MAX_DATA_VERSION,
            checkpoints=self.node.core.participations.told if self.node is not None else [],
        )

    def _transport_offers(self) -> list[TransportOffer]:
        names = ["tcp", "shm"]
        if self.rdma is not None and self.rdma.works:
            names.append(RDMA)
        return [TransportOffer(name) for name in names]

    def _restore(self, core: PeerCore, state: StateDirectory) -> None:
        gossip = core.gossip
        gossip.addresses.load((None, (address,)) for address in state.load_addresses())
        # Signatures were checked when these came in; a peer that is told of one checks it again.
        floors = _decoded(state)
        gossip.cluster_records.load(floors, state.record.floors_horizon)
        gossip.floors.load(state.record.floors_seen, state.record.clock)
        stamps = (record.clock for record, _ in floors)
        known = (*state.record.floors_horizon.values(), *state.record.floors_seen.values())
        core.timekeeping.found(max((*stamps, *known), default=0))
        state.floors.replace(gossip.cluster_records.dump())

    async def _open_transports(self, node: Node, issuer: TicketIssuer) -> None:
        driver = TrioDriver()
        node.pool = ConnectionPool(driver, issuer.for_peers)
        self.stack.callback(node.pool.close)
        transports: list[Transport] = []
        if self.config.transport in ("auto", "shm"):
            node.shm = ShmTransport(driver)
            self.stack.callback(node.shm.close)
            transports.append(node.shm)
        self.rdma = await self.stack.enter_async_context(
            open_rdma(
                self.config,
                self.memory.view,
                node.pool,
                partial(provide_pages, self.memory, self.config),
            )
        )
        node.rdma = self.rdma
        if self.rdma is not None:
            transports.append(self.rdma.transport)
            # The next record tells the others to read by other ways.
            self.rdma.when_lost(node.core.gossip.own_record.changed)
        if self.config.transport in ("auto", "tcp"):
            transports.append(TcpTransport(node.pool))
        node.routes.transports = transports

    async def _open_control(self, node: Node, listen: tuple[str, int | None]) -> None:
        config = self.config
        node.host = await self.stack.enter_async_context(
            open_control_host(
                listen,
                HostSettings(
                    identity=self.identity,
                    ring=self.credentials.ring,
                    allowed=self.credentials.allowed,
                    cluster=config.cluster,
                    handler=node.control.serve,
                    readers=node.control.serve_reader,
                    on_lost=node.control.lost,
                    on_refused=node.control.stranger_refused,
                    software=p2pstore.__version__,
                    budget=node.budget,
                ),
            )
        )
        refuse_open_door(config, "listen", node.host.listening)
        self.control = advertised(
            [node.host.listening], [config.advertise] if config.advertise else [], config, "advertise"
        )

    async def _serve(self, node: Node, issuer: TicketIssuer, listeners: Sequence[socket.socket]) -> None:
        config = self.config
        nursery = await self.stack.enter_async_context(open_background_nursery())
        await nursery.start(node.run)
        nursery.start_soon(node.statistics.checkup.watch)
        if node.shm is not None:
            nursery.start_soon(node.shm.watch_holders)
        checkpoints = self._open_checkpoints(node)
        requests = ClientRequests(checkpoints)
        nursery.start_soon(requests.watch)
        erasing = Erasing(node, issuer)
        backend = PeerLocalBackend(
            node, self.memory, self.location_memory, issuer, checkpoints=requests, erasing=erasing
        )
        self.stack.callback(backend.close)
        backends = PeerDataBackend(node, checkpoints.parts, erasing)
        data_server = self._make_data_server(node, issuer, backends)
        nursery.start_soon(data_server.serve, listeners)
        if config.metrics is not None:
            await self._serve_status(node, config.metrics, nursery)
        if config.kv_events is not None:
            await self._publish_events(node, nursery)
        local_server = partial(
            serve_local,
            self.socket_path,
            backend,
            mode=config.socket_mode_bits(),
            group=config.socket_group,
            others_read_only=config.socket_others == "read",
            observer=node.watch,
        )
        await nursery.start(local_server)
        if isinstance(self.memory, KeptMemory):
            nursery.start_soon(watch_earlier_clients, node.core.segment, self.memory)
            nursery.start_soon(tell_what_returned, node)
        if self.rdma is None:  # RDMA has all pages provided
            nursery.start_soon(provide_pages, self.memory, config)

    def _open_checkpoints(self, node: Node) -> PeerCheckpoints:
        setting = self.config.checkpoint_memory
        peer = CheckpointPeer(
            node.core,
            node.pool,
            node.routes.host_id,
            node.started_at,
            node.process,
            node.checkpoint_news,
            node.start_soon,
        )
        checkpoints = PeerCheckpoints(
            peer,
            self.identity,
            self.verifier,
            self.rng,
            None if setting is None else parse_bytes(setting, "checkpoint_memory"),
            self.state,
        )
        self.stack.callback(checkpoints.close)
        return checkpoints

    def _make_data_server(
        self, node: Node, issuer: TicketIssuer, backend: PeerDataBackend
    ) -> DataServer:
        server = DataServer(
            backend,
            swarms=backend.swarms,
            stores=PeerStoreBackend(node),
            ring=self.credentials.ring,
            allowed=self.credentials.allowed,
            signer=self.identity,
            verifier=self.verifier,
            incarnation=self.incarnation,
            rdma=self.rdma.server if self.rdma is not None else None,
            tls=self.config.data_tls == "on",
            budget=node.budget,
        )
        node.served, node.data_places = server.traffic, server.places

        def credentials_changed() -> None:
            issuer.renew()
            node.pool.renew()
            log_expelled(node.core.gossip.expel())
            node.host.recheck()
            server.recheck()
            node.process()

        self.credentials.on_change = credentials_changed
        return server

    async def _serve_status(self, node: Node, address: str, nursery: trio.Nursery) -> None:
        """Serve the status page and the metrics. Most peers do without, and without these imports."""
        from p2pstore.peer.prefix_queries import PrefixQueries
        from p2pstore.status.http_server import Site, address_of, open_http_listeners, serve_http
        from p2pstore.status.status_page import StatusSource, metrics_pages

        token_file = self.config.http_token_file
        token = "" if token_file is None else load_token_file(token_file)
        listeners = await open_http_listeners(address)
        self.metrics = address_of(listeners)
        source = StatusSource(node.statistics, with_keys=self.config.metrics_keys)
        pages, queries = metrics_pages(node.statistics, source), PrefixQueries(node).by_path()
        nursery.start_soon(serve_http, listeners, Site(pages, queries, token))

    async def _publish_events(self, node: Node, nursery: trio.Nursery) -> None:
        """Publish events about keys, for which few peers need this import."""
        from p2pstore.peer.event_stream import EventStream

        stream = EventStream(node)
        await stream.open()
        nursery.start_soon(stream.run)


def local_socket_path(config: PeerConfig) -> Path:
    """Where this peer's socket goes: as configured, else the default place for its name; with a number
    behind the name when another peer of that name runs here."""
    if config.socket is not None:
        return Path(config.socket)
    for number in range(1, MAX_LOCAL_PEERS + 1):
        name = config.name if number == 1 else f"{config.name}-{number}"
        path = default_socket_path(name, shared=bool(config.socket_mode_bits() & 0o077))
        if not somebody_answers(path):
            return path
    raise ConfigError(
        f"socket: {MAX_LOCAL_PEERS} peers named {config.name} run here; give --socket, or PeerConfig(socket=...)"
    )


def _decoded(state: StateDirectory) -> list[tuple[ClusterRecord, SignedRecord]]:
    kept, unreadable = [], 0
    for signed in state.floors.load():
        try:
            kept.append((decode_body(ClusterRecord, signed.body), signed))
        except ProtocolError:
            unreadable += 1
    if unreadable:
        state.floors.lost(f"floors.bin has {unreadable:,} records that are none")
    return kept
