"""SGLang's HiCache on this store: a `dynamic` storage backend.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "p2pstore", "module_path": "p2pstore.integrations.sglang", "class_name": "P2PHiCache",
      "interface_v1": 1, "weight_version": "llama-3.1-8b@v1"}'

`weight_version` is required; `socket` names the local peer, where there are several.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from p2pstore.client.values import destination_view, source_view
from p2pstore.integrations.lasting_client import LastingClient
from p2pstore.integrations.mooncake.memory import view_at
from p2pstore.results import ItemResult

NAME_BYTES = 12


class P2PHiCache(HiCacheStorage):  # type: ignore[misc] # SGLang ships no types
    """Pages of the host pool, put from it and read into it in place. Calls may be made from several threads at once.

    A page is an object for each piece of memory that it consists of (K and V; one with MLA). Its key says how the page
    lies in memory and which rank's it is, so that only engines with the same layout share it. Hybrid models' side pools
    (`batch_*_v2`) are not kept.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        extra = {**(storage_config.extra_config or {}), **(kwargs or {})}
        if storage_config.should_split_heads:
            raise ValueError("p2pstore shares pages among engines of one tensor-parallel size only")
        self._config = storage_config
        self._client = LastingClient(extra.get("weight_version", ""), extra.get("socket"))
        self._pieces = 1
        self._prefix = self._named({})

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn how pages lie in the host's memory."""
        super().register_mem_pool_host(mem_pool_host)
        first = torch.arange(mem_pool_host.page_size)
        pointers, sizes = mem_pool_host.get_page_buffer_meta(first)
        self._pieces = len(pointers)
        layout = {
            "layout": str(getattr(mem_pool_host, "layout", "")),
            "page_size": int(mem_pool_host.page_size),
            "dtype": str(getattr(mem_pool_host, "dtype", "")),
            "bytes": [int(size) for size in sizes],
        }
        self._prefix = self._named(layout)

    # --- pages ---------------------------------------------------------------------------------

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many pages, from the first on, are there."""
        there = self._client.call(lambda client: client.match_prefix(self._objects(keys)), 0)
        return there // self._pieces

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the host's memory; for each whether all of it came."""
        items = self._items(keys, host_indices)
        missing: list[ItemResult[int]] = []
        results = self._client.call(lambda client: client.get_many_into(items), missing)
        came = [
            each.error is None and each.value == len(view)
            for each, (_, view) in zip(results, items, strict=False)
        ]
        return self._by_page(came, len(keys))

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Put pages from the host's memory, but for those that are there already; for each whether it is there now."""
        if not self._config.is_storage_writer:
            return [True] * len(keys)
        items = self._items(keys, host_indices)
        nothing = [False] * len(items)
        there = list(
            self._client.call(
                lambda client: client.contains_many([key for key, _ in items]), nothing
            )
        )
        new = [number for number, is_there in enumerate(there) if not is_there]
        failed: list[ItemResult[Any]] = []
        results = self._client.call(
            lambda client: client.put_many([items[number] for number in new]), failed
        )
        for number, result in zip(new, results, strict=False):
            there[number] = result.error is None
        return self._by_page(there, len(keys))

    # --- single values, which older code asks for --------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Read one value into a tensor that is given; None when it is not there."""
        if target_location is None:
            return None
        view = destination_view(target_location)
        name = self._prefix + key
        length = self._client.call(
            lambda client: client.get_many_into([(name, view)])[0].value, None
        )
        return target_location if length == len(view) else None

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        return [
            self.get(key, target)
            for key, target in zip(keys, target_locations or [None] * len(keys), strict=True)
        ]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Put one tensor."""
        source = value if value is not None else target_location
        if source is None:
            return False
        name, view = self._prefix + key, source_view(source.detach().cpu().contiguous())
        return self._client.call(lambda client: client.put(name, view), None) is not None

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        sources = values if values is not None else target_locations
        return all(self.set(key, value) for key, value in zip(keys, sources or [], strict=True))

    # -----------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove everything of this weight version, everywhere."""
        self._client.call(lambda client: client.flush(), None)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def _named(self, layout: dict[str, Any]) -> str:
        """What all keys of this rank begin with."""
        config = self._config
        fields = {
            **layout,
            "tp_size": 1 if config.is_mla_model else config.tp_size,
            "pp_size": config.pp_size,
            "attn_cp_size": config.attn_cp_size,
            "dcp_size": config.dcp_size,
        }
        digest = hashlib.blake2b(
            json.dumps(fields, sort_keys=True).encode(), digest_size=NAME_BYTES
        )
        ranks = [config.pp_rank, config.attn_cp_rank, config.dcp_rank]
        if not config.is_mla_model:
            ranks.append(config.tp_rank)
        return f"sglang/{config.model_name}/{digest.hexdigest()}/{'.'.join(map(str, ranks))}/"

    def _objects(self, keys: Sequence[str]) -> list[str]:
        if self._pieces == 1:
            return [self._prefix + key for key in keys]
        return [f"{self._prefix}{key}/{piece}" for key in keys for piece in range(self._pieces)]

    def _items(
        self, keys: Sequence[str], host_indices: torch.Tensor
    ) -> list[tuple[str, memoryview]]:
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        views = [
            view_at(int(pointer), int(size)) for pointer, size in zip(pointers, sizes, strict=True)
        ]
        return list(zip(self._objects(keys), views, strict=True))

    def _by_page(self, pieces: Sequence[bool], pages: int) -> list[bool]:
        if not pieces:
            return [False] * pages
        step = self._pieces
        return [all(pieces[at : at + step]) for at in range(0, pages * step, step)]
