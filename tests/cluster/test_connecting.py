"""Connections that take longer to make than those who want them wait."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing

from p2pstore.gossip.links import connection_keeper as attempts_module
from p2pstore.gossip.links import host as host_module
from p2pstore.gossip.links import secured_connections as dialling
from p2pstore.gossip.links.connection_keeper import Attempts
from p2pstore.gossip.links.control_link import LinkError
from p2pstore.gossip.links.host import ControlHost
from p2pstore.runtime.trio_tasks import open_background_nursery
from tests.cluster.test_control_host import opened, peer_id, ping
from tests.contract.test_link import Proxy
from tests.waiting import until


@asynccontextmanager
async def path_to(host: ControlHost) -> AsyncIterator[tuple[Proxy, str]]:
    async with open_background_nursery() as nursery:
        path = Proxy(nursery, host.listening)
        yield path, f"127.0.0.1:{await path.listen()}"


async def test_askers_who_wait_briefly_get_a_connection_on_a_slow_path() -> None:
    """The handshake takes some eight round trips: more than any of these requests waits."""
    async with opened(1) as host, opened(2) as other, path_to(other) as (path, address):
        path.delay_seconds = 0.03
        with trio.fail_after(20):
            while not host.connected():
                with suppress(LinkError):
                    await ping(host, peer_id(2), address, 0.15)
        path.delay_seconds = 0.0
        await ping(host, peer_id(2), address)
        assert path.connections == 1


async def test_the_cancellation_of_one_who_waits_harms_no_other() -> None:
    async with opened(1) as host, opened(2) as other, path_to(other) as (path, address):
        path.cut("there")
        async with trio.open_nursery() as nursery:
            first = trio.CancelScope()

            async def hasty() -> None:
                with first:
                    await ping(host, peer_id(2), address)

            nursery.start_soon(hasty)
            await until(lambda: path.connections)
            for _ in range(5):
                nursery.start_soon(ping, host, peer_id(2), address)
            await trio.testing.wait_all_tasks_blocked(0.01)
            first.cancel()
            await trio.testing.wait_all_tasks_blocked(0.01)
            path.heal()
        assert path.connections == 1
        assert not len(host._attempts)


@pytest.mark.parametrize("way", ["close", "disconnect", "deadline"])
async def test_an_attempt_ends_with_the_host_with_a_disconnect_and_in_its_own_time(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "deadline":
        monkeypatch.setattr(host_module, "CONNECTING_SECONDS", 0.3)
    errors: list[LinkError] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:  # only its kernel answers
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        async def wait() -> None:
            try:
                await ping(host, peer_id(2), address)
            except LinkError as error:
                errors.append(error)

        async with opened(1) as host:
            with pytest.raises(LinkError, match=r"within 0\.1 s"):
                await ping(host, peer_id(2), address, 0.1)
            assert len(host._attempts) == 1  # though no request waits for it
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked(0.01)
                began = trio.current_time()
                if way == "close":
                    host.close()
                elif way == "disconnect":
                    await host.disconnect(peer_id(2))
            assert trio.current_time() - began < 2
            assert len(errors) == 2
            await until(lambda: not len(host._attempts))
            if way == "close":
                with pytest.raises(LinkError, match="stops"):
                    await ping(host, peer_id(2), address)


async def test_a_machine_that_does_not_answer_at_all_is_soon_tried_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a machine that is back after a while waits for a kernel that repeats itself ever less often."""
    monkeypatch.setattr(dialling, "TCP_SECONDS", 0.2)

    async def never(_endpoint: object) -> None:
        await trio.sleep_forever()

    async with opened(1) as host, opened(2) as other:
        address = f"127.0.0.1:{other.listening[1]}"
        with monkeypatch.context() as patch:
            patch.setattr(dialling, "connect", never)
            with pytest.raises(LinkError, match=r"did not answer within 0\.2 s"):
                await ping(host, peer_id(2), address)
        await ping(host, peer_id(2), address)


async def test_a_peer_that_moved_is_dialled_where_it_is_now() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with opened(1) as host, opened(2) as other:
            with pytest.raises(LinkError):
                await ping(host, peer_id(2), f"127.0.0.1:{silent.getsockname()[1]}", 0.05)
            await ping(host, peer_id(2), f"127.0.0.1:{other.listening[1]}", 5)


async def test_one_attempt_too_many_is_refused_and_the_place_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts_module, "MAX_ATTEMPTS", 2)
    attempts: Attempts[int] = Attempts(5.0)
    gate = trio.Event()

    async def start() -> int:
        await gate.wait()
        return 7

    async with trio.open_nursery() as nursery:
        for key in range(2):
            nursery.start_soon(attempts.join, nursery, b"peer", key, start)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(LinkError, match="already"):
            await attempts.join(nursery, b"peer", 2, start)
        gate.set()
        await until(lambda: not len(attempts))
        assert await attempts.join(nursery, b"peer", 2, start) == 7
