"""Clients that are used under the wrong event loop, without one, or before or after they are connected."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path
from typing import Any

import pytest
import trio

import p2pstore
from p2pstore import aio, blocking
from p2pstore.errors import BufferTooSmall, StoreClosed
from tests.contract.small_peer import SmallPeer, small_peer


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[SmallPeer]:
    with small_peer(tmp_path / "peer.sock") as peer:
        yield peer


async def enter(context: AbstractAsyncContextManager[Any]) -> None:
    async with context:
        pytest.fail("entered")


def plainly(client: Any) -> None:
    with client:
        pytest.fail("entered")


def by_hand(coroutine: Coroutine[Any, Any, Any]) -> None:
    """As a program without an event loop."""
    with closing(coroutine):
        coroutine.send(None)


@pytest.mark.parametrize(
    ("kind", "says", "action"),
    [
        (RuntimeError, r"needs trio.*aio\.connect", lambda p: asyncio.run(enter(p2pstore.connect(p)))),
        (RuntimeError, r"needs trio.*blocking", lambda p: by_hand(enter(p2pstore.connect(p)))),
        (RuntimeError, r"needs trio.*aio", lambda p: asyncio.run(enter(p2pstore.open_peer()))),
        (RuntimeError, r"needs trio.*blocking", lambda p: by_hand(enter(p2pstore.open_peer()))),
        (RuntimeError, r"needs asyncio.*p2pstore\.connect", lambda p: trio.run(enter, aio.connect(p))),
        (RuntimeError, r"needs asyncio.*blocking", lambda p: by_hand(enter(aio.connect(p)))),
        (TypeError, r"async with p2pstore\.connect.*blocking", lambda p: plainly(p2pstore.connect(p))),
        (TypeError, r"async with p2pstore\.aio.*blocking", lambda p: plainly(aio.connect(p))),
        (RuntimeError, r"not connected.*async with", lambda p: trio.run(p2pstore.connect(p).get, "k")),
        (RuntimeError, r"not connected.*await", lambda p: asyncio.run(aio.connect(p).get("k"))),
        (
            RuntimeError,
            r"not connected.*async with",
            lambda p: p2pstore.connect(p).register(bytearray(1)),
        ),
    ],
)
def test_the_wrong_world_says_which_is_the_right_one(
    kind: type[Exception], says: str, action: Callable[[str], Any], peer: SmallPeer
) -> None:
    with pytest.raises(kind, match=says):
        action(str(peer.path))


def test_what_is_closed_or_too_small_says_what_to_do(peer: SmallPeer) -> None:
    with blocking.connect(str(peer.path)) as client:
        client.put("k", b"value")
        with pytest.raises(BufferTooSmall, match=r"5 bytes.*room for 4.*get\(\)"):
            client.get_into("k", bytearray(4))
    with pytest.raises(StoreClosed, match=r"client is closed: .*connect again"):
        client.get("k")
