"""Mooncake's store, blocking and for asyncio: all of its calls together, and its set-ups one after the other."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from p2pstore.errors import P2PStoreError
from p2pstore.integrations.mooncake.addresses import SessionCalls
from p2pstore.integrations.mooncake.mooncake_types import ErrorCode, code_of
from p2pstore.integrations.mooncake.parallel_tensors import ParallelTensorCalls
from p2pstore.integrations.mooncake.replicas import ReplicaCalls, SegmentCalls
from p2pstore.integrations.mooncake.setup_settings import DEFAULT_SEGMENT_BYTES, from_arguments
from p2pstore.integrations.mooncake.tensors import ShardCalls

LOG: Final = logging.getLogger("p2pstore.mooncake")


class StoreCalls(SessionCalls, ShardCalls, ParallelTensorCalls, ReplicaCalls, SegmentCalls):
    """All calls, for one set-up."""


class MooncakeDistributedStore(StoreCalls):
    """The store that vLLM, SGLang and LMCache know, over the peers of this project: no master, no metadata server.

    `setup` it, use it from any number of threads, `close` it. Methods return codes as Mooncake's do: 0 or a length when
    it worked, else one of `ErrorCode`; the log (`p2pstore.mooncake`) says what a code was for. `TypeError` is raised
    for arguments of a wrong type; an item of a batch that has one gets -600. Sessions, segments, registered and pooled
    memory and tasks end with `close`.
    """

    def __init__(self) -> None:
        # Not those of `StoreCalls`: each set-up has an object of its own, and the calls here are passed on to it.
        self._setup_lock = threading.Lock()
        self._calls = StoreCalls()

    def setup(
        self,
        local_hostname: str | dict[str, Any] = "localhost",
        metadata_server: str = "",
        global_segment_size: int | str = DEFAULT_SEGMENT_BYTES,
        local_buffer_size: int | str = DEFAULT_SEGMENT_BYTES,
        protocol: str = "tcp",
        rdma_devices: str = "",
        master_server_addr: str = "",
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
    ) -> int:
        """Connect to this machine's peer; where none runs, start one that lives as long as this store. Returns 0. A
        peer that ends under its store (killed for memory, say) is started again, empty, with the next calls.

        The peer is the one whose socket is named (`socket` in a dict, or `MOONCAKE_P2P_SOCKET`), else the only one in
        the usual places. One that is started offers `global_segment_size` bytes; all other settings of a peer may
        come from the environment (`MOONCAKE_P2P_CLUSTER_KEY_FILE` and so on: see `mooncake-p2p join`).

        Where this differs from Mooncake: there is no master and no metadata server. Their addresses are optional, and
        taken as those of peers to join. When no process listens at one that belongs to this machine, the peer that is
        started listens there itself, so that programs given the same address find each other; a metadata server that is
        no peer (etcd, http, P2PHANDSHAKE) is not needed, and ignored. `local_hostname` names the peer that is started.
        `engine` is not needed, `local_buffer_size` is what a `BufferPool` may have. Each of several programs that name
        one `ssd_offload_path` has a folder of its own in it; one that finds `client_http_port` taken takes the next
        free one. `tenant_id` (or `namespace` in a dict, or `MOONCAKE_P2P_NAMESPACE`) is the namespace of all keys.

        The first one may also be a dict with the parameters' names, values as text such as "16MB" included. A setting
        that is wrong is -600, and what keeps the store from its peer another code, within seconds; the log says what it
        is in one line.
        """
        arguments = dict(locals())
        del arguments["self"]
        if isinstance(local_hostname, dict):  # arguments beside it count as well
            arguments |= {"local_hostname": None, **local_hostname}
        return self._set_up(arguments)

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Connect to this machine's peer and never start one. `server_address` is its socket's path; that of a Mooncake
        client means the only peer that there is, and the log says so. Returns as `setup`."""
        is_path = "/" in str(server_address)
        sizes = {"mem_pool_size": mem_pool_size, "local_buffer_size": local_buffer_size}
        named = {"socket" if is_path else "server_address": server_address}
        return self._set_up({**sizes, **named}, may_start=False)

    def _set_up(self, values: Mapping[str, Any], *, may_start: bool = True) -> int:
        with self._setup_lock:
            if self._calls.is_set_up:
                LOG.error("setup: this store is set up already: close() it first")
                return int(ErrorCode.INVALID_PARAMS)
            calls = StoreCalls()
            try:
                calls._begin(from_arguments(values, os.environ), may_start=may_start)
            except (P2PStoreError, ValueError, OSError) as error:
                calls.close()
                LOG.error("setup: %s", error)
                return code_of(error)
            except BaseException:
                calls.close()
                raise
            self._calls = calls
        return 0

    def close(self) -> int:
        """Disconnect, and end the peers that this store started: they first hand over to others what they alone hold,
        where there are others. Returns 0; may be called twice, and before `setup`."""
        with self._setup_lock:
            calls, self._calls = self._calls, StoreCalls()
        return calls.close()

    @property
    def is_set_up(self) -> bool:
        """Whether `setup` succeeded, and `close` was not called since."""
        return self._calls.is_set_up

    @property
    def current(self) -> StoreCalls:
        """The set-up that calls are passed on to."""
        return self._calls


def _passed_on(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(StoreCalls, name))
    def call(self: MooncakeDistributedStore, *arguments: Any, **named: Any) -> Any:
        return getattr(self._calls, name)(*arguments, **named)

    return call


for _name in dir(StoreCalls):
    if not _name.startswith("_") and _name not in vars(MooncakeDistributedStore):
        setattr(MooncakeDistributedStore, _name, _passed_on(_name))


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """`async_NAME(...)` is method NAME, run in the event loop's threads. A call that is cancelled goes on there to its
    end, so memory that was passed by address must be left alone until then. New programs take `p2pstore.aio`, which
    needs no threads."""

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self, name.removeprefix("async_"), None) if name.startswith("async_") else None
        if not callable(method):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        @functools.wraps(method)
        async def call(*arguments: Any, **named: Any) -> Any:
            return await asyncio.to_thread(method, *arguments, **named)

        return call
