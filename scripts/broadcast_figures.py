"""What `bench_broadcast` computes of what it measured. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def shortest_seconds(total_bytes: int, bytes_per_second: float, receivers: int, pieces: int) -> float:
    """No way to bring `total_bytes` from one to so many receivers takes less, when all links carry `bytes_per_second`
    in each direction: all pieces leave the source, and the last one still has to reach everybody, by doubling."""
    if receivers < 1 or pieces < 1 or bytes_per_second <= 0:
        raise ValueError("there must be a receiver, a piece and a rate")
    rounds = receivers.bit_length() - 1
    return total_bytes / bytes_per_second * (1 + rounds / pieces)


def copies(link_bytes: int, total_bytes: int) -> float:
    """How many times the checkpoint went over a link that counted `link_bytes`. (Headers are in that, those of what the
    kernel handed over at once only once: half a percent.)"""
    return link_bytes / total_bytes


@dataclass(frozen=True)
class Sample:
    """What all links had carried at one moment: bytes sent by each host."""

    seconds: float
    sent: tuple[int, ...]


def busy_shares(samples: Sequence[Sample], bytes_per_second: float) -> list[tuple[float, float]]:
    """How much of all uplinks together was used, of 1: (seconds, share) between each two samples."""
    shares = []
    for before, after in itertools.pairwise(samples):
        seconds = after.seconds - before.seconds
        sent = sum(after.sent) - sum(before.sent)
        capacity = bytes_per_second * seconds * len(after.sent)
        shares.append(((before.seconds + after.seconds) / 2, sent / capacity))
    return shares


def middle_share(shares: Sequence[tuple[float, float]]) -> float:
    """The median of what is in the middle third of the time, when everybody has something to send."""
    if not shares:
        return 0.0
    begin, end = shares[0][0], shares[-1][0]
    third = (end - begin) / 3
    middle = [share for at, share in shares if begin + third <= at <= end - third]
    return statistics.median(middle or [share for _, share in shares])
