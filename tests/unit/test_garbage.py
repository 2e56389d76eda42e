"""Garbage collections of a peer's process stay short, however many objects there are."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, time
from p2pstore.peer.lifetime import run as garbage

class Holder:
    def __init__(self):
        self.me = self

garbage.LONG_SECONDS = 0.0
with garbage.short_collections():
    kept = [[number] for number in range(200_000)]
    gc.collect()
    frozen = gc.get_freeze_count()
    assert frozen > 200_000, frozen
    del kept
    assert gc.get_freeze_count() < frozen - 150_000, "what nothing refers to is freed all the same"
    for _ in range(100):
        Holder()
    assert gc.collect() >= 100, "cycles that are made later are found"
    garbage.LONG_SECONDS = 3600.0
    before = gc.get_freeze_count()
    kept = [[number] for number in range(1_000)]
    gc.collect()
    assert gc.get_freeze_count() <= before, "a short collection leaves nothing out"
assert not gc.callbacks
"""

CYCLES = """
import gc, weakref
from p2pstore.peer.lifetime import run as garbage

class Holder:
    def __init__(self):
        self.me = self

garbage.LONG_SECONDS = 0.0
with garbage.short_collections():
    at_begin = gc.get_freeze_count()
    ended = []
    for _ in range(20):
        holders = [Holder() for _ in range(at_begin // 8)]
        ended.append(weakref.ref(holders[0]))
        gc.collect()
        del holders
    assert gc.get_freeze_count() < 2 * at_begin, "cycles pile up that were alive at long collections"
    assert sum(each() is not None for each in ended) <= 6
"""


def test_what_a_long_collection_found_alive_is_left_out_of_later_ones() -> None:
    """In a process of its own: frozen objects stay frozen."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


def test_cycles_that_were_alive_at_long_collections_are_found_by_thorough_ones() -> None:
    subprocess.run([sys.executable, "-c", CYCLES], check=True, timeout=60)
