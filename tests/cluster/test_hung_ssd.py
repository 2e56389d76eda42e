"""Peers whose SSD hangs: readers get the object elsewhere or an error soon, and the peer ends when it is told to."""

import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random

import pytest
import trio

from p2pstore import Unavailable, blocking
from p2pstore.errors import ConfigError
from p2pstore.objects import key_digest
from p2pstore.peer import Peer, open_peer
from p2pstore.peer import ssd_opening as ssd_module
from p2pstore.ssd_tier.disk import FileDisk, open_disk
from tests.cluster.peers import config
from tests.unit.hanging_disk import Hang, hanging_disks
from tests.waiting import until

VALUE = Random(1).randbytes(300_000)
COLD = Random(2).randbytes(300_000)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    with hanging_disks(monkeypatch) as made:
        yield made


def peer(
    folder: Path, name: str, *others: Peer, **settings: object
) -> AbstractAsyncContextManager[Peer]:
    return open_peer(config(folder, name, *others, **{"drain_timeout": 2.0, **settings}))


@asynccontextmanager
async def peer_with_ssd(folder: Path, *others: Peer, **more: object) -> AsyncIterator[Peer]:
    (folder / "ssd").mkdir()
    settings: dict[str, object] = {"ssd": str(folder / "ssd"), "ssd_capacity": "256MiB", **more}
    async with peer(folder, "owner", *others, **settings) as running:
        yield running


async def cool(owner: Peer, key: str) -> None:
    """Leave an object on the SSD alone."""
    await owner.put(key, COLD, durable=True)
    await push_out(owner, key)


async def push_out(owner: Peer, key: str) -> None:
    """Evict objects from its memory: those read more than once outlive a few rounds of a hundred others."""
    fillers = count()
    with trio.fail_after(30.0):
        while in_memory(owner, key):
            await owner.put(f"filler-{next(fillers)}", COLD)
    assert owner.node.core.cold.find(key_digest(key, "default"), owner.node.now)


def in_memory(owner: Peer, key: str) -> bool:
    return any(entry.key == key for entry in owner.node.core.segment.entries())


def fetches_reserved(owner: Peer) -> int:
    """Rooms in memory that are kept for what is being read."""
    reservations = owner.node.core.segment.reservations
    return sum(isinstance(each.session, tuple) and each.session[0] == "fetch" for each in reservations)


async def test_an_object_on_an_ssd_that_hangs_is_unavailable_soon_and_there_again_later(
    tmp_path: Path, hang: Hang
) -> None:
    async with peer_with_ssd(tmp_path) as owner, peer(tmp_path, "reader", owner) as reader:
        await cool(owner, "k")
        await until(lambda: reader.contains_nowait("k"))
        hang.on = True
        with trio.fail_after(20.0):
            for each in (owner, reader):
                with pytest.raises(Unavailable):
                    await each.get("k")
            with pytest.raises(Unavailable, match="the SSD did not answer"):
                await owner.put("durable", VALUE, durable=True)
            assert await owner.get("durable") == VALUE
        assert await owner.contains("k")
        assert hang.hung
        ssd = (await owner.statistics())["peer"]["ssd"]
        assert ssd["unanswered"] >= 1
        hang.end()
        await until(lambda: not owner.node.ssd.tier.is_silent)  # type: ignore[union-attr]
        assert await owner.get("k") == COLD
        assert await reader.get("k") == COLD
        assert ssd["state"] == "ok"


async def test_while_the_ssd_hangs_others_are_asked_and_memory_is_not_used_again(
    tmp_path: Path, hang: Hang
) -> None:
    async with peer(tmp_path, "other") as other, peer_with_ssd(tmp_path, other) as owner:
        await until(lambda: other.node.core.live_peers())
        await cool(owner, "k")
        await until(lambda: other.contains_nowait("k"))
        async with other.lease("k", here=True):
            pass
        assert in_memory(other, "k")
        await until(lambda: len(owner.locate_nowait("k")) == 2)
        await push_out(owner, "k")
        hang.on = True
        began = trio.current_time()
        with trio.fail_after(20.0):
            assert await owner.get("k") == COLD
        assert trio.current_time() - began < 4.0, "others hold it: nobody waits long"
        assert hang.hung
        assert fetches_reserved(owner) == 1, "the disk may still write there"
        hang.end()
        await until(lambda: not fetches_reserved(owner))
        assert await owner.get("k") == COLD


@pytest.mark.parametrize("drain_timeout", [0.5, 60.0])
async def test_a_peer_ends_though_reads_writes_and_syncs_hang(
    tmp_path: Path, hang: Hang, drain_timeout: float
) -> None:
    with trio.fail_after(30.0):
        async with peer_with_ssd(tmp_path, drain_timeout=drain_timeout) as owner:
            await cool(owner, "k")
            hang.on = True
            async with trio.open_nursery() as nursery:

                async def get() -> None:
                    with pytest.raises(Unavailable):
                        await owner.get("k")

                async def put() -> None:
                    with pytest.raises(Unavailable):
                        await owner.put("durable", VALUE, durable=True)

                nursery.start_soon(get)
                nursery.start_soon(put)
            await owner.put("last words", VALUE)
    assert hang.hung


async def test_a_peer_does_not_start_on_an_ssd_that_hangs(
    tmp_path: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssd_module, "OPENING_SECONDS", 0.5)
    hang.on = True
    with trio.fail_after(20.0), pytest.raises(ConfigError, match="does not answer"):
        async with peer_with_ssd(tmp_path):
            pass


async def test_a_start_that_is_cancelled_while_the_path_hangs_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_go_on = threading.Event(), threading.Event()
    disks: list[FileDisk] = []

    def slow(*arguments: str | int | None) -> FileDisk:
        began.set()
        assert may_go_on.wait(20.0)
        disks.append(open_disk(*arguments))  # type: ignore[arg-type]  # as they came
        return disks[0]

    monkeypatch.setattr(ssd_module, "open_disk", slow)
    with trio.fail_after(20.0):
        async with trio.open_nursery() as nursery:

            async def start() -> None:
                async with peer_with_ssd(tmp_path):
                    pytest.fail("it was cancelled")

            nursery.start_soon(start)
            await until(began.is_set)
            nursery.cancel_scope.cancel()
    may_go_on.set()
    await until(lambda: disks and not disks[0]._threads._alive)
    monkeypatch.undo()
    async with peer(tmp_path, "owner", ssd=str(tmp_path / "ssd"), ssd_capacity="256MiB"):
        pass


PROGRAM = """
import signal, sys
import pytest
from mooncake_p2p.main import main
from tests.unit.hanging_disk import hanging_disks
with pytest.MonkeyPatch.context() as patch, hanging_disks(patch) as hang:
    signal.signal(signal.SIGUSR1, lambda number, frame: setattr(hang, "on", True))
    sys.argv[0] = "mooncake-p2p"
    main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_ends_though_its_ssd_hangs(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "ssd").mkdir()
    socket = tmp_path / "socket"
    command = [sys.executable, "-c", PROGRAM, "join", "--memory", "32MiB", "--drain-timeout", "2"]
    command += ["--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state")]
    command += ["--socket", str(socket), "--ssd", str(tmp_path / "ssd"), "--ssd-capacity", "256MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready ")
            with blocking.connect(str(socket)) as client:
                client.put("before", VALUE, durable=True)
                process.send_signal(signal.SIGUSR1)
                with pytest.raises(Unavailable, match="did not answer"):
                    client.put("during", VALUE, durable=True)
                client.put("after", VALUE)
            process.send_signal(number)
            assert process.wait(15.0) in (0, 130, 143)
        finally:
            process.kill()
