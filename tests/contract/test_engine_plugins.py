"""The plug-ins of inference engines, against a real peer.

They are subclasses of what the engines define. Where an engine is not installed, the smallest base that has the same
names stands in for it: so the plug-ins' own work is always tested, and with the engine's own code where it is there.
"""

from __future__ import annotations

import abc
import asyncio
import ctypes
import enum
import importlib
import importlib.util
import os
import select
import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from p2pstore import blocking
from p2pstore.errors import CapacityExceeded, ConfigError
from p2pstore.integrations.engine_client import EngineClient, legal_key
from p2pstore.objects import encode_key
from tests.contract.worlds import PeerProcess, peer_process
from tests.optional import require_torch
from tests.waiting import eventually

WEIGHTS = "model@v1"
DEADLINE_SECONDS = 60.0


@pytest.fixture(scope="module")
def peer(module_path: Path) -> Iterator[PeerProcess]:
    with peer_process(module_path, "plugins") as running:
        yield running


def stand_in(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Modules with these names in them, and their packages, for the length of the test; unless they are installed."""
    if importlib.util.find_spec(next(iter(modules)).partition(".")[0]) is not None:
        return
    for name, content in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            package = types.ModuleType(".".join(parts[:depth]))
            package.__path__ = []
            if package.__name__ not in sys.modules:
                monkeypatch.setitem(sys.modules, package.__name__, package)
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


def plugin(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """The plug-in's module, imported for this test alone."""
    full = f"p2pstore.integrations.{name}"
    monkeypatch.delitem(sys.modules, full, raising=False)
    module = importlib.import_module(full)
    monkeypatch.delitem(sys.modules, full)
    return module


# --- what they have in common ---------------------------------------------------------------------


def test_the_weight_version_has_to_be_named() -> None:
    for none in ("", " ", None, 5):
        with pytest.raises(ConfigError, match="weight_version"):
            EngineClient(none)


def test_settings_that_mean_nothing_are_named(
    peer: PeerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    client = EngineClient(WEIGHTS, peer.socket)
    known = ["weight_version", "socket", "threads"]
    client.warn_unknown(known, known)
    assert not caplog.records
    client.warn_unknown(["thread", "weight_version", "else"], known)
    assert ["'threads'" in each.getMessage() for each in caplog.records] == [False, True]
    assert all("changes nothing" in each.getMessage() for each in caplog.records)
    client.close()


def test_engines_that_hash_otherwise_are_told(
    peer: PeerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = (EngineClient("hashes@v1", peer.socket) for _ in range(2))
    ends = threading.Semaphore(0)
    for client, engine, seed in [
        (one, "vllm", b"seed 1"),
        (other, "vllm", b"seed 1"),
        (other, "sglang", b"seed 2"),
    ]:
        client.compare_hashes(engine, seed)
        client.run_in_worker(lambda _: ends.release())
        assert ends.acquire(timeout=DEADLINE_SECONDS)
    assert not caplog.records
    other.compare_hashes("vllm", b"seed 2")
    eventually(lambda: "PYTHONHASHSEED" in caplog.text)
    one.close()
    other.close()


def test_a_peer_that_comes_back_is_used_again_and_until_then_all_is_missing(tmp_path: Path) -> None:
    with peer_process(tmp_path, "restarted") as running:
        client = EngineClient(WEIGHTS, running.socket)
        assert client.call(lambda each: each.put("k", b"v"), None) is not None
        running.process.kill()
        running.process.wait()
        # Mapped objects can be read for a moment more.
        eventually(lambda: client.call(lambda each: each.get("k"), b"nothing") == b"nothing")
    with peer_process(tmp_path, "restarted"):
        eventually(lambda: client.call(lambda each: each.put("k", b"new"), None) is not None)
        assert client.call(lambda each: each.get("k"), b"nothing") == b"new"
        client.close()
        assert client.call(lambda each: each.get("k"), b"nothing") == b"nothing"


LONG = "k" * 1100
KEYS_OF_ENGINES = ["k", LONG, LONG + "1", "\N{SNOWMAN}" * 400, "\udc80", ""]


def test_texts_of_any_length_have_legal_keys_of_their_own() -> None:
    keys = [legal_key(text) for text in KEYS_OF_ENGINES]
    assert keys[0] == "k"
    assert len(set(keys)) == len(keys)
    assert [legal_key(text) for text in KEYS_OF_ENGINES] == keys
    assert all(encode_key(key) for key in keys)
    assert keys[1].startswith("k" * 900)
    assert legal_key("k" * 1024) == "k" * 1024


def test_whatever_a_call_raises_is_a_miss_and_a_line_in_the_log(
    peer: PeerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    client = EngineClient(WEIGHTS, peer.socket)
    assert client.call(lambda each: each.contains(LONG), False) is False
    assert client.call(lambda each: len(each.contains_many([1, 2])), -1) == -1  # type: ignore[list-item]
    assert client.call(lambda _: "abc".index("x"), -1) == -1
    assert len(caplog.records) == 3
    client.close()


# --- SGLang ---------------------------------------------------------------------------------------


class HiCacheStorage(abc.ABC):  # noqa: B024 - the part of SGLang's that matters here
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {host_pool_name: host_pool}


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


SGLANG: dict[str, dict[str, Any]] = {
    "sglang.srt.observability.metrics_collector": {"StorageMetrics": StorageMetrics},
    "sglang.srt.mem_cache.hicache_storage": {
        "HiCacheStorage": HiCacheStorage,
        "PoolTransferResult": PoolTransferResult,
    },
}
PAGE_SIZE = 4


class HostPool:
    """Pages of two pieces, K and V, as `page_first` has them."""

    page_size, layout, dtype = PAGE_SIZE, "page_first", "bfloat16"

    def __init__(self, pages: int, seed: int) -> None:
        self.memory = np.random.default_rng(seed).integers(0, 256, (2, pages, 1000), np.uint8)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        pages = [int(each) // PAGE_SIZE for each in indices[::PAGE_SIZE]]
        pieces = [self.memory[half, page] for page in pages for half in (0, 1)]
        return [int(piece.ctypes.data) for piece in pieces], [piece.nbytes for piece in pieces]


def sglang_config(**changed: Any) -> Any:
    fields = {
        **{"tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "model_name": "org/model"},
        **{"attn_cp_rank": 0, "attn_cp_size": 1, "dcp_rank": 0, "dcp_size": 1},
        **{"is_mla_model": False, "tp_lcm_size": None, "is_storage_writer": True},
        "enable_storage_metrics": False,
        "extra_config": {"weight_version": WEIGHTS},
    }
    return SimpleNamespace(**{**fields, **changed})


@pytest.fixture
def hicache(peer: PeerProcess, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's backend, which finds the peer by its environment."""
    require_torch()
    stand_in(monkeypatch, SGLANG)
    monkeypatch.setenv("MOONCAKE_P2P_SOCKET", peer.socket)
    return plugin(monkeypatch, "sglang").P2PHiCache


def test_sglang_pages_come_back_in_another_engine(hicache: Any) -> None:
    torch = require_torch()
    writer, reader = hicache(sglang_config(), {}), hicache(sglang_config(), {})
    other_rank = hicache(sglang_config(tp_rank=1), {})
    source, target = HostPool(5, 1), HostPool(5, 2)
    for store, pool in ((writer, source), (reader, target), (other_rank, HostPool(5, 3))):
        store.register_mem_pool_host(pool)
    keys = [f"hash{number}" for number in range(4)]
    indices = torch.arange(PAGE_SIZE, 5 * PAGE_SIZE)
    assert writer.batch_exists(keys) == 0
    assert writer.batch_set_v1(keys[:3], indices[: 3 * PAGE_SIZE]) == [True] * 3
    assert writer.batch_set_v1(keys[:3], indices[: 3 * PAGE_SIZE]) == [True] * 3
    assert reader.batch_exists(keys) == 3
    assert other_rank.batch_exists(keys) == 0
    before = target.memory[:, 4].copy()
    assert reader.batch_get_v1(keys, indices) == [True, True, True, False]
    assert (target.memory[:, 1:4] == source.memory[:, 1:4]).all()
    assert (target.memory[:, 4] == before).all()
    tensor = torch.arange(10)
    assert writer.set("whole", tensor)
    got = reader.get("whole", torch.zeros(10, dtype=torch.int64))
    assert got is not None
    assert torch.equal(got, tensor)
    assert reader.get("nobody", torch.zeros(10, dtype=torch.int64)) is None
    assert not writer.set("sparse", torch.eye(3).to_sparse())
    places = [torch.zeros(1, dtype=torch.int64).expand(10), torch.zeros(10, dtype=torch.int64)]
    assert [each is None for each in reader.batch_get(["whole"] * 2, places)] == [True, False]
    long = [LONG, LONG + "1"]
    assert writer.batch_set_v1(long, indices[: 2 * PAGE_SIZE]) == [True] * 2
    assert reader.batch_exists(long) == 2
    assert reader.batch_get_v1(long, indices[: 2 * PAGE_SIZE]) == [True] * 2
    assert writer.set(LONG, tensor)
    assert reader.get(LONG, torch.zeros(10, dtype=torch.int64)) is not None
    assert reader.batch_get_v1(keys, indices[:PAGE_SIZE]) == [False] * 4, "too few indices"
    assert writer.batch_set_v1(keys, indices[:PAGE_SIZE]) == [False] * 4
    assert reader.get("whole", torch.zeros(10, 10).T) is None
    assert writer.set("odd", "no tensor") is False
    assert writer.batch_set(keys, [tensor]) is False
    assert writer.batch_set(["behind 1", "behind 2"], ["no tensor", tensor]) is False
    assert reader.get(key="behind 2", target_location=torch.zeros_like(tensor)) is not None
    assert reader.exists(key=None) is False
    assert reader.batch_get(keys, [None]) == [None] * 4
    writer.clear()
    assert reader.batch_exists(keys) == 0
    with pytest.raises(ConfigError, match="weight_version"):
        hicache(sglang_config(extra_config=None), {})
    for store in (writer, reader, other_rank):
        store.close()
    assert reader.batch_exists(keys) == 0
    assert reader.batch_get_v1(keys, indices) == [False] * 4


def side_transfer(name: str, pool_keys: list[str], first: int, policy: str = "all_pages") -> Any:
    torch = require_torch()
    indices = torch.arange(first * PAGE_SIZE, (first + len(pool_keys)) * PAGE_SIZE)
    return SimpleNamespace(name=name, keys=pool_keys, host_indices=indices, hit_policy=policy)


def test_sglang_side_pools_of_hybrid_models(hicache: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A prefix ends where all pools can go on from; states of ranks are their own, what all ranks have is shared."""
    torch = require_torch()
    kinds = {"mamba": "trailing_pages", "indexer": "all_pages"}
    stores: list[Any] = []
    pools: list[dict[str, HostPool]] = []
    for rank in (0, 0, 1):
        store = hicache(
            sglang_config(
                tp_rank=rank,
                is_mla_model=True,
                is_storage_writer=True,
                extra_config={"weight_version": "hybrid@v1"},
            ),
            {},
        )
        own = {name: HostPool(6, len(pools) * 10 + number) for number, name in enumerate(kinds)}
        store.register_mem_pool_host(HostPool(6, 100 + len(pools)))
        for name, pool in own.items():
            store.register_mem_host_pool_v2(pool, name)
        store.register_mem_host_pool_v2(None, "kv")
        stores.append(store)
        pools.append(own)
    writer, reader, other_rank = stores
    keys = [f"page{number}" for number in range(5)]
    assert writer.batch_set_v1(keys[:4], torch.arange(4 * PAGE_SIZE)) == [True] * 4
    put = [side_transfer("mamba", [keys[1], keys[3]], 0), side_transfer("indexer", keys[:3], 0)]
    assert writer.batch_set_v2(put) == {"mamba": [True] * 2, "indexer": [True] * 3}
    assert writer.batch_set_v2(put) == {"mamba": [True] * 2, "indexer": [True] * 3}

    def asked(store: Any, *names: str) -> Any:
        found = store.batch_exists_v2(
            keys, [side_transfer(name, keys[:1], 0, kinds[name]) for name in names]
        )
        return found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages

    assert asked(reader) == (4, {"kv": 4}, [1, 2, 3, 4])
    assert asked(reader, "mamba") == (4, {"kv": 4, "mamba": 4}, [2, 4])
    assert asked(reader, "mamba", "indexer") == (2, {"kv": 4, "mamba": 4, "indexer": 3}, [2])
    assert asked(other_rank, "indexer") == (3, {"kv": 4, "indexer": 3}, [1, 2, 3])
    assert asked(other_rank, "mamba") == (0, {"kv": 4}, [])
    got = reader.batch_get_v2(
        [side_transfer("mamba", keys[3:], 1), side_transfer("indexer", keys[:2], 4)]
    )
    assert got == {"mamba": [True, False], "indexer": [True, True]}
    assert (pools[1]["mamba"].memory[:, 1] == pools[0]["mamba"].memory[:, 1]).all()
    assert (pools[1]["indexer"].memory[:, 4:6] == pools[0]["indexer"].memory[:, :2]).all()
    unknown = reader.batch_exists_v2(keys, [side_transfer("mamba", keys[:1], 0, "block_groups")])
    assert (unknown.kv_hit_pages, unknown.restorable_prefix_pages) == (0, [])
    assert reader.batch_get_v2([side_transfer("swa", keys[:1], 0)]) == {"swa": [False]}
    assert "block_groups" in caplog.text
    assert "no pool 'swa'" in caplog.text
    for store in stores:
        store.close()
    assert writer.batch_set_v2(put) == {"mamba": [False] * 2, "indexer": [False] * 3}
    assert asked(writer, "mamba") == (0, {}, [])


class HeadsPool(HostPool):
    """Pages that are cut by heads, as `page_head` has them: four heads of K, then four of V."""

    layout = "page_head"

    def __init__(self, pages: int, seed: int, heads: int = 4) -> None:
        shape = (2, pages, heads, 300)
        self.memory = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)

    def get_split_heads_page_buffer_meta(
        self, indices: Any, split_factor: int
    ) -> tuple[list[int], list[int]]:
        pages = [int(each) // PAGE_SIZE for each in indices[::PAGE_SIZE]]
        heads = self.memory.shape[2] // split_factor
        pieces = [
            self.memory[half, page, first : first + heads]
            for page in pages
            for first in range(0, self.memory.shape[2], heads)
            for half in (0, 1)
        ]
        return [int(piece.ctypes.data) for piece in pieces], [piece.nbytes for piece in pieces]


def test_sglang_engines_of_other_sizes_share_what_is_cut_by_heads(hicache: Any) -> None:
    torch = require_torch()

    def engine(rank: int, size: int, pool: HostPool, lcm: int = 2) -> Any:
        extra = {"weight_version": "heads@v1"}
        config = sglang_config(tp_rank=rank, tp_size=size, tp_lcm_size=lcm, extra_config=extra)
        store = hicache(config, {})
        store.register_mem_pool_host(pool)
        return store

    whole = HeadsPool(3, 1)
    halves = [HeadsPool(3, 2 + rank, heads=2) for rank in (0, 1)]
    alone = engine(0, 1, whole)
    ranks = [engine(rank, 2, pool) for rank, pool in enumerate(halves)]
    other = engine(0, 1, HeadsPool(3, 9), lcm=4)
    keys, indices = ["a", "b", "c"], torch.arange(3 * PAGE_SIZE)
    assert alone.batch_set_v1(keys[:2], indices[: 2 * PAGE_SIZE]) == [True] * 2
    assert [each.batch_exists(keys) for each in (alone, *ranks, other)] == [2, 2, 2, 0]
    for number, rank in enumerate(ranks):
        assert rank.batch_get_v1(keys[:2], indices[: 2 * PAGE_SIZE]) == [True] * 2
        own = whole.memory[:, :2, 2 * number : 2 * number + 2]
        assert (halves[number].memory[:, :2] == own).all()
    assert ranks[0].batch_set_v1(keys[2:], indices[2 * PAGE_SIZE :]) == [True]
    assert [each.batch_exists(keys) for each in (alone, *ranks)] == [2, 3, 2]
    assert alone.batch_get_v1(keys[2:], indices[2 * PAGE_SIZE :]) == [False], "half of it is there"
    assert ranks[1].batch_set_v1(keys[2:], indices[2 * PAGE_SIZE :]) == [True]
    assert alone.batch_get_v1(keys[2:], indices[2 * PAGE_SIZE :]) == [True]
    both = np.concatenate([halves[0].memory[:, 2], halves[1].memory[:, 2]], axis=1)
    assert (whole.memory[:, 2] == both).all()
    for store in (alone, *ranks, other):
        store.close()


def test_sglang_is_told_what_was_moved_and_which_settings_mean_nothing(
    hicache: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch = require_torch()
    extra = {"weight_version": "figures@v1", "interface_v1": 1, "backend_name": "p2pstore"}
    store = hicache(sglang_config(enable_storage_metrics=True, extra_config=extra), {})
    assert "there is no setting" not in caplog.text
    store.register_mem_pool_host(HostPool(3, 1))
    indices = torch.arange(2 * PAGE_SIZE)
    assert store.batch_set_v1(["a", "b"], indices) == [True] * 2
    assert store.batch_get_v1(["a", "b"], indices) == [True] * 2
    assert store.batch_get_v1(["none", "b"], indices) == [False, True]
    figures = store.get_stats()
    assert (figures.prefetch_pgs, figures.backup_pgs) == ([2, 1], [2])
    assert all(rate > 0 for rate in (*figures.prefetch_bandwidth, *figures.backup_bandwidth))
    assert store.get_stats().prefetch_pgs == []
    store.close()
    silent = hicache(sglang_config(extra_config={**extra, "weigth_version": "x"}), {})
    assert silent.get_stats() is None
    assert "did you mean 'weight_version'" in caplog.text
    silent.close()


def test_sglang_starts_without_a_peer_and_goes_on_when_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch = require_torch()
    stand_in(monkeypatch, SGLANG)
    extra = {"weight_version": WEIGHTS, "socket": str(tmp_path / "late.sock")}
    store = plugin(monkeypatch, "sglang").P2PHiCache(sglang_config(extra_config=extra), {})
    store.register_mem_pool_host(HostPool(2, 1))
    indices = torch.arange(PAGE_SIZE)
    assert store.batch_set_v1(["late"], indices) == [False]
    assert store.batch_exists(["late"]) == 0
    assert store.batch_get_v1(["late"], indices) == [False]
    assert sum("until the peer answers" in each.getMessage() for each in caplog.records) == 1
    with peer_process(tmp_path, "late") as peer:
        eventually(lambda: store.batch_set_v1(["late"], indices) == [True])
        assert store.batch_exists(["late"]) == 1
        peer.process.send_signal(signal.SIGSTOP)
        assert store.batch_set_v1(["new"], indices) == [False]
        assert store.batch_exists(["late", "new"]) == 1, "its memory can be read"
        assert store.batch_get_v1(["late", "new"], torch.arange(2 * PAGE_SIZE)) == [True, False]
        peer.process.send_signal(signal.SIGCONT)
        eventually(lambda: store.batch_set_v1(["new"], indices) == [True])
        store.close()


def test_sglang_makes_the_backend_itself(peer: PeerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own factory, with its own configuration: only where it is installed (`scripts/engine_environment`)."""
    factory = pytest.importorskip("sglang.srt.mem_cache.storage.backend_factory")
    storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    monkeypatch.setenv("MOONCAKE_P2P_SOCKET", peer.socket)
    config = storage.HiCacheStorageConfig(
        **{"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0},
        **{"attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False},
        **{"is_page_first_layout": True, "model_name": "org/model"},
        extra_config={
            **{"backend_name": "p2pstore", "module_path": "p2pstore.integrations.sglang"},
            **{"class_name": "P2PHiCache", "interface_v1": 1, "weight_version": "factory@v1"},
        },
    )
    pool, side = HostPool(5, 1), HostPool(5, 2)
    store = factory.StorageBackendFactory.create_backend("dynamic", config, pool)
    assert isinstance(store, storage.HiCacheStorage)
    store.register_mem_pool_host(pool)
    store.register_mem_host_pool_v2(side, storage.PoolName.INDEXER)
    store.on_host_pools_registered()
    indices = require_torch().arange(2 * PAGE_SIZE)
    transfer = storage.PoolTransfer(storage.PoolName.INDEXER, indices, keys=["a", "b"])
    assert store.batch_set_v1(["a", "b"], indices) == [True, True]
    assert storage.count_pool_hits(store.batch_set_v2([transfer])) == {"indexer": 2}
    found = store.batch_exists_v2(["a", "b", "c"], [transfer])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [1, 2])
    wanted = side.memory[:, :2].copy()
    side.memory[:] = 0
    assert store.batch_get_v2([transfer]) == {storage.PoolName.INDEXER: [True, True]}
    assert (side.memory[:, :2] == wanted).all()
    store.close()


def test_sglang_ranks_that_do_not_write_say_that_all_is_well(hicache: Any) -> None:
    torch = require_torch()
    store = hicache(sglang_config(is_mla_model=True, is_storage_writer=False), {})
    store.register_mem_pool_host(HostPool(1, 1))
    assert store.batch_set_v1(["mla"], torch.arange(PAGE_SIZE)) == [True]
    assert store.batch_exists(["mla"]) == 0
    store.close()


# --- vLLM -----------------------------------------------------------------------------------------


class LookupResult(enum.Enum):
    MISS, HIT, RETRY = range(3)


@dataclass
class TransferJob:
    job_id: int
    keys: list[bytes]
    chunk_ids: Any
    is_promotion: bool
    req_context: Any = None


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Any
    removed: bool
    locality: Any = None
    ownership: str | None = None
    removal_expected: bool = False


@dataclass
class RequestOffloadingContext:
    fields: dict[str, Any] = field(default_factory=dict)


class FileMapper:
    """vLLM's own rule for which engines' blocks are alike, as far as it matters here."""

    def __init__(self, spec: Any) -> None:
        self.rank = 0
        self.fields = {
            "model_name": spec.config.model.name,
            "dtype": spec.config.model.dtype,
            "tp_size": spec.config.parallel.tp_size,
        }

    @classmethod
    def from_offloading_spec(cls, *, offloading_spec: Any, **_: Any) -> FileMapper:
        return cls(offloading_spec)

    def get_run_config(self) -> dict[str, Any]:
        return self.fields


@dataclass
class Metadata:
    documentation: str


class OffloadingConnectorStats:
    def __init__(self) -> None:
        self.gauges: dict[str, int] = {}

    def set_gauge(self, name: str, value: int) -> None:
        self.gauges[name] = value

    def reduce(self) -> dict[str, int]:
        return self.gauges


class SecondaryTierManager:
    def __init__(self, spec: Any, view: memoryview, tier_type: str, detector: Any = None) -> None:
        self.tier_type = tier_type
        self.locality = None


VLLM: dict[str, dict[str, Any]] = {
    "vllm.v1.kv_offload.base": {
        "Locality": enum.Enum("Locality", {"LOCAL": "LOCAL", "REMOTE": "REMOTE"}),
        "LookupResult": LookupResult,
        "Medium": enum.Enum("Medium", {"CPU": "CPU", "STORAGE": "STORAGE"}),
        "OffloadingEvent": OffloadingEvent,
        "OffloadingGaugeMetadata": Metadata,
        "RequestOffloadingContext": RequestOffloadingContext,
    },
    "vllm.v1.kv_offload.file_mapper": {"FileMapper": FileMapper},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": SimpleNamespace(P2P="p2p")},
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": {
        "OffloadingConnectorStats": OffloadingConnectorStats
    },
    "vllm.v1.kv_offload.tiering.base": {
        "JobResult": JobResult,
        "SecondaryTierManager": SecondaryTierManager,
        "TransferJob": TransferJob,
    },
    "vllm.v1.core.kv_cache_utils": {"NONE_HASH": b"seed"},
}


def vllm_spec(tp_size: int = 1, name: str = "org/model") -> Any:
    parallel = {"tp_size": tp_size, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "rank": 0}
    config = SimpleNamespace(
        model=SimpleNamespace(name=name, dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16),
        groups=[SimpleNamespace(tokens_per_block=16, layer_names=["l0", "l1"])],
        parallel=SimpleNamespace(**parallel, is_parallelism_agnostic=False),
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout=None,
    )
    events = SimpleNamespace(enable_kv_cache_events=True, self_describing_kv_events=True)
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=events)


def finished(tier: Any) -> Any:
    found: list[Any] = []

    def came() -> bool:
        found.extend(tier.get_finished_jobs())
        return bool(found)

    eventually(came)
    (result,) = found
    return result


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in(monkeypatch, VLLM)
    return plugin(monkeypatch, "vllm")


def test_vllm_blocks_come_back_in_another_engine(peer: PeerProcess, vllm: Any) -> None:
    memories = [np.random.default_rng(seed).integers(0, 256, (6, 5000), np.uint8) for seed in range(3)]
    named = {"weight_version": WEIGHTS, "socket": peer.socket}
    writer, reader, wider = (
        vllm.P2PTier(vllm_spec(tp_size), memory.data, "P2PTier", **named)
        for memory, tp_size in zip(memories, (1, 1, 2), strict=True)
    )
    keys = [bytes([number]) * 32 + b"\0\0\0\0" for number in range(4)]
    hit, miss = vllm.LookupResult.HIT, vllm.LookupResult.MISS
    assert writer.lookup(keys[0], None) == miss
    writer.submit_store(vllm.TransferJob(1, keys[:3], np.array([5, 0, 2]), False, None))
    stored = finished(writer)
    assert (stored.job_id, stored.success, stored.transfer_bytes) == (1, True, 15_000)
    assert [reader.lookup(key, None) for key in keys] == [hit, hit, hit, miss]
    assert wider.lookup(keys[0], None) == miss
    reader.submit_load(vllm.TransferJob(2, keys, np.array([1, 2, 3, 4]), True, None))
    reader.drain_jobs()
    loaded = finished(reader)
    assert (loaded.success, loaded.successful_keys) == (False, tuple(keys[:3]))
    assert (memories[1][1:4] == memories[0][[5, 0, 2]]).all()
    with blocking.connect(peer.socket, namespace=WEIGHTS) as client:
        client.flush()
    reader.submit_load(vllm.TransferJob(3, keys[:1], np.array([1]), True, None))
    assert not finished(reader).success
    writer.submit_store(vllm.TransferJob(4, keys[:1], np.array([5]), False, None))
    assert finished(writer).success
    assert writer.lookup(keys[0], None) == hit
    assert reader.lookup(keys[0], None) == miss, "what just failed is not tried again at once"
    long = [bytes([number]) * 600 for number in (7, 8)]
    writer.submit_store(vllm.TransferJob(5, long, np.array([1, 2]), False, None))
    assert finished(writer).success
    assert writer.lookup(long[0], None) == hit
    assert writer.lookup(None, None) == miss
    writer.submit_store(vllm.TransferJob(6, [None], np.array([1]), False, None))
    assert not finished(writer).success
    writer.submit_store(vllm.TransferJob(7, None, np.array([1]), False, None))
    assert not finished(writer).success
    for tier in (writer, reader, wider):
        tier.shutdown()
    writer.submit_load(vllm.TransferJob(8, keys[:1], np.array([1]), True, None))
    assert not finished(writer).success
    assert writer.lookup(keys[0], None) == miss


def test_vllm_hears_of_blocks_that_come_to_the_pool_and_leave_it(
    peer: PeerProcess, vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    memory = np.zeros((4, 5000), np.uint8)
    named = {"weight_version": "events@v1", "socket": peer.socket, "enable_kv_events": True}
    silent = vllm_spec()
    silent.kv_events_config.enable_kv_cache_events = False
    tiers = [
        vllm.P2PTier(spec, memory.data, "P2PTier", **named)
        for spec in (vllm_spec(), vllm_spec(), vllm_spec(), silent)
    ]
    writer, other, reader, mute = tiers
    assert "publishes no KV events" in caplog.text
    keys = [bytes([number]) * 32 + b"\0\0\0\0" for number in range(2)]

    def stored_by(tier: Any) -> list[Any]:
        tier.submit_store(vllm.TransferJob(1, keys, np.array([0, 1]), False, None))
        assert finished(tier).success
        return list(tier.take_events())

    stored = [vllm.OffloadingEvent(keys, vllm.Medium.STORAGE, False, removal_expected=True)]
    assert stored_by(writer) == stored
    assert stored_by(writer) == []
    assert stored_by(other) == stored, "what it found there is told of"
    assert stored_by(mute) == []
    with blocking.connect(peer.socket, namespace="events@v1") as client:
        client.flush()

    def next_events(tier: Any) -> list[Any]:
        events: list[Any] = []

        def came() -> bool:
            events.extend(tier.take_events())
            return bool(events)

        eventually(came)
        return events

    for tier in (writer, other):
        gone = [(sorted(event.keys), event.removed) for event in next_events(tier)]
        assert gone == [(keys, True)]
    assert stored_by(writer) == stored

    def read_by(tier: Any) -> list[Any]:
        request = SimpleNamespace(req_id="request", kv_transfer_params=None)
        tier.on_new_request(request)
        tier.submit_load(vllm.TransferJob(2, keys, np.array([2, 3]), True, request))
        assert finished(tier).success
        assert list(tier.take_events()) == [], "its tokens are not known yet"
        tier.on_request_finished(request)
        return list(tier.take_events())

    assert read_by(reader) == stored
    assert read_by(reader) == []
    reader.drain_jobs()
    assert [(sorted(event.keys), event.removed) for event in reader.take_events()] == [(keys, True)]
    assert read_by(reader) == stored, "vLLM had its consumers forget all"
    for tier in tiers:
        tier.shutdown()


def test_vllm_computes_what_would_take_longer_to_fetch(
    peer: PeerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, VLLM)
    module = plugin(monkeypatch, "vllm")
    named = {"weight_version": "limit@v1", "socket": peer.socket}
    keys = [bytes([number]) * 32 + b"\0\0\0\0" for number in range(3)]
    memory = np.zeros((4, 5000), np.uint8)
    quick, patient = (
        module.P2PTier(vllm_spec(), memory.data, "P2PTier", max_fetch_seconds_per_token=limit, **named)
        for limit in (1e-12, 100.0)
    )
    quick.submit_store(module.TransferJob(1, keys[:2], np.array([0, 1]), False, None))
    assert finished(quick).success

    def answers(tier: Any, request: Any) -> list[Any]:
        """Of the step in which all are known."""
        found: list[Any] = []

        def is_known() -> bool:
            found[:] = [tier.lookup(key, request) for key in keys]
            tier.get_finished_jobs()
            return module.LookupResult.RETRY not in found

        eventually(is_known)
        return [each.name for each in found]

    request = SimpleNamespace(req_id="r1")
    monkeypatch.setattr("p2pstore.integrations.engine_client.ANSWER_SECONDS", 1000.0)
    assert quick.lookup(keys[0], request) == module.LookupResult.RETRY
    assert answers(quick, request) == ["MISS"] * 3
    assert answers(patient, request) == ["HIT", "HIT", "MISS"]
    monkeypatch.setattr("p2pstore.integrations.engine_client.ANSWER_SECONDS", -1.0)
    late = SimpleNamespace(req_id="r2")
    assert quick.lookup(keys[0], late) == module.LookupResult.RETRY
    assert quick.lookup(keys[0], late) == module.LookupResult.HIT, "no answer in time: fetched as ever"
    for tier in (quick, patient):
        tier.on_request_finished(request)
        assert request.req_id not in tier._limit._verdicts
        tier.shutdown()
    with pytest.raises(ConfigError, match="above 0"):
        module.P2PTier(vllm_spec(), memory.data, "P2PTier", max_fetch_seconds_per_token=0, **named)


def test_vllm_makes_the_tier_itself(peer: PeerProcess) -> None:
    """By its own factory: only where it is installed (`scripts/engine_environment`)."""
    made = pytest.importorskip("vllm.v1.kv_offload.tiering.factory").SecondaryTierFactory
    base = importlib.import_module("vllm.v1.kv_offload.tiering.base")
    named = {"type": "P2PTier", "module_path": "p2pstore.integrations.vllm"}
    memory = np.random.default_rng(0).integers(0, 256, (4, 5000), np.uint8)
    tier = made.create_secondary_tier(
        {**named, "weight_version": "factory@v1", "socket": peer.socket}, memory.data, vllm_spec()
    )
    assert isinstance(tier, base.SecondaryTierManager)
    keys = [bytes([number]) * 32 + b"\0\0\0\0" for number in range(2)]
    tier.submit_store(base.TransferJob(1, keys, np.array([0, 1]), False, None))
    assert finished(tier).success
    tier.submit_load(base.TransferJob(2, keys, np.array([2, 3]), True, None))
    assert finished(tier).success
    assert (memory[2:] == memory[:2]).all()
    tier.shutdown()


# --- LMCache --------------------------------------------------------------------------------------


class RemoteConnector:
    """Chunks of `CHUNK_BYTES`; its own reshaping cuts partial ones."""

    save_chunk_meta, remote_metadata_bytes = False, 8
    meta_shapes, meta_dtypes, meta_fmt = "shapes", "dtypes", "fmt"

    def __init__(self, config: Any, metadata: Any) -> None:
        self.save_chunk_meta = config.save_chunk_meta

    def reshape_partial_chunk(self, memory_obj: Any, bytes_read: int) -> Any:
        if bytes_read % 100:
            raise ValueError("no whole tokens")
        memory_obj.data = memory_obj.data[:bytes_read]
        return memory_obj


class RemoteMetadata:
    def __init__(self, length: int, shapes: Any, dtypes: Any, fmt: Any) -> None:
        self.length, self.shapes, self.dtypes, self.fmt = length, length, dtypes, fmt

    def serialize(self) -> bytes:
        return int(self.length).to_bytes(8, "little")

    @staticmethod
    def deserialize(data: Any) -> RemoteMetadata:
        return RemoteMetadata(int.from_bytes(data, "little"), 0, 0, 0)


class Bitmap:
    def __init__(self, size: int) -> None:
        self.bits = [0] * size

    def set(self, number: int) -> None:
        self.bits[number] = 1


class L2AdapterInterface:
    """Counts bytes as LMCache's own does."""

    def __init__(self) -> None:
        self.used: dict[Any, int] = {}
        self.accessed: list[Any] = []

    def _notify_keys_stored(self, keys: Any, sizes: Any) -> None:
        assert not self.used.keys() & set(keys), "counted twice"
        self.used.update(zip(keys, sizes, strict=True))

    def _notify_keys_deleted(self, keys: Any, sizes: Any) -> None:
        assert [self.used.pop(key) for key in keys] == sizes

    def _notify_keys_accessed(self, keys: Any) -> None:
        self.accessed += keys

    def get_usage(self) -> Any:
        return SimpleNamespace(total_bytes_used=sum(self.used.values()))


class ObjectKey(NamedTuple):
    chunk_hash: bytes
    model_name: str = "m"
    kv_rank: int = 0x2010201
    object_group_id: int = 0
    cache_salt: str = "salt"


class EncodedObjectKey(NamedTuple):
    chunk_hash_hex: str
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str


class KeyEntry(NamedTuple):
    key: EncodedObjectKey
    size_bytes: int


class KeyListPage(NamedTuple):
    entries: tuple[KeyEntry, ...]
    next_page_token: str | None


class L2StoreResult(int):
    def __new__(cls, success: bool, bytes_transferred: int) -> L2StoreResult:
        return super().__new__(cls, bytes_transferred if success else -1)


class EventNotifier:
    def __init__(self) -> None:
        self._descriptor = os.eventfd(0)

    def fileno(self) -> int:
        return self._descriptor

    def notify(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def close(self) -> None:
        os.close(self._descriptor)


class ChunkedTokenDatabase:
    """The parts of LMCache's that hash; making one gives vLLM another seed."""

    NONE_HASH = 0
    made = 0

    def __init__(self) -> None:
        raise AssertionError("a second database")

    def _get_vllm_hash_func(self, name: str) -> Any:
        return {"builtin": hash, "sha256_cbor": lambda value: hash((1, value))}[name]

    def _hash_tokens(self, tokens: list[int]) -> int:
        return int(self.hash_func((self.NONE_HASH, tuple(tokens), ())))  # type: ignore[attr-defined]


LMCACHE: dict[str, dict[str, Any]] = {
    "lmcache.v1.token_database": {"ChunkedTokenDatabase": ChunkedTokenDatabase},
    "lmcache.lmcache_native": {"Bitmap": Bitmap},
    "lmcache.v1.distributed.api": {
        each.__name__: each for each in (EncodedObjectKey, KeyEntry, KeyListPage)
    },
    "lmcache.v1.distributed.internal_api": {"L2StoreResult": L2StoreResult},
    "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
    "lmcache.v1.platform": {"create_event_notifier": EventNotifier},
    "lmcache.v1.protocol": {"RemoteMetadata": RemoteMetadata},
    "lmcache.v1.storage_backend.connector.base_connector": {"RemoteConnector": RemoteConnector},
}
CHUNK_BYTES = 1000


class MemoryObj:
    def __init__(self, data: bytes | int, counts: list[int]) -> None:
        self.data, self._counts = bytearray(data), counts
        counts.append(1)

    @property
    def byte_array(self) -> memoryview:
        return memoryview((ctypes.c_ubyte * len(self.data)).from_buffer(self.data))  # "<B"

    def ref_count_down(self) -> None:
        self._counts.append(-1)

    def get_shapes(self) -> int:
        return 0

    get_dtypes = get_memory_format = get_shapes


class CpuBackend:
    """Gives out memory, and counts what is not given back."""

    def __init__(self, save_chunk_meta: bool) -> None:
        self.config = SimpleNamespace(save_chunk_meta=save_chunk_meta)
        self.metadata = None
        self.counts: list[int] = []
        self.fails = False

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any) -> MemoryObj:
        if self.fails and sum(self.counts) % 2:
            raise MemoryError("no more")
        return MemoryObj(CHUNK_BYTES if shapes == "shapes" else shapes, self.counts)


@dataclass(frozen=True)
class ChunkKey:
    text: str
    request_configs: dict[str, Any] | None = None

    def to_string(self) -> str:
        return self.text


@pytest.fixture
def lmcache(monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec("lmcache") is not None:
        pytest.skip("LMCache is installed: its own basic_check is the test")
    stand_in(monkeypatch, LMCACHE)
    return plugin(monkeypatch, "lmcache")


@pytest.mark.parametrize("save_chunk_meta", [False, True])
def test_lmcache_chunks_come_back(save_chunk_meta: bool, peer: PeerProcess, lmcache: Any) -> None:
    backend = CpuBackend(save_chunk_meta)
    extra = {"p2pstore_weight_version": f"lm@{save_chunk_meta}", "p2pstore_socket": peer.socket}

    async def use() -> None:
        config = SimpleNamespace(extra_config=extra, pre_caching_hash_algorithm="builtin")
        connector = lmcache.P2PConnector(asyncio.get_running_loop(), backend, config)
        keys = [ChunkKey(f"model@1@0@{number}") for number in range(4)]
        values = [bytes([number]) * length for number, length in enumerate((1000, 300, 1000))]
        assert not await connector.exists(keys[0])
        await connector.batched_put(keys[:3], [MemoryObj(value, []) for value in values])
        assert await connector.batched_async_contains("id", keys) == 3
        assert connector.exists_sync(keys[2])
        got = await connector.batched_get(keys)
        assert [None if each is None else bytes(each.data) for each in got] == [*values, None]
        assert sum(backend.counts) == 3
        assert connector.remove_sync(keys[1])
        prefix = await connector.batched_get_non_blocking("id", keys)
        assert [bytes(each.data) for each in prefix] == values[:1]
        assert sum(backend.counts) == 4, "what came behind the gap was given back"
        assert await connector.list() == [keys[0].text, keys[2].text]
        assert await connector.ping() == 0
        long = [ChunkKey(text) for text in KEYS_OF_ENGINES if text != "k"]
        await connector.batched_put(long, [MemoryObj(value, []) for value in [values[0]] * 5])
        assert connector.batched_contains(long) == 5
        got = await connector.batched_get(long)
        assert [bytes(each.data) for each in got] == [values[0]] * 5
        assert [connector.remove_sync(key) for key in long] == [True] * 5
        assert await connector.get(long[0]) is None
        await use_wrongly(connector, long)
        await connector.close()
        assert not connector.exists_sync(keys[0])
        assert await connector.batched_get(keys) == [None] * 4

    async def use_wrongly(connector: Any, keys: list[Any]) -> None:
        """Errors of an engine, or of its own memory, are misses."""
        nonsense = [SimpleNamespace()] * 2
        assert not await connector.exists(nonsense[0])
        assert not connector.exists_sync(nonsense[0])
        assert not connector.remove_sync(nonsense[0])
        assert connector.batched_contains(nonsense) == 0
        assert await connector.batched_async_contains("id", nonsense) == 0
        assert await connector.batched_get(nonsense) == [None, None]
        assert await connector.batched_get_non_blocking("id", nonsense) == []
        await connector.batched_put(keys, [])
        await connector.put(nonsense[0], MemoryObj(b"value", []))
        held = sum(backend.counts)
        backend.fails = True
        assert await connector.batched_get(keys) == [None] * len(keys)
        backend.fails = False
        assert sum(backend.counts) == held, "the memory was given back"

    asyncio.run(use())


def test_lmcache_engines_that_hash_otherwise_are_told_at_the_first_request(
    peer: PeerProcess, lmcache: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the hash that LMCache uses, with the seed that it has by then: not before, and not by Python's seed."""
    extra = {"p2pstore_weight_version": "hashes@lm", "p2pstore_socket": peer.socket}

    async def ask(algorithm: str, seed: int) -> None:
        config = SimpleNamespace(extra_config=extra, pre_caching_hash_algorithm=algorithm)
        connector = lmcache.P2PConnector(asyncio.get_running_loop(), CpuBackend(False), config)
        monkeypatch.setattr(ChunkedTokenDatabase, "NONE_HASH", seed)
        for _ in range(2):
            assert connector.batched_contains([ChunkKey("none")]) == 0
        done = threading.Event()
        connector._client.run_in_worker(lambda _: done.set())
        assert await asyncio.to_thread(done.wait, DEADLINE_SECONDS)
        await connector.close()

    asyncio.run(ask("builtin", 5))
    asyncio.run(ask("builtin", 5))
    assert "differs from those" not in caplog.text
    asyncio.run(ask("builtin", 6))
    asyncio.run(ask("sha256_cbor", 5))
    assert caplog.text.count("this lmcache engine differs from those") == 2


class Server:
    """LMCache's server beside an adapter: it waits for the events, and takes the results."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._events = (
            adapter.get_store_event_fd(),
            adapter.get_lookup_and_lock_event_fd(),
            adapter.get_load_event_fd(),
        )
        assert len(set(self._events)) == 3

    def _wait_for(self, event: int) -> None:
        assert select.select([self._events[event]], [], [], DEADLINE_SECONDS)[0]
        os.eventfd_read(self._events[event])

    def store(self, keys: Any, values: Any) -> Any:
        task = self._adapter.submit_store_task(keys, [MemoryObj(value, []) for value in values])
        self._wait_for(0)
        results = self._adapter.pop_completed_store_tasks()
        assert self._adapter.pop_completed_store_tasks() == {}
        assert list(results) == [task]
        return results[task]

    def look_up(self, keys: Any) -> Any:
        task = self._adapter.submit_lookup_and_lock_task(keys, {})
        self._wait_for(1)
        bits = self._adapter.query_lookup_and_lock_result(task).bits
        assert self._adapter.query_lookup_and_lock_result(task) is None
        return bits

    def load(self, keys: Any, rooms: Any) -> Any:
        task = self._adapter.submit_load_task(keys, rooms)
        self._wait_for(2)
        return self._adapter.query_load_result(task).bits


@pytest.fixture
def adapter(peer: PeerProcess, lmcache: Any) -> Iterator[Any]:
    """The adapter of LMCache's server."""
    with blocking.connect(peer.socket, namespace="l2@v1") as client:
        client.flush()
    adapter = lmcache.P2PL2Adapter({"weight_version": "l2@v1", "socket": peer.socket})
    yield adapter
    adapter.close()


def test_lmcache_tasks_of_the_server_end_with_an_event(adapter: Any) -> None:
    server = Server(adapter)
    keys = [ObjectKey(bytes([number])) for number in range(3)]
    values = [bytes([number + 1]) * 100 for number in range(2)]
    assert server.store(keys[:2], values) == 200
    assert server.look_up(keys) == [1, 1, 0]
    rooms = [MemoryObj(100, []) for _ in keys]
    assert server.load(keys, rooms) == [1, 1, 0]
    assert [bytes(each.data) for each in rooms[:2]] == values
    long = [ObjectKey(bytes([7]), LONG)]
    server.store(long, values[:1])
    assert server.look_up(long) == [1]
    assert server.load([SimpleNamespace()] * 2, []) == [0, 0]
    adapter.delete([SimpleNamespace()])
    adapter.delete(keys[:1])
    assert server.look_up(keys) == [0, 1, 0]


def test_lmcache_counts_the_chunks_that_a_server_stored_and_the_pool_still_has(
    peer: PeerProcess, adapter: Any
) -> None:
    server = Server(adapter)
    keys = [ObjectKey(bytes([number])) for number in range(4)]
    value = bytes(100)
    server.store(keys[:3], [value] * 3)
    server.store(keys[:3], [value] * 3)
    assert adapter.used == dict.fromkeys(keys[:3], 100)
    assert server.store([keys[3], keys[0]], [bytes(1 << 30), value]) == -1, "one of them does not fit"
    assert adapter.used == dict.fromkeys(keys[:3], 100)
    server.load(keys, [MemoryObj(100, []) for _ in keys])
    assert adapter.accessed == keys[:3]
    adapter.delete([*keys[2:], keys[2]])
    assert adapter.get_usage().total_bytes_used == 200
    with blocking.connect(peer.socket, namespace="l2@v1") as client:
        assert client.remove(client.list_keys("lmcache/", limit=1).keys[0].key)
    eventually(lambda: adapter.get_usage().total_bytes_used == 100)
    assert adapter.used == {keys[1]: 100}


def test_lmcache_s_server_lists_the_pool_s_chunks_and_reports_its_state(adapter: Any) -> None:
    server = Server(adapter)
    keys = [ObjectKey(bytes([number]), f"m{number % 2}") for number in range(5)]
    server.store([*keys, ObjectKey(b"", LONG)], [bytes(100)] * 6)
    pages: list[Any] = []
    token = None
    while not pages or token is not None:
        page = adapter.list_l2_keys(page_size=2, cursor=token)
        pages.append(page.entries)
        token = page.next_page_token
    assert len(pages) == 3
    listed = sorted(entry for page in pages for entry in page)
    assert listed == sorted(
        KeyEntry(EncodedObjectKey(key.chunk_hash.hex(), *key[1:]), 100) for key in keys
    )
    assert len(adapter.list_l2_keys("m1").entries) == 2
    with pytest.raises(ValueError, match="page_size"):
        adapter.list_l2_keys(page_size=0)
    status = adapter.report_status()
    assert (status["is_healthy"], status["peer_answers"]) == (True, True)
    assert (status["stored_object_count"], status["current_size_bytes"]) == (6, 600)


def test_a_chunk_that_lmcache_has_looked_up_is_not_evicted_until_it_is_unlocked(
    peer: PeerProcess, adapter: Any
) -> None:
    server = Server(adapter)
    keys = [ObjectKey(bytes([number])) for number in range(2)]
    server.store(keys, [bytes(1 << 20)] * 2)
    assert server.look_up([*keys, ObjectKey(b"none")]) == [1, 1, 0]
    assert server.look_up(keys[:1]) == [1]
    adapter.submit_unlock(keys)
    assert adapter.report_status()["locked_key_count"] == 1, "the first one was looked up twice"
    with blocking.connect(peer.socket, namespace="others") as client:
        eventually(lambda: client.statistics(cluster=False)["peer"]["leased_bytes"] < 2 << 20)
        with suppress(CapacityExceeded):
            for number in range(100):  # more than the peer's memory, so that all else goes that may go
                client.put(f"fill-{number}", bytes(1 << 20), pin="hard")
        client.flush()
    assert server.look_up(keys) == [1, 0]
    adapter.submit_unlock(keys[:1] * 2)
    assert adapter.report_status()["locked_key_count"] == 0
