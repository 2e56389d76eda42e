"""A user's program, checked by mypy in strict mode against the installed package: the types it sees."""

import re
import sys
from pathlib import Path

from tests.commands import ran

PROGRAM = """
from typing import Literal, assert_type

import numpy
import p2pstore
from p2pstore import aio, blocking


async def any_store(store: p2pstore.ObjectStore) -> None:
    result = await store.put("k", b"v", replicas=2, pin="soft", ttl=1.5)
    assert_type(result, p2pstore.PutResult)
    assert_type(result.status, Literal["created", "unchanged", "kept_existing"])
    assert_type(await store.get("k", wait=1), bytes)
    assert_type(await store.get_into("k", bytearray(1)), int)
    assert_type((await store.put_many([("k", b"v")]))[0].unwrap(), p2pstore.PutResult)
    assert_type((await store.get_many_into([("k", bytearray(1))]))[0].unwrap(), int)
    assert_type((await store.remove_many(["k"]))[0].value, bool | None)
    async with store.lease("k") as view:
        assert_type(view, memoryview[int])
    with store.register(numpy.zeros(4)) as registered:
        await store.get_into("k", registered)
    assert_type((await store.locate("k"))[0].pin, Literal["none", "soft", "hard"])
    async with store.transfers([p2pstore.TransferRequest("k", bytearray(1))]) as batch:
        batch.submit([p2pstore.TransferRequest("k", b"v", "put", overwrite=True)])
        assert_type(batch.status(0), p2pstore.TransferStatus)
        assert_type((await batch.results())[0].unwrap(), int | p2pstore.PutResult)


async def under_trio() -> None:
    async with p2pstore.connect(namespace="n") as client:
        await any_store(client)
        assert_type(client, p2pstore.Client)
    async with p2pstore.open_peer(p2pstore.PeerConfig(memory="1GiB")) as peer:
        await any_store(peer)
        assert_type(peer.contains_nowait("k"), bool)


async def under_asyncio() -> None:
    client = await aio.connect()
    assert_type(client, p2pstore.AioClient)
    await any_store(client)
    await client.aclose()
    async with aio.connect() as entered:
        assert_type(entered, p2pstore.AioClient)


def in_threads() -> None:
    with blocking.connect() as store:
        assert_type(store.get("k"), bytes)
        assert_type(store.put_many([("k", b"v")])[0].unwrap(), p2pstore.PutResult)
        with store.lease("k") as view:
            assert_type(view, memoryview[int])
        with store.transfers() as batch:
            assert_type(batch.wait(0).unwrap(), int | p2pstore.PutResult)
        store.put("k", b"v", pin="firm")
        store.put(b"k", b"v")
        store.get_tensor("t", framework="jax")
"""
CACHE = Path(__file__).parents[2] / ".mypy_cache" / "of-a-user"
REFUSED = ['"pin"', "1", '"framework"']
"""The arguments that are wrong in the last three lines; nothing else may be."""


def test_a_program_that_uses_every_world(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = ran(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(CACHE), "program.py"],
        300,
        cwd=tmp_path,
    )
    assert re.findall(r'error: Argument (\d+|"\w+") has', done.stdout) == REFUSED, done.stdout
    assert done.stdout.count(" error: ") == len(REFUSED), done.stdout
    assert done.stderr == ""
