"""LMCache on this store: a remote connector (in the engine's process), and an L2 adapter (of its server, MP mode).

    remote_storage_plugins: ["p2pstore"]
    extra_config:
      remote_storage_plugin.p2pstore.module_path: p2pstore.integrations.lmcache
      remote_storage_plugin.p2pstore.class_name: P2PConnector
      p2pstore_weight_version: llama-3.1-8b@v1
      save_chunk_meta: false

    --l2-adapter '{"type": "plugin", "module_path": "p2pstore.integrations.lmcache", "class_name": "P2PL2Adapter",
      "adapter_params": {"weight_version": "llama-3.1-8b@v1"}}'

The weight version is required; `p2pstore_socket` and `socket` name the local peer, where there are several. All servers
see one pool: say `"shared": true` beside the adapter's `type` where a coordinator counts. To the connector requests may
say by `kv_transfer_params`: `lmcache.p2pstore_pin_seconds` (evict last), `lmcache.p2pstore_ttl_seconds` (end).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import EncodedObjectKey, KeyEntry, KeyListPage
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier
from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from p2pstore.blocking import BlockingClient
from p2pstore.integrations.block_events import CountedBlocks
from p2pstore.integrations.engine_client import (
    PAGE_KEYS,
    PROBE_KEY,
    EngineClient,
    leading,
    legal_key,
    miss_on_error,
    pages_of_keys,
)
from p2pstore.results import ItemResult

T = TypeVar("T")
Keys = list[str]
Chunks = list[Any]
THREADS = 4
PREFIX = "lmcache/"


def _text(key: Any) -> str:
    """LMCache's own text for a key of its engine; shortened where it is too long for a key of the store."""
    return legal_key(key.to_string())


def _bytes_of(memory_obj: Any) -> memoryview:
    """An object's memory in place. Its own view has a format that cannot be written to."""
    view: memoryview = memory_obj.byte_array
    return view.cast("B")


def _hashed(config: Any) -> Any:
    """LMCache's own hash of something fixed, by the function and the seed that this process uses. None where this
    version of LMCache keeps them elsewhere. A second database may not be made: it would give vLLM another seed."""
    try:
        from lmcache.v1.token_database import ChunkedTokenDatabase

        database = ChunkedTokenDatabase.__new__(ChunkedTokenDatabase)
        database.hash_func = database._get_vllm_hash_func(config.pre_caching_hash_algorithm)
        return database._hash_tokens([1, 2, 3])
    except (ImportError, AttributeError):
        return None


# --- in the engine's process ----------------------------------------------------------------------


class P2PConnector(RemoteConnector):  # type: ignore[misc] # LMCache is no dependency, so not there to be checked
    """Chunks under LMCache's own keys, moved by a few threads so that its event loop goes on. Lookups read
    shared memory. With `save_chunk_meta`, which partial chunks need, a chunk is its metadata and then its bytes, which
    takes one more copy each way."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any, **_others: Any
    ) -> None:
        super().__init__(local_cpu_backend.config, local_cpu_backend.metadata)
        extra = getattr(config, "extra_config", None) or {}
        version, socket = (extra.get(f"p2pstore_{name}") for name in ("weight_version", "socket"))
        self._client = EngineClient(version, socket)
        ours = [name for name in extra if name.startswith("p2pstore_")]
        self._client.warn_unknown(ours, ["p2pstore_weight_version", "p2pstore_socket"])
        self._loop = loop
        self._memory = local_cpu_backend
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="p2pstore-lmcache")
        self._config: Any = config

    def support_ping(self) -> bool:
        return True

    support_batched_contains = support_batched_get = support_batched_put = support_ping

    @miss_on_error(lambda *_, **__: False)
    async def exists(self, key: Any) -> bool:
        return await self.batched_async_contains("", [key]) == 1

    @miss_on_error(lambda *_, **__: False)
    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    @miss_on_error(lambda *_, **__: 0)
    def batched_contains(self, keys: Sequence[Any]) -> int:
        """How many chunks, from the first on, are there. A scheduler waits for it: at most 0.1 s, and no time at all
        for a peer that hangs."""
        self._compare_hashes()
        return leading(self._client.look_up_soon([_text(key) for key in keys]))

    @miss_on_error(lambda *_, **__: 0)
    async def batched_async_contains(
        self, lookup_id: str, keys: Sequence[Any], pin: bool = False
    ) -> int:
        self._compare_hashes()
        names = [_text(key) for key in keys]
        answers = self._client.look_up(names)
        if None in answers:
            ask = functools.partial(self._client.look_up_soon, names)
            return leading(await asyncio.get_running_loop().run_in_executor(None, ask))
        return leading(answers)

    @miss_on_error(lambda *_, **__: None)
    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    @miss_on_error(lambda _, keys: [None] * len(keys))
    async def batched_get(self, keys: Sequence[Any]) -> list[Any]:
        return await self._in_thread(lambda: self._get(keys))

    @miss_on_error(lambda *_, **__: [])
    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> list[Any]:
        """The chunks from the first one on, as far as they came."""
        got = await self.batched_get(keys)
        good = next((number for number, each in enumerate(got) if each is None), len(got))
        for each in got[good:]:
            if each is not None:
                each.ref_count_down()
        return got[:good]

    @miss_on_error(lambda *_, **__: None)
    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    @miss_on_error(lambda *_, **__: None)
    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        await self._in_thread(lambda: self._put(keys, memory_objs))

    @miss_on_error(lambda *_, **__: [])
    async def list(self) -> Keys:
        def ask(client: BlockingClient) -> Keys:
            keys = (each.key for page in pages_of_keys(client) for each in page.keys)
            return [key for key in keys if not key.startswith(PROBE_KEY)]

        return await self._in_thread(lambda: self._client.call(ask, Keys()))

    @miss_on_error(lambda *_, **__: False)
    def remove_sync(self, key: Any) -> bool:
        name = _text(key)
        return self._client.call(lambda client: client.remove(name), False)

    @miss_on_error(lambda *_, **__: -1)
    async def ping(self) -> int:
        def ask(client: BlockingClient) -> int:
            client.statistics(cluster=False)
            return 0

        return await self._in_thread(lambda: self._client.call(ask, -1))

    async def close(self) -> None:
        """Wait for what is under way, and disconnect."""
        await asyncio.get_running_loop().run_in_executor(None, self._pool.shutdown)
        self._client.close()

    def _compare_hashes(self) -> None:
        """At the first request: by then the engine has set its seed."""
        config, self._config = self._config, None
        hashed = None if config is None else _hashed(config)
        if hashed is not None:
            self._client.compare_hashes(
                "lmcache", hashed, chunk_size=getattr(config, "chunk_size", None)
            )

    # --- in threads ------------------------------------------------------------------------------

    async def _in_thread(self, action: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, action)

    def _put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        items: list[tuple[str, Any]] = []
        configs = getattr(keys[0], "request_configs", None) if keys else None
        kept = self._client.retention(configs, prefix="lmcache.")
        for key, each in zip(keys, memory_objs, strict=True):
            try:
                items.append((_text(key), self._value_of(each)))
            except Exception as error:  # whatever it is, the other chunks are stored
                self._client.warn(f"a chunk was not stored: {error!r}")
        failed: list[ItemResult[Any]] = []
        for result in self._client.call(kept.putting(items), failed):
            if result.error is not None:
                self._client.warn(f"a chunk was not stored: {result.error}")

    def _value_of(self, memory_obj: Any) -> Any:
        view = _bytes_of(memory_obj)
        if not self.save_chunk_meta:
            return view
        about = RemoteMetadata(
            len(view), memory_obj.get_shapes(), memory_obj.get_dtypes(), memory_obj.get_memory_format()
        )
        return about.serialize() + view

    def _get(self, keys: Sequence[Any]) -> Chunks:
        if self.save_chunk_meta:
            return [self._get_described(key) for key in keys]  # each is a miss by itself
        rooms: Chunks = []
        try:
            for _ in keys:
                rooms.append(self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt))
            items = [
                (_text(key), _bytes_of(room))
                for key, room in zip(keys, rooms, strict=True)
                if room is not None
            ]
        except Exception:
            for room in rooms:
                if room is not None:
                    room.ref_count_down()
            raise
        failed: list[ItemResult[int]] = []
        results = iter(self._client.call(lambda client: client.get_many_into(items), failed))
        return [None if room is None else self._filled(room, next(results, None)) for room in rooms]

    def _filled(self, room: Any, result: ItemResult[int] | None) -> Any:
        """The memory with a chunk in it; given back when there is none."""
        try:
            if result is not None and result.error is None and result.value:
                return self.reshape_partial_chunk(room, result.value)
        except Exception as error:  # whatever it is, the memory is given back
            self._client.warn(f"a chunk of another size: {error}")
        room.ref_count_down()
        return None

    @miss_on_error(lambda *_, **__: None)
    def _get_described(self, key: Any) -> Any:
        name = _text(key)
        value = self._client.call(lambda client: client.get(name), b"")
        head = self.remote_metadata_bytes
        if len(value) <= head:
            return None
        about = RemoteMetadata.deserialize(memoryview(value)[:head])
        room = self._memory.allocate(about.shapes, about.dtypes, about.fmt)
        if room is None:
            return None
        view, data = _bytes_of(room), memoryview(value)[head:]
        if len(view) != len(data):
            room.ref_count_down()
            return None
        view[:] = data
        return room


# --- in its server --------------------------------------------------------------------------------


class P2PL2Adapter(L2AdapterInterface):  # type: ignore[misc] # as above
    """Chunks moved straight between LMCache's own memory and the store, by a few threads; three event descriptors tell
    of what has ended. LMCache's eviction counts what this server stored: it is told of loads and deletions, and of what
    the pool has lost. A lookup leases chunks in the local peer's memory; another one may be evicted before its load."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None, **_others: Any) -> None:
        super().__init__()
        self._client = EngineClient(params.get("weight_version", ""), params.get("socket"))
        self._client.warn_unknown(params, ["weight_version", "socket", "threads"])
        self._pool = ThreadPoolExecutor(
            int(params.get("threads", THREADS)), thread_name_prefix="p2pstore-l2"
        )
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix="p2pstore-l2-lookups")
        """Of its own, so that no lookup waits behind transfers from a peer that hangs."""
        self._numbers = itertools.count(1)
        self._stored, self._found, self._loaded = _Ended(), _Ended(), _Ended()
        self._lock = threading.Lock()
        self._leases: defaultdict[str, list[memoryview]] = defaultdict(list)
        """A view for each lock of a chunk."""
        self._counted: CountedBlocks[Any] = CountedBlocks(
            self._notify_keys_stored, self._notify_keys_deleted
        )

    def get_store_event_fd(self) -> int:
        return int(self._stored.event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._found.event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loaded.event.fileno())

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        def store() -> Any:
            items = _items(keys, objects)
            views = zip(keys, items, self._client.put(items), strict=True)
            stored = {key: len(view) for key, (_, view), is_there in views if is_there}
            self._counted.found(stored)
            self._client.now_and_then(self._check)
            return L2StoreResult(len(stored) == len(items), sum(stored.values()))

        return self._submit(store, L2StoreResult(False, 0), self._stored)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return {number: self._stored.pop(number) for number in list(self._stored)}

    def submit_lookup_and_lock_task(
        self, keys: Sequence[Any], group_layout_descs: dict[int, Any]
    ) -> int:
        def look_up() -> Any:
            names = [_name(key) for key in keys]
            found = self._client.look_up_soon(names)
            there = [name for name, is_there in zip(names, found, strict=True) if is_there]
            if there:
                self._client.call(lambda client: self._lease(client, there), None)
            return _bitmap(found)

        nothing = _bitmap([False] * len(keys))
        return self._submit(look_up, nothing, self._found, pool=self._lookups)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._found.pop(task_id, None)

    def _lease(self, client: BlockingClient, names: Keys) -> None:
        """Of these chunks lease those in the local peer's memory, from the first on. A lease of another one would bring
        it there."""
        here = (each.memory_blocks for each in client.match_prefix_by_peer(names) if each.local)
        leases = client.take_leases(names[: next(here, 0)])
        with self._lock:
            for each in leases:
                if each.value is not None:
                    self._leases[each.key].append(each.value)

    @miss_on_error(lambda *_, **__: None)
    def submit_unlock(self, keys: Sequence[Any]) -> None:
        with self._lock:
            for name in map(_name, keys):
                if self._leases[name]:
                    self._leases[name].pop()
                if not self._leases[name]:
                    del self._leases[name]

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        def load() -> Any:
            items = _items(keys, objects)
            whole = self._client.read(items)
            came = [key for key, is_whole in zip(keys, whole, strict=True) if is_whole]
            self._notify_keys_accessed(came)
            return _bitmap(whole)

        return self._submit(load, _bitmap([False] * len(keys)), self._loaded)

    def query_load_result(self, task_id: int) -> Any:
        return self._loaded.pop(task_id, None)

    @miss_on_error(lambda *_, **__: None)
    def delete(self, keys: Sequence[Any]) -> None:
        """Remove chunks everywhere."""
        names = [_name(key) for key in keys]
        failed: list[ItemResult[bool]] = []
        results = self._client.call(lambda client: client.remove_many(names), failed)
        self._counted.gone([key for key, result in zip(keys, results, strict=False) if result.ok])

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> Any:
        """A page of the pool's chunks. Raises `ValueError`, and `RuntimeError` where the peer does not answer."""
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, not {page_size}")
        prefix = PREFIX if model_name is None else f"{PREFIX}{model_name}@"
        about: dict[str, Any] = {"after": cursor or "", "limit": min(page_size, PAGE_KEYS)}
        page = self._client.call(lambda client: client.list_keys(prefix, **about), None)
        if page is None:
            raise RuntimeError("the peer does not answer")
        known = ((_parsed(each.key), each.length) for each in page.keys)
        entries = tuple(KeyEntry(key, length) for key, length in known if key is not None)
        return KeyListPage(entries, page.keys[-1].key if page.more and page.keys else None)

    def get_usage(self) -> Any:
        """Bytes that this server stored and the pool has. LMCache's eviction asks each second."""
        self._client.now_and_then(self._check)
        return super().get_usage()

    def report_status(self) -> dict[str, Any]:
        """For LMCache's own status. A peer that does not answer is no failure of the server."""
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "peer_answers": self._client.answers,
            "stored_object_count": len(self._counted),
            "locked_key_count": len(self._leases),
            "current_size_bytes": self.get_usage().total_bytes_used,
        }

    def _check(self, client: BlockingClient) -> None:
        """In the worker: which of the chunks that this server stored the pool has lost."""
        self._counted.check(lambda keys: client.contains_many([_name(key) for key in keys]))

    def close(self) -> None:
        """Wait for what is under way, disconnect, and close the event descriptors."""
        self._lookups.shutdown()
        self._pool.shutdown()
        self._leases.clear()
        self._client.close()
        for ended in (self._stored, self._found, self._loaded):
            ended.event.close()

    def _submit(
        self,
        action: Callable[[], Any],
        failure: Any,
        ended: _Ended,
        pool: ThreadPoolExecutor | None = None,
    ) -> int:
        number = next(self._numbers)

        def run() -> None:
            try:
                result = action()
            except Exception as error:  # the controller must hear that the task has ended
                self._client.warn(f"a task failed: {error!r}")
                result = failure
            self._end(number, result, ended)

        try:
            (pool or self._pool).submit(run)
        except RuntimeError as error:  # it was closed
            self._client.warn(f"a task was not begun: {error}")
            self._end(number, failure, ended)
        return number

    def _end(self, number: int, result: Any, ended: _Ended) -> None:
        ended[number] = result
        try:
            ended.event.notify()
        except (OSError, ValueError) as error:  # closed meanwhile
            self._client.warn(f"the end of a task could not be signalled: {error}")


class _Ended(dict[int, Any]):
    """Results of the tasks of one kind that have ended, by their numbers, and the event that tells of them."""

    def __init__(self) -> None:
        super().__init__()
        self.event = create_event_notifier()


def _items(keys: Sequence[Any], objects: Sequence[Any]) -> list[tuple[str, memoryview]]:
    return [(_name(key), _bytes_of(each)) for key, each in zip(keys, objects, strict=True)]


def _name(key: Any) -> str:
    return legal_key(
        f"{PREFIX}{key.model_name}@{key.kv_rank:x}@{key.object_group_id}@{key.chunk_hash.hex()}"
        f"@{key.cache_salt}"
    )


def _parsed(name: str) -> Any:
    """The key of LMCache's own with this name; None of one that was too long."""
    try:
        model, rank, group, chunk_hash, salt = name.removeprefix(PREFIX).split("@")
        return EncodedObjectKey(chunk_hash, model, int(rank, 16), int(group), salt)
    except ValueError:
        return None


def _bitmap(bits: Sequence[bool]) -> Any:
    made = Bitmap(len(bits))
    for number, bit in enumerate(bits):
        if bit:
            made.set(number)
    return made
