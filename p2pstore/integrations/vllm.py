"""vLLM's offloading connector on this store: a secondary tier, behind the engine's own CPU memory.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
      "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, "secondary_tiers": [{"type": "P2PTier",
      "module_path": "p2pstore.integrations.vllm", "weight_version": "llama-3.1-8b@v1"}]}}'

`weight_version` is required; `socket` names the local peer, where there are several; `threads` move blocks.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from p2pstore.integrations.lasting_client import LastingClient, legal_key, or_else
from p2pstore.results import ItemResult

LOST_SECONDS = 5.0
MAX_LOST = 100_000
NAME_BYTES = 12


class P2PTier(SecondaryTierManager):  # type: ignore[misc] # vLLM is no dependency, so not there to be checked
    """Blocks of the primary tier, put from its memory and read into it in place, by a few threads.

    Everything that the scheduler calls returns at once: whether a block is there is read in shared memory, transfers
    run in threads. Blocks are shared by engines with the same model, dtype, block and parallel sizes.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        weight_version: str = "",
        socket: str | None = None,
        threads: int = 4,
        **others: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._client = LastingClient(weight_version, socket)
        self._client.say_unknown(others, ["weight_version", "socket", "threads"])
        self._rows = np.asarray(primary_kv_view).view(np.uint8).reshape(len(primary_kv_view), -1)
        self._prefix = _prefix(offloading_spec, self._rows.shape[1])
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="p2pstore-tier")
        self._lock = threading.Lock()
        self._running: set[Future[None]] = set()
        self._finished: deque[JobResult] = deque()
        self._lost: dict[bytes, float] = {}
        self._client.compare_hashes("vllm", _hash_seed())

    # --- what the scheduler asks -------------------------------------------------------------------

    @or_else(lambda *_, **__: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Whether a block is there. One that could not be read a moment ago counts as missing for some seconds, or it
        would be tried again and again."""
        if self._lost and self._lost.get(key, 0.0) > time.monotonic():
            return LookupResult.MISS
        there = self._client.call(lambda client: client.contains(self._name(key)), False)
        return LookupResult.HIT if there else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._lock:
            done = list(self._finished)
            self._finished.clear()
        return done

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait for all transfers under way. Each has a deadline of its own, so this ends."""
        with self._lock:
            running = set(self._running)
        wait(running)

    def shutdown(self) -> None:
        """Wait for transfers under way, and disconnect."""
        self._pool.shutdown(wait=True)
        self._client.close()

    # --- in threads --------------------------------------------------------------------------------

    def _submit(self, move: Any, job: TransferJob) -> None:
        try:
            future = self._pool.submit(self._run, move, job)
        except (
            RuntimeError
        ) as error:  # it was shut down: the engine must hear that the job has ended
            self._client.say(f"a transfer was not begun: {error}")
            with self._lock:
                self._finished.append(JobResult(job.job_id, False))
            return
        with self._lock:
            self._running.add(future)
        future.add_done_callback(self._ended)

    def _ended(self, future: Future[None]) -> None:
        with self._lock:
            self._running.discard(future)

    def _run(self, move: Any, job: TransferJob) -> None:
        began = time.monotonic()
        keys: list[bytes] = []
        failed = False
        try:
            keys = list(job.keys)
            good = move(keys, [self._rows[int(chunk)].data for chunk in job.chunk_ids])
        except Exception as error:  # whatever it is, the engine must hear that the job has ended
            self._client.say(f"a transfer of {len(keys)} blocks failed: {error!r}")
            good, failed = [], True
        result = JobResult(
            job.job_id,
            not failed and len(good) == len(keys),
            successful_keys=tuple(good) if job.is_promotion and len(good) < len(keys) else None,
            transfer_time=time.monotonic() - began,
            transfer_bytes=len(good) * self._rows.shape[1],
        )
        with self._lock:
            self._finished.append(result)

    def _store(self, keys: list[bytes], rows: list[memoryview]) -> list[bytes]:
        names = [self._name(key) for key in keys]
        there = self._client.call(lambda client: client.contains_many(names), [False] * len(names))
        new = [number for number, is_there in enumerate(there) if not is_there]
        items = [(names[number], rows[number]) for number in new]
        failed: list[ItemResult[Any]] = []
        results = self._client.call(lambda client: client.put_many(items), failed)
        stored = {
            number for number, result in zip(new, results, strict=False) if result.error is None
        }
        return [key for number, key in enumerate(keys) if there[number] or number in stored]

    def _load(self, keys: list[bytes], rows: list[memoryview]) -> list[bytes]:
        items = [(self._name(key), row) for key, row in zip(keys, rows, strict=True)]
        failed: list[ItemResult[int]] = []
        results = self._client.call(lambda client: client.get_many_into(items), failed)
        good = [
            key
            for key, row, result in zip(keys, rows, results, strict=False)
            if result.error is None and result.value == len(row)
        ]
        if len(good) < len(keys):
            self._forget(set(keys) - set(good))
        return good

    def _forget(self, keys: set[bytes]) -> None:
        now = time.monotonic()
        with self._lock:
            kept = {key: until for key, until in self._lost.items() if until > now}
            if len(kept) < MAX_LOST:
                kept.update(dict.fromkeys(keys, now + LOST_SECONDS))
            self._lost = kept

    def _name(self, key: bytes) -> str:
        return legal_key(self._prefix + key.hex())


def _prefix(spec: Any, block_bytes: int) -> str:
    """The prefix of all keys: the same for engines whose blocks are alike."""
    config = spec.config
    parallel = config.parallel
    fields = {
        "model": config.model.name,
        "dtype": str(config.model.dtype),
        "block_bytes": block_bytes,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": spec.blocks_per_chunk,
        "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "rank": parallel.rank,
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "layout": str(config.kv_cache_layout) if config.canonical_layout else "",
    }
    digest = hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=NAME_BYTES)
    return f"vllm/{config.model.name}/{digest.hexdigest()}/"


def _hash_seed() -> Any:
    """The seed of this engine's hashes of chains of blocks."""
    from vllm.v1.core import kv_cache_utils

    seed = getattr(kv_cache_utils, "NONE_HASH", None)
    return hash("p2pstore") if seed is None else bytes(seed)
