"""Digests written down row by row. For tests."""

from collections.abc import Iterable

import numpy as np

from p2pstore.gossip.exchange.digests import Digest, MemberSet


def digest_from(rows: Iterable[tuple[int, int, int, int]]) -> Digest:
    """Of rows (member, incarnation, record sequence, log sequence); of equal members the last one counts."""
    table = {row[0]: row for row in rows}
    columns = np.array([table[member] for member in sorted(table)], np.uint64).reshape(-1, 4)
    members, incarnations, records, logs = (np.ascontiguousarray(each) for each in columns.T)
    return Digest(MemberSet(members, incarnations), records, logs)
