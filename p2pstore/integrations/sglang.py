"""SGLang's HiCache on this store: a dynamic storage backend.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "p2pstore", "module_path": "p2pstore.integrations.sglang", "class_name": "P2PHiCache",
      "interface_v1": 1, "weight_version": "llama-3.1-8b@v1"}'

`weight_version` is required; `socket` names the local peer, where there are several. With `tp_lcm_size` and the
layout `page_head`, engines of all tensor-parallel sizes that divide it share pages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from p2pstore.integrations.engine_client import (
    EngineClient,
    digest_of,
    leading,
    legal_key,
    miss_on_error,
)
from p2pstore.integrations.mooncake.memory import view_at
from p2pstore.results import ItemResult
from p2pstore.values import source_view

KV_POOL = "kv"
MAMBA_POOL = "mamba"
KNOWN = (
    *("weight_version", "socket"),
    *("backend_name", "module_path", "class_name", "interface_v1", "allocator"),
)
"""Settings of ours, and of SGLang's that it passes on."""
MAX_NOTED = 1000
"""Moves of which a store keeps the figures until SGLang collects them."""


def _no_pages(_: Any, keys: Sequence[str], *__: Any, **___: Any) -> list[bool]:
    return [False] * len(keys)


def _no_transfers(_: Any, transfers: Sequence[Any], *__: Any, **___: Any) -> dict[Any, Any]:
    return {each.name: [False] * len(each.keys or ()) for each in transfers}


def _nothing_found() -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

    return PoolTransferResult(0, {}, [])


Place = Callable[[torch.Tensor], tuple[Sequence[int], Sequence[int]]]
"""Addresses and sizes of all pieces of pages, by their indices."""


@dataclass(frozen=True)
class _Pool:
    """Pages of one kind in the host's memory: where their pieces are, what the keys of the ranks begin with whose
    parts a page has, and of how many pieces each part consists."""

    place: Place
    prefixes: Sequence[str]
    pieces: int

    @property
    def each(self) -> int:
        return len(self.prefixes) * self.pieces

    def objects(self, keys: Sequence[str]) -> list[str]:
        """The objects of these pages, page by page."""
        ends = [""] if self.pieces == 1 else [f"/{piece}" for piece in range(self.pieces)]
        return [
            legal_key(f"{prefix}{key}{end}") for key in keys for prefix in self.prefixes for end in ends
        ]

    def items(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[tuple[str, memoryview]]:
        """The same with the memory of each. Raises `ValueError` when indices and pages are not as many."""
        pointers, sizes = self.place(host_indices)
        views = [view_at(int(pointer), int(size)) for pointer, size in zip(pointers, sizes, strict=True)]
        return list(zip(self.objects(keys), views, strict=True))

    def by_page(self, pieces: Sequence[bool], pages: int) -> list[bool]:
        """Whether all pieces of each page are so."""
        step = self.each
        return [all(pieces[at : at + step]) for at in range(0, pages * step, step)]


class _Figures:
    """Pages and GB/s of each call since SGLang last asked, for its metrics."""

    def __init__(self) -> None:
        self._prefetched: deque[tuple[int, float]] = deque(maxlen=MAX_NOTED)
        self._backed_up: deque[tuple[int, float]] = deque(maxlen=MAX_NOTED)

    def note(self, pages: int, moved_bytes: int, seconds: float, *, read: bool) -> None:
        if moved_bytes and seconds > 0:
            (self._prefetched if read else self._backed_up).append((pages, moved_bytes / seconds / 1e9))

    def taken(self) -> Any:
        """SGLang's own record of them, which begin again."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        made = StorageMetrics()
        for noted, pages, rates in (
            (self._prefetched, made.prefetch_pgs, made.prefetch_bandwidth),
            (self._backed_up, made.backup_pgs, made.backup_bandwidth),
        ):
            for _ in range(len(noted)):
                count, rate = noted.popleft()
                pages.append(count)
                rates.append(rate)
        return made


class P2PHiCache(HiCacheStorage):  # type: ignore[misc] # SGLang ships no types
    """Pages of the host pool, put from it and read into it in place. Calls may be made from several threads at once.

    A page is an object for each piece of memory that it consists of (K and V; one with MLA). Its key says how the page
    lies in memory and which rank's it is, so that only engines with the same layout share it. So it is with the side
    pools of hybrid models (Mamba states, sliding windows, indexers, drafts), by the calls `batch_*_v2`.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        extra = {**(storage_config.extra_config or {}), **(kwargs or {})}
        self._config = storage_config
        self._client = EngineClient(extra.get("weight_version", ""), extra.get("socket"))
        self._client.warn_unknown(extra, KNOWN)
        self._pages = _Pool(_nowhere, [self._named({})], 1)
        self._side_pools: dict[str, _Pool] = {}
        self._only_side_pools = False
        self._figures = _Figures()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn how pages lie in the host's memory."""
        super().register_mem_pool_host(mem_pool_host)
        self._only_side_pools = getattr(mem_pool_host, "kv_buffer", mem_pool_host) is None
        if not self._only_side_pools:
            self._pages = self._pool(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Learn how the pages of a side pool lie in the host's memory."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = _text(host_pool_name)
        if name != KV_POOL:
            self._side_pools[name] = self._pool(host_pool, name)

    def _pool(self, host: Any, name: str = "") -> _Pool:
        page_size = int(getattr(host, "page_size", 1) or 1)
        shape = str(getattr(host, "layout", ""))
        # Pages of this layout are cut by heads: a part for each rank of the largest tensor-parallel size.
        ranks = 0 if name or shape != "page_head" else getattr(self._config, "tp_lcm_size", 0)
        parts = ranks // self._config.tp_size if ranks and not self._config.is_mla_model else 0
        place: Place = host.get_page_buffer_meta
        if parts > 1:
            place = partial(host.get_split_heads_page_buffer_meta, split_factor=parts)
        pointers, sizes = place(torch.arange(page_size))
        pieces = len(pointers) // max(parts, 1)
        layout: dict[str, Any] = {
            "layout": shape,
            "page_size": page_size,
            "dtype": str(getattr(host, "dtype", "")),
            "bytes": [int(size) for size in sizes[:pieces]],
        }
        if name:
            layout["pool"] = name
        if parts:
            layout["tp_size"] = ranks
            first = self._config.tp_rank * parts
            prefixes = [self._named(layout, tp_rank=first + part) for part in range(parts)]
            return _Pool(place, prefixes, pieces)
        # With MLA all ranks have the same, but for what keeps heads or states of its own.
        own = bool(name) and (name == MAMBA_POOL or hasattr(host, "v_buffer"))
        return _Pool(place, [self._named(layout, own_rank=own)], pieces)

    # --- pages ---------------------------------------------------------------------------------

    @miss_on_error(lambda *_, **__: 0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many pages, from the first on, are there."""
        return leading(self._client.look_up_soon(self._pages.objects(keys))) // self._pages.each

    @miss_on_error(_no_pages)
    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the host's memory; for each whether all of it came."""
        return self._pages.by_page(self._read(self._pages.items(keys, host_indices)), len(keys))

    @miss_on_error(_no_pages)
    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Put pages from the host's memory, but for those that are there already; for each whether it is there now."""
        if not self._config.is_storage_writer:
            return [True] * len(keys)
        return self._pages.by_page(self._write(self._pages.items(keys, host_indices)), len(keys))

    # --- pages of several pools ------------------------------------------------------------------

    @miss_on_error(lambda *_, **__: _nothing_found())
    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """How many pages, from the first on, are there, and can be used with what the side pools have of them."""
        from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

        pages = len(keys) if self._only_side_pools else self.batch_exists(keys, extra_info)
        hits = {KV_POOL: pages} if pages else {}
        usable = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if not usable:
                break
            pool, name = self._side_pool(transfer), _text(transfer.name)
            there = self._client.look_up_soon(pool.objects(keys[:pages]))
            ends = _usable_ends(pool.by_page(there, pages), transfer)
            if ends:
                hits[name] = ends[-1]
            usable = [end for end in usable if end in set(ends)]
        return PoolTransferResult(usable[-1] if usable else 0, hits, usable)

    @miss_on_error(_no_transfers)
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, Any]:
        """Read pages of several pools, in few requests; for each pool and page whether all of it came."""
        return self._move(transfers, self._read)

    @miss_on_error(_no_transfers)
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, Any]:
        """Put pages of several pools, but for those that are there already."""
        return self._move(transfers, self._write)

    def _move(
        self, transfers: Sequence[Any], move: Callable[[list[tuple[str, memoryview]]], list[bool]]
    ) -> dict[Any, Any]:
        items: list[tuple[str, memoryview]] = []
        parts = []
        for transfer in transfers:
            some = self._side_pool(transfer).items(transfer.keys, transfer.host_indices)
            parts.append((transfer, slice(len(items), len(items) + len(some))))
            items += some
        moved = move(items)
        return {
            transfer.name: self._side_pool(transfer).by_page(moved[part], len(transfer.keys))
            for transfer, part in parts
        }

    def _side_pool(self, transfer: Any) -> _Pool:
        name = _text(transfer.name)
        if name == KV_POOL:
            return self._pages
        try:
            return self._side_pools[name]
        except KeyError:
            raise ValueError(f"no pool {name!r} was registered") from None

    # --- moving ----------------------------------------------------------------------------------

    def _read(self, items: list[tuple[str, memoryview]]) -> list[bool]:
        """Read objects; for each whether all of it came."""
        began = time.perf_counter()
        whole = self._client.read(items)
        self._note(items, whole, time.perf_counter() - began, read=True)
        return whole

    def _note(
        self,
        items: Sequence[tuple[str, memoryview]],
        moved: Sequence[bool],
        seconds: float,
        *,
        read: bool,
    ) -> None:
        sizes = [len(view) for (_, view), good in zip(items, moved, strict=True) if good]
        pages = len(sizes) // self._pages.each
        self._figures.note(pages, sum(sizes), seconds, read=read)

    def _write(self, items: list[tuple[str, memoryview]]) -> list[bool]:
        """Put objects, but for those that are there; for each whether it is there now."""
        there = self._client.look_up_soon([key for key, _ in items])
        new = [number for number, is_there in enumerate(there) if not is_there]
        began, wanted = time.perf_counter(), [items[number] for number in new]
        stored = self._client.put(wanted)
        for number, is_there in zip(new, stored, strict=True):
            there[number] = is_there
        self._note(wanted, stored, time.perf_counter() - began, read=False)
        return there

    # --- single values, which older code asks for --------------------------------------------------

    @miss_on_error(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    @miss_on_error(lambda *_, **__: None)
    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Read one value into a tensor that is given; None when it is not there."""
        if target_location is None:
            return None
        name = legal_key(self._pages.prefixes[0] + key)
        (result,) = self._client.call(
            lambda client: client.get_many_into([(name, target_location)]), [ItemResult(name)]
        )
        if isinstance(result.error, ValueError):
            self._client.warn(f"{key}: {result.error}")
        whole = result.value is not None and result.value == target_location.nbytes
        return target_location if whole else None

    @miss_on_error(lambda _, keys, *__, **___: [None] * len(keys))
    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        return [
            self.get(key, target)
            for key, target in zip(keys, target_locations or [None] * len(keys), strict=True)
        ]

    @miss_on_error(lambda *_, **__: False)
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        source = value if value is not None else target_location
        if source is None:
            return False
        name = legal_key(self._pages.prefixes[0] + key)
        try:
            view = source_view(source.detach().cpu().contiguous())
        except (RuntimeError, ValueError) as error:
            self._client.warn(f"{key} is not stored: {error}")
            return False
        return self._client.call(lambda client: client.put(name, view), None) is not None

    @miss_on_error(lambda *_, **__: False)
    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        sources = values if values is not None else target_locations
        pairs = zip(keys, [] if sources is None else sources, strict=True)
        stored = [self.set(*each) for each in pairs]  # also those behind one that fails
        return all(stored)

    # -----------------------------------------------------------------------------------------------

    @miss_on_error(lambda *_, **__: None)
    def get_stats(self) -> Any:
        """The figures since the last call, as SGLang's metrics want them; None where they are off."""
        return self._figures.taken() if self._config.enable_storage_metrics else None

    @miss_on_error(lambda *_, **__: None)
    def clear(self) -> None:
        """Remove everything of this weight version, everywhere."""
        self._client.call(lambda client: client.flush(), None)

    @miss_on_error(lambda *_, **__: None)
    def close(self) -> None:
        self._client.close()

    def _named(
        self, layout: dict[str, Any], *, own_rank: bool = False, tp_rank: int | None = None
    ) -> str:
        """The prefix of all keys of this rank, or of `tp_rank`. `own_rank`: each rank has its own, also with MLA."""
        config = self._config
        by_rank = own_rank or not config.is_mla_model
        fields = {
            "tp_size": config.tp_size if by_rank else 1,
            **layout,
            "pp_size": config.pp_size,
            "attn_cp_size": config.attn_cp_size,
            "dcp_size": config.dcp_size,
        }
        ranks = [config.pp_rank, config.attn_cp_rank, config.dcp_rank]
        if by_rank:
            ranks.append(config.tp_rank if tp_rank is None else tp_rank)
        return f"sglang/{config.model_name}/{digest_of(fields)}/{'.'.join(map(str, ranks))}/"


def _nowhere(_: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
    raise ValueError("no host pool was registered")


def _text(name: Any) -> str:
    """The name of a pool, which is an enumeration's member."""
    return str(getattr(name, "value", name))


def _usable_ends(there: Sequence[bool], transfer: Any) -> list[int]:
    """After how many pages a prefix may end, as far as a side pool is concerned: it needs all pages of the prefix, or
    its last ones."""
    policy = _text(transfer.hit_policy)
    if policy == "all_pages":
        window = len(there)
    elif policy == "trailing_pages":
        window = max(1, len(transfer.keys or ()))
    else:
        raise ValueError(f"pages that are found by {policy} cannot be kept")
    return [end for end in range(1, len(there) + 1) if all(there[max(0, end - window) : end])]
