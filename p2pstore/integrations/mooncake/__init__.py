"""Mooncake's Python API (`mooncake.store`) without a master: change the import, and nothing else has to run."""

from p2pstore.integrations.mooncake.buffer_pool import (
    BufferLease,
    BufferPool,
    RegisteredBufferLease,
    RegisteredBufferPool,
)
from p2pstore.integrations.mooncake.memory import (
    BufferHandle,
    MooncakeHostMemAllocator,
    bind_to_numa_node,
)
from p2pstore.integrations.mooncake.mooncake_config import MooncakeConfig
from p2pstore.integrations.mooncake.mooncake_types import (
    ErrorCode,
    ExistOptions,
    ObjectDataType,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    TaskStatus,
    TaskType,
)
from p2pstore.integrations.mooncake.parallelism import (
    ParallelAxis,
    ReadTarget,
    TensorParallelism,
    WriterPartition,
)
from p2pstore.integrations.mooncake.replicas import (
    Descriptor,
    DiskDescriptor,
    MemoryDescriptor,
    QueryTaskResponse,
    ReplicaDescriptor,
)
from p2pstore.integrations.mooncake.store import MooncakeDistributedStore, MooncakeDistributedStoreAsync

__version__ = "0.3.14"
"""Of Mooncake, whose calls these are."""

__all__ = [
    "BufferHandle",
    "BufferLease",
    "BufferPool",
    "Descriptor",
    "DiskDescriptor",
    "ErrorCode",
    "ExistOptions",
    "MemoryDescriptor",
    "MooncakeConfig",
    "MooncakeDistributedStore",
    "MooncakeDistributedStoreAsync",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ParallelAxis",
    "QueryTaskResponse",
    "ReadTarget",
    "RegisteredBufferLease",
    "RegisteredBufferPool",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "TensorParallelism",
    "WriterPartition",
    "bind_to_numa_node",
]
