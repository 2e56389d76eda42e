"""Values that are put, as columns."""

from __future__ import annotations

from collections.abc import Sequence

from p2pstore.objects import key_hasher
from p2pstore.put_facts import PutColumns, PutFacts, PutOptions


def columns_of_facts(items: Sequence[PutFacts], namespace: str) -> PutColumns:
    names = PutOptions.__struct_fields__
    return PutColumns(
        [facts.reservation for facts in items],
        [facts.key for facts in items],
        [key_hasher(namespace)(facts.key) for facts in items],
        [facts.length for facts in items],
        [facts.sums for facts in items],
        [facts.root for facts in items],
        [facts.follows for facts in items],
        [PutOptions(*[getattr(facts, name) for name in names]) for facts in items],
    )
