"""Pools of registered memory: no piece is lent twice, and no more than the limit."""

import gc
import random
import threading
from typing import Any

import pytest

from p2pstore.integrations.mooncake.base import StoreBase
from p2pstore.integrations.mooncake.buffer_pool import BufferPool
from p2pstore.integrations.mooncake.setup_settings import from_arguments

DEADLINE_SECONDS = 30.0
KIB = 1024


@pytest.fixture
def store() -> StoreBase:
    """One that was told how much memory pools may have, and needs no peer for it."""
    store = StoreBase()
    store._settings = from_arguments({"local_buffer_size": "1MB"}, {})
    return store


def test_what_was_given_back_is_lent_again_and_other_sizes_make_room(store: StoreBase) -> None:
    pool = BufferPool(store, min_size_class=4 * KIB, alignment=64 * KIB)
    first = pool.acquire(10 * KIB)
    where = first.ptr
    assert store._buffers.size_at(where) == 16 * KIB
    assert where % (64 * KIB) == 0
    first.release()
    with pool.acquire(9 * KIB) as again:
        assert again.ptr == where
    with pool.acquire(1024 * KIB) as whole:
        assert store._buffers.size_at(where) is None or whole.ptr <= where
        with pytest.raises(RuntimeError, match="exhausted"):
            pool.acquire(1, block=False)
    pool.close()
    assert not store._pooled
    assert store._buffers.size_at(where) is None


@pytest.mark.parametrize("lost", [False, True])
def test_who_waits_gets_what_is_given_back_or_lost(store: StoreBase, lost: bool) -> None:
    pool = BufferPool(store, max_regions=1)
    leases = [pool.acquire(1)]
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(pool.acquire(2, timeout=DEADLINE_SECONDS)))
    waiting.start()
    if lost:
        leases.clear()
        gc.collect()
    else:
        leases[0].release()
    waiting.join(DEADLINE_SECONDS)
    assert [each.size for each in got] == [2]
    view = got[0].buffer
    got.clear()
    gc.collect()
    view[:] = b"ab"  # the view keeps the lease
    with pytest.raises(RuntimeError, match="active leases"):
        pool.close()
    del view
    gc.collect()
    pool.close()


def test_closing_wakes_nobody_into_a_closed_pool(store: StoreBase) -> None:
    pool = BufferPool(store, max_regions=0, prewarm_count=0)
    problems: list[str] = []

    def wait() -> None:
        try:
            pool.acquire(1, timeout=DEADLINE_SECONDS)
        except RuntimeError as error:
            problems.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    pool.close()
    waiting.join(DEADLINE_SECONDS)
    assert problems == ["buffer pool is closed"]


def test_many_threads_never_have_the_same_memory(store: StoreBase) -> None:
    pool = BufferPool(
        store, 256 * KIB, min_size_class=4 * KIB, alignment=16 * KIB, max_size_class=64 * KIB
    )
    problems: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            size = rng.choice((1, 5 * KIB, 17 * KIB, 40 * KIB, 200 * KIB))
            lease = pool.acquire(size, timeout=DEADLINE_SECONDS)
            view = lease.buffer
            view[0] = view[size - 1] = seed
            if pool._bytes > 256 * KIB:
                problems.append("too much")
            if {view[0], view[size - 1]} != {seed}:
                problems.append("somebody else wrote to it")
            del view
            if rng.random() < 0.9:
                lease.release()
            del lease  # the others are collected

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(DEADLINE_SECONDS)
    gc.collect()
    pool.close()
    assert not problems
    assert not store._pooled


def test_a_store_that_was_closed_has_forgotten_its_pools(store: StoreBase) -> None:
    pool = BufferPool(store, prewarm_size=1, prewarm_count=2)
    lease = pool.acquire(5)
    store.close()
    lease.buffer[:] = b"12345"
    lease.release()
    pool.close()
