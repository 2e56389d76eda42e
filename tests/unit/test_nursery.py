"""The background nursery under cancellation."""

from __future__ import annotations

import trio

from p2pstore.runtime.trio_tasks import open_background_nursery


async def test_entered_when_cancelled_already_it_ends_at_once() -> None:
    with trio.fail_after(5), trio.CancelScope() as scope:
        scope.cancel()
        async with open_background_nursery():
            await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught


async def test_the_background_runs_until_the_block_has_said_its_last_words() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    with trio.fail_after(5), trio.CancelScope() as scope:
        async with open_background_nursery() as background:
            background.start_soon(count)
            scope.cancel()
            try:
                await trio.sleep_forever()
            finally:
                before = turns
                with trio.CancelScope(shield=True):
                    for _ in range(10):
                        await trio.lowlevel.checkpoint()
                assert turns > before
    assert scope.cancelled_caught
