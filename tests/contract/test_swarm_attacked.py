"""An admitted member that is hostile: what it sends over real links and connections must cost others nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import pytest
import trio

from p2pstore.checkpoint.swarm.selection import SwarmConfig
from p2pstore.checkpoint.swarm.swarm_messages import (
    Grant,
    Invite,
    Kind,
    Members,
    Needs,
    NewPieces,
    PieceMapMessage,
    Refuse,
    kind_of,
)
from p2pstore.runtime.streams import ByteStream
from p2pstore.transfer.data_messages import (
    DataKind,
    GetPiece,
    PieceReply,
    PieceStatus,
    PieceTaken,
    SwarmLink,
)
from p2pstore.transfer.reading.data_connection import DataConnection
from p2pstore.wire import HEADER, ONE_WAY, encode_frame
from tests.contract.swarm_world import PIECE, MemberHere, open_world
from tests.contract.test_slow_holders import NEVER, Trickle
from tests.contract.test_swarm_run import complete, published, to
from tests.present import present
from tests.waiting import until

HUGE = (1 << 63) - 1
SLOW_SECONDS = 8.0
"""For a busy machine; each piece of a slow member takes about a second."""


def said(message: object) -> bytes:
    return encode_frame(kind_of(message), 0, message, flags=ONE_WAY)  # type: ignore[arg-type]


def raw(kind: int, body: bytes, flags: int = ONE_WAY) -> bytes:
    return HEADER.pack(kind, flags, 0, len(body), 0) + body


MESSAGES = {
    "grants of pieces that are nowhere": said(Grant(HUGE)) + said(Grant(-HUGE)),
    "a refusal that has no name": said(Refuse(-HUGE)) + said(Refuse(HUGE)),
    "members that do not exist": said(Members([0, -1, HUGE] * 21)),
    "a hundred thousand invitations": said(Invite()) * 100_000,
    "maps that are too long": said(PieceMapMessage(b"\xff" * 8192)),
    "needs that are too long": said(Needs(b"\xff" * 8192)),
    "news of what is nowhere": said(NewPieces([-1])),
    "an endless list": raw(Kind.NEW_PIECES, b"\x91\xdd\xff\xff\xff\xff" + bytes(1000)),
    "no message": raw(Kind.GRANT, b"\xc1"),
    "kinds of later": raw(200, bytes(60_000)) * 20,
    "a frame without an end": HEADER.pack(int(Kind.GRANT), ONE_WAY, 0, HUGE & 0xFFFFFFFF, 0),
    "bulk": HEADER.pack(int(Kind.GRANT), ONE_WAY, 0, 0, HUGE & 0xFFFFFFFF),
    "a request": raw(int(DataKind.GET_PIECE), b"", flags=0),
    "no frame": b"\xff" * 4096,
}


@asynccontextmanager
async def linked(attacker: MemberHere, source: MemberHere) -> AsyncIterator[ByteStream]:
    """A link of the attacker's own."""
    way = present(attacker.way_to(source.own))
    with closing(await attacker.pool.dial(way)) as connection:
        await connection.become_link(SwarmLink(source.run.version))
        yield connection.stream


async def test_whatever_is_said_on_a_link_the_swarm_goes_on(tmp_path: Path) -> None:
    async with open_world() as world:
        source, signed = await published(world, tmp_path)
        for bytes_said in MESSAGES.values():
            attacker = await world.add()  # what it did before may have banned it
            async with linked(attacker, source) as stream:
                await until(lambda: attacker.own in source.run.links.members)  # noqa: B023
                with trio.move_on_after(5.0):  # a side that has ended the link takes no more
                    with suppress(OSError):
                        await stream.send(bytes_said)
            await until(lambda: attacker.own not in source.run.links.members)  # noqa: B023
            attacker.die()
        assert source.run.progress.failure is None
        honest = await world.add()
        honest.fetch(signed, to(tmp_path, honest))
        await complete(tmp_path, [honest])


@pytest.mark.parametrize("host", ["host 0", "another host"])
async def test_who_takes_pieces_and_never_says_so_holds_a_few_of_them(tmp_path: Path, host: str) -> None:
    """Over many connections at once, of which none reads."""
    async with open_world() as world:
        source, signed = await published(world, tmp_path)
        attacker = await world.add(host)
        honest = await world.add()
        way = present(attacker.way_to(source.own))
        version, answers = source.run.version, list[PieceReply]()
        whole = [piece for piece, size in enumerate(source.run.manifest.layout.sizes) if size == PIECE]
        async with trio.open_nursery() as nursery:

            async def hold(piece: int) -> None:
                connection: DataConnection = await attacker.pool.dial(way)
                with closing(connection):
                    await connection.stream.send(
                        encode_frame(DataKind.PIECE_TAKEN, 0, PieceTaken(), flags=ONE_WAY) * 100
                    )
                    connection._say_taken = trio.lowlevel.checkpoint  # type: ignore[method-assign]
                    room = memoryview(bytearray(PIECE))
                    answers.append(await connection.get_piece(GetPiece(version, piece), room))
                    await trio.sleep_forever()

            async with linked(attacker, source):
                await until(lambda: attacker.own in source.run.links.members)
                for piece in (-1, -HUGE, source.run.manifest.layout.count, HUGE):
                    connection = await attacker.pool.dial(way)
                    reply = await connection.get_piece(GetPiece(version, piece), memoryview(b""))
                    assert reply.status == PieceStatus.LACKS
                    connection.close()
                for number in range(40):
                    nursery.start_soon(hold, whole[number % len(whole)])
                await until(lambda: len(answers) == 40)
                held = [each for each in answers if each.status == PieceStatus.OK]
                assert 0 <= len(held) <= SwarmConfig().most_lent
                assert source.run.transfers._buffers._used == len(held)
                honest.fetch(signed, to(tmp_path, honest))
                await complete(tmp_path, [honest])
            nursery.cancel_scope.cancel()
        assert source.run.progress.failure is None


@pytest.mark.parametrize(
    ("first_bytes", "every_seconds"), [(10_000, 0.1), (10_000, 4.0), (PIECE // 2, NEVER)]
)
async def test_a_sender_of_single_bytes_delays_no_other_for_long(
    tmp_path: Path, first_bytes: int, every_seconds: float
) -> None:
    """It has everything, as a good member does, and its links are as good."""
    async with open_world() as world:
        source, signed = await published(world, tmp_path)
        slow, good = await world.add(), await world.add()
        for member in (slow, good):
            member.fetch(signed, to(tmp_path, member))
        await complete(tmp_path, [slow, good])
        source.leave()
        way = Trickle(1 << 60, every_seconds=every_seconds)
        async with way.open(slow.address) as opened:
            slow.address = opened.address
            world.changed()
            way.attack(first_bytes)
            late = await world.add()
            began = trio.current_time()
            late.fetch(signed, to(tmp_path, late))
            await complete(tmp_path, [late])
            assert trio.current_time() - began < SLOW_SECONDS
            assert opened.passed_bytes > first_bytes, "it was asked for pieces"
            late.pool.close()
