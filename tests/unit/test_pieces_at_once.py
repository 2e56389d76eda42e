"""Which pieces the event loop reads and writes itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2pstore.checkpoint.content.hashing import is_local, is_local_directory
from p2pstore.checkpoint.peer.piece_flow import FIRST_IN_THREADS, AtOnce
from p2pstore.objects import KIB, MIB

MOUNTS = """\
22 28 0:20 / /proc rw,nosuid shared:13 - proc proc rw
28 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
31 28 0:40 / /models rw,relatime shared:2 master:7 - nfs4 storage:/models rw
32 28 0:41 / /dev/shm rw - tmpfs tmpfs rw
a line that is no mount
"""


def test_small_pieces_on_this_machine_are_done_at_once() -> None:
    at_once = AtOnce(is_local=True)
    assert at_once.may(512 * KIB)
    assert at_once.may(MIB)
    assert not at_once.may(MIB + 1)
    assert not AtOnce(is_local=False).may(1)


def test_after_a_step_that_waited_long_many_are_left_to_threads_and_then_twice_as_many() -> None:
    at_once = AtOnce(is_local=True)
    at_once.took(0.004, waited=True)
    at_once.took(0.5, waited=False)  # others had the core
    assert at_once.may(1)
    for rounds in (1, 2, 4):
        at_once.took(0.006, waited=True)
        answers = [at_once.may(1) for _ in range(rounds * FIRST_IN_THREADS + 1)]
        assert answers == [False] * (rounds * FIRST_IN_THREADS) + [True]


@pytest.mark.parametrize(
    ("device", "local"),
    [((254, 0), True), ((0, 41), True), ((0, 40), False), ((0, 20), False), ((9, 9), False)],
)
def test_disks_and_memory_of_this_machine_are_told_from_what_may_not_answer(
    device: tuple[int, int], local: bool
) -> None:
    assert is_local(MOUNTS, os.makedev(*device)) is local


def test_what_the_kernel_makes_up_is_no_disk() -> None:
    assert not is_local_directory(Path("/proc"))
