"""Peers with TLS on their data connections and peers without, in one cluster, and their clients."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from p2pstore import aio, blocking
from p2pstore.errors import ConfigError
from p2pstore.objects import MIB
from p2pstore.peer import Peer, open_peer
from tests.cluster.machines import done, new_machine
from tests.cluster.peers import config
from tests.cluster.test_doctor import examine, findings
from tests.waiting import eventually, until

VALUE = os.urandom(2 * MIB + 3)


@pytest.fixture
async def mixed(tmp_path: Path) -> AsyncIterator[list[Peer]]:
    """Two peers with TLS and one without, which read each other by TCP alone."""
    async with AsyncExitStack() as stack:
        peers: list[Peer] = []
        for name, tls in (("secret", "on"), ("open", "off"), ("guarded", "on")):
            settings = config(tmp_path, name, *peers[:1], transport="tcp", data_tls=tls)
            peers.append(await stack.enter_async_context(open_peer(settings)))
        await until(lambda: all(len(each.node.core.live_peers()) == 2 for each in peers))
        yield peers


async def test_peers_with_and_without_read_each_other(mixed: list[Peer]) -> None:
    assert [each.data[0].partition("127")[0] for each in mixed] == ["tls://", "", "tls://"]
    for holder in mixed:
        key = f"of {holder.name}"
        await holder.put(key, VALUE)
        for reader in mixed:
            assert await reader.get(key, wait=10) == VALUE


async def test_every_kind_of_client_reads_and_stores_over_tls(mixed: list[Peer]) -> None:
    secret, plain, _ = mixed
    await secret.put("key", VALUE)
    await until(lambda: plain.contains_nowait("key"))

    def by_blocking() -> bytes:
        with blocking.connect(plain.socket) as client:
            return bytes(client.get("key"))

    async def by_asyncio() -> bytes:
        async with aio.connect(plain.socket) as client:
            return bytes(await client.get("key"))

    assert await trio.to_thread.run_sync(by_blocking) == VALUE
    assert await trio.to_thread.run_sync(lambda: asyncio.run(by_asyncio())) == VALUE
    assert secret.node.served.bytes >= 2 * len(VALUE)


async def test_a_value_that_has_no_room_here_is_stored_over_tls(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        secret = await stack.enter_async_context(
            open_peer(config(tmp_path, "secret", transport="tcp", data_tls="on"))
        )
        empty = await stack.enter_async_context(
            open_peer(config(tmp_path, "empty", secret, transport="tcp", memory=0))
        )
        await until(lambda: len(empty.node.core.live_peers()) == 1)
        await empty.put("key", VALUE)
        assert secret.contains_nowait("key")
        assert await secret.get("key") == VALUE
        assert await empty.get("key", wait=10) == VALUE


async def test_rdma_is_refused_where_bytes_are_to_be_encrypted(tmp_path: Path) -> None:
    settings = config(tmp_path, "secret", transport="rdma", data_tls="on")
    with pytest.raises(ConfigError, match="not encrypted"):
        async with open_peer(settings):
            pass


def test_the_doctor_examines_a_peer_with_tls() -> None:
    with new_machine() as machine:
        done(machine.run("keygen", str(machine.folder / "key")))
        key = ("--cluster-key-file", str(machine.folder / "key"))
        peer = machine.join("secret", *key, "--data-tls", "on")
        eventually(lambda: peer.alive() == 1)
        (address,) = peer.ready["data"]
        assert address.startswith("tls://")
        found = findings(done(examine(peer, "--json")))
        assert " over TLS, protocol " in found[f"data {address}"]["value"]
        assert found["tcp from it"]["measured"]["bytes_per_second"] > 0
        assert found["tcp to it"]["measured"]["bytes_per_second"] > 0
