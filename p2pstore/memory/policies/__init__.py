"""Which of many objects are worth keeping: policies of eviction behind one interface, by name. Pure."""

from __future__ import annotations

from typing import Final, Literal

from p2pstore.memory.policies.interface import EvictionPolicy, LeastRecentlyUsed
from p2pstore.memory.policies.prefix import PrefixAware
from p2pstore.memory.policies.s3_fifo import S3Fifo

PolicyName = Literal["prefix", "lru", "s3-fifo"]

DEFAULT_POLICY: Final[PolicyName] = "prefix"


def make_policy(name: PolicyName = DEFAULT_POLICY) -> EvictionPolicy:
    """A new policy, for one segment."""
    return _POLICIES[name]()


_POLICIES: Final[dict[PolicyName, type[EvictionPolicy]]] = {
    "prefix": PrefixAware,
    "lru": LeastRecentlyUsed,
    "s3-fifo": S3Fifo,
}
