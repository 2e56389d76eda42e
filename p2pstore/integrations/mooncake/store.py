"""Mooncake's store: all of its calls together."""

from __future__ import annotations

from p2pstore.integrations.mooncake.parallel_tensors import ParallelTensorCalls
from p2pstore.integrations.mooncake.replicas import ReplicaCalls
from p2pstore.integrations.mooncake.segments import SegmentCalls
from p2pstore.integrations.mooncake.sessions import SessionCalls


class MooncakeDistributedStore(SessionCalls, ParallelTensorCalls, ReplicaCalls, SegmentCalls):
    """The store that vLLM, SGLang and LMCache know, over the peers of this project: no master, no metadata server.

    `setup` it, use it from any number of threads, `close` it. Methods return codes as Mooncake's do: 0 or a length when
    it worked, else one of `ErrorCode`; the log (`p2pstore.mooncake`) says what a code was for. Only `setup` raises, and
    `TypeError` is raised for arguments of a wrong type.
    """
