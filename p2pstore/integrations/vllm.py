"""vLLM's offloading connector on this store: a secondary tier, behind the engine's own CPU memory.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
      "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, "secondary_tiers": [{"type": "P2PTier",
      "module_path": "p2pstore.integrations.vllm", "weight_version": "llama-3.1-8b@v1"}]}}'

`weight_version` is required; `socket` names the local peer, where there are several; `threads` move blocks. Engines
share blocks of models of one name: the last part of the model's path, or what `model` says. `enable_kv_events` tells
routers of blocks in the pool, with medium `STORAGE` (vLLM adds tokens with `self_describing_kv_events`). With
`max_fetch_seconds_per_token` (the time of a prefill per token) blocks whose fetch is expected to take longer are
computed: a lookup misses them.

A request's `kv_transfer_params` may say `p2pstore_pin_seconds` (its blocks are evicted last), `p2pstore_ttl_seconds`
(they end), and `p2pstore_wait_seconds` (missing ones may still come). KV hints of action `kv.retain` pin, too.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from p2pstore.blocking import BlockingClient
from p2pstore.integrations.block_events import BlockEvents
from p2pstore.integrations.engine_client import (
    EngineClient,
    FetchLimit,
    digest_of,
    legal_key,
    miss_on_error,
)

LOST_SECONDS = 5.0
MAX_LOST = 100_000
WAIT_PARAMETER = "p2pstore_wait_seconds"
"""In a request's `kv_transfer_params`: the time to wait for blocks that another engine has just computed."""
LIMIT = "max_fetch_seconds_per_token"
_ALLOWED = {True: LookupResult.HIT, False: LookupResult.MISS, None: LookupResult.RETRY}
Kept = tuple[float | None, Callable[[BlockingClient], None] | None]
PEER_ANSWERS = "vllm:kv_offload_p2pstore_peer_answers"


class P2PTier(SecondaryTierManager):  # type: ignore[misc] # vLLM is no dependency, so not there to be checked
    """Blocks of the primary tier, put from its memory and read into it in place, by a few threads.

    Everything that the scheduler calls returns at once: whether a block is there is read in shared memory, or asked by
    a worker while vLLM tries again; transfers run in threads. Engines with the same weight version, model, dtype,
    block size and hashes share blocks; with the same parallel sizes, unless vLLM says that its blocks do not depend on
    them.
    """

    medium = Medium.STORAGE
    cache_hit_source = CacheHitSource.P2P

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._weight_version = options.get("weight_version", "")
        self._client = EngineClient(self._weight_version, options.get("socket"))
        self._client.warn_unknown(
            options,
            ["weight_version", "socket", "threads", "model", "locality", "enable_kv_events", LIMIT],
        )
        if options.get("locality"):
            self.locality = Locality(options["locality"])
        self._rows: Any = np.asarray(primary_kv_view).view(np.uint8).reshape(len(primary_kv_view), -1)
        self._row_bytes = self._rows.shape[1]
        self._layout = _layout(offloading_spec, self._row_bytes, options.get("model"))
        self._prefix = f"vllm/{self._layout['model_name']}/{digest_of(self._layout)}/"
        self._pool = ThreadPoolExecutor(options.get("threads", 4), thread_name_prefix="p2pstore-tier")
        self._lock = threading.Lock()
        self._running: set[Future[None]] = set()
        self._finished: deque[JobResult] = deque()
        self._lost: dict[bytes, float] = {}
        self._wait_until: dict[str, float] = {}
        limit = options.get(LIMIT)
        self._limit = None if limit is None else FetchLimit(self._client, float(limit))
        self._tokens = (
            []
            if limit is None
            else [
                group.tokens_per_block * offloading_spec.blocks_per_chunk
                for group in offloading_spec.config.groups
            ]
        )
        self._compared = False
        self._told_answers: bool | None = None
        self._events: BlockEvents[bytes] | None = None
        self._read: dict[str, list[bytes]] = {}
        """Of each request, the blocks that it read from the pool."""
        if options.get("enable_kv_events"):
            self._begin_events(offloading_spec.kv_events_config)

    # --- what the scheduler asks -------------------------------------------------------------------

    @miss_on_error(lambda *_, **__: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Whether a block is there. One that could not be read a moment ago counts as missing for some seconds, or it
        would be tried again and again."""
        if self._lost and self._lost.get(key, 0.0) > time.monotonic():
            return LookupResult.MISS
        (there,) = self._client.look_up([self._name(key)])
        if there is None or (not there and self._wait_until and self._waits(req_context)):
            return LookupResult.RETRY
        if there and self._limit is not None:
            group = int.from_bytes(key[-4:], "big")
            allowed = self._limit.allows(req_context.req_id, self._name(key), self._tokens[group])
            return _ALLOWED[allowed]
        return LookupResult.HIT if there else LookupResult.MISS

    @miss_on_error(lambda *_, **__: None)
    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Blocks were found in the engine's own memory: the pool keeps them, too, for engines that begin later."""
        if self._client.answers:
            keys = list(keys)
            self._client.run_in_worker(_touching(self._prefix, keys))
            _pin_later(self._pool, self._client, _kept(self._client, self._prefix, keys, req_context)[1])

    def _waits(self, req_context: Any) -> bool:
        """Whether a missing block of this request may still be on its way from the engine that computed it."""
        until = self._wait_until.get(req_context.req_id, 0.0)
        return self._client.answers and time.monotonic() < until

    @miss_on_error(lambda *_, **__: RequestOffloadingContext())
    def on_new_request(self, req_context: Any) -> Any:
        """At the first one vLLM has chosen its hash function and seed: `NONE_HASH` is the function's hash of the seed.
        Both are compared with those of the other engines."""
        if not self._compared:
            self._compared = True
            seed = bytes(kv_cache_utils.NONE_HASH).hex()
            self._client.compare_hashes("vllm", seed, **self._layout)
        if self._events is not None:
            self._read[req_context.req_id] = []
        wait_seconds = ((req_context and req_context.kv_transfer_params) or {}).get(WAIT_PARAMETER)
        if wait_seconds:
            self._wait_until[req_context.req_id] = time.monotonic() + float(wait_seconds)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Tell of the blocks that the request read: vLLM notes a block's tokens when it finds it in its own memory."""
        self._wait_until.pop(req_context.req_id, None)
        if self._limit is not None:
            self._limit.forget(req_context.req_id)
        read = self._read.pop(req_context.req_id, None)
        if read and self._events is not None:
            self._events.found(read, new=False)

    def submit_store(self, job_metadata: TransferJob) -> None:
        kept = _kept(self._client, self._prefix, job_metadata.keys, job_metadata.req_context)
        self._submit(partial(self._store, kept), job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """vLLM calls it once in each step of the scheduler."""
        if self._limit is not None:
            self._limit.ask()
        with self._lock:
            done = list(self._finished)
            self._finished.clear()
        return done

    def drain_jobs(self) -> None:
        """Wait for all transfers under way. Each has a deadline of its own, so this ends. vLLM calls it where it
        forgets all of its own blocks: then it tells consumers to forget all, and forgets the tokens of what is here."""
        with self._lock:
            running = set(self._running)
        wait(running)
        if self._events is not None:
            self._events.forget()

    def shutdown(self) -> None:
        """Wait for transfers under way, let go of vLLM's memory, and disconnect."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._rows = None
        self._client.close()

    # --- what it publishes -------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {PEER_ANSWERS: OffloadingGaugeMetadata("Whether this machine's peer answers (1 or 0).")}

    def get_stats(self) -> Any:
        answers = self._client.answers
        if answers == self._told_answers:
            return None
        self._told_answers = answers
        stats = OffloadingConnectorStats()
        stats.set_gauge(PEER_ANSWERS, int(answers))
        return stats

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        return ("p2pstore_weight_version", "p2pstore_prefix")

    def config_info(self) -> dict[str, str]:
        return dict(zip(self.config_info_keys({}), (self._weight_version, self._prefix), strict=True))

    def _begin_events(self, config: Any) -> None:
        if not config.enable_kv_cache_events:
            self._client.warn("enable_kv_events changes nothing: vLLM publishes no KV events")
            return
        if not config.self_describing_kv_events:
            self._client.warn(
                "set self_describing_kv_events in kv_connector_extra_config: without tokens routers ignore the events"
            )
        self._events = BlockEvents()

    @miss_on_error(lambda *_, **__: ())
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that came to the pool by this engine, or were found there, and those that no peer has any more."""
        if self._events is None:
            return ()
        self._client.now_and_then(self._check_told)
        return [
            OffloadingEvent(event.keys, self.medium, event.removed, self.locality, removal_expected=True)
            for event in self._events.take()
        ]

    def _check_told(self, client: BlockingClient) -> None:
        """In the worker: which of the blocks that were told of are gone."""
        assert self._events is not None
        keys = self._events.to_check()
        if keys:
            self._events.checked(keys, client.contains_many([self._name(key) for key in keys]))

    # --- in threads --------------------------------------------------------------------------------

    def _submit(self, move: Any, job: TransferJob) -> None:
        try:
            future = self._pool.submit(self._run, move, job)
        except RuntimeError as error:  # it was shut down: the engine must hear that the job has ended
            self._client.warn(f"a transfer was not begun: {error}")
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
            if job.is_promotion and self._read:
                self._read.get(job.req_context.req_id, []).extend(good)
        except Exception as error:  # whatever it is, the engine must hear that the job has ended
            self._client.warn(f"a transfer of {len(keys)} blocks failed: {error!r}")
            good, failed = [], True
        result = JobResult(
            job.job_id,
            not failed and len(good) == len(keys),
            successful_keys=tuple(good) if job.is_promotion and len(good) < len(keys) else None,
            transfer_time=time.monotonic() - began,
            transfer_bytes=len(good) * self._row_bytes,
        )
        with self._lock:
            self._finished.append(result)

    def _store(self, kept: Kept, keys: list[bytes], rows: list[memoryview]) -> list[bytes]:
        ttl, pinning = kept
        names = [self._name(key) for key in keys]
        there = self._client.call(lambda client: client.contains_many(names), [False] * len(names))
        new = [number for number, is_there in enumerate(there) if not is_there]
        done = self._client.put([(names[number], rows[number]) for number in new], ttl)
        _pin_later(self._pool, self._client, pinning)
        stored = {number for number, is_there in zip(new, done, strict=True) if is_there}
        if self._events is not None:
            self._events.found([keys[number] for number in sorted(stored)], new=True)
            self._events.found([key for key, known in zip(keys, there, strict=True) if known], new=False)
        return [key for number, key in enumerate(keys) if there[number] or number in stored]

    def _load(self, keys: list[bytes], rows: list[memoryview]) -> list[bytes]:
        came = self._client.read(list(zip(map(self._name, keys), rows, strict=True)))
        good = [key for key, is_whole in zip(keys, came, strict=True) if is_whole]
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


def _kept(client: EngineClient, prefix: str, keys: Iterable[bytes], req_context: Any) -> Kept:
    """The request's wishes about its blocks: their time to live, and the call that pins them."""
    parameters, hints = (getattr(req_context, name, None) for name in ("kv_transfer_params", "kv_hints"))
    wanted = client.retention(parameters, hints)
    if not wanted.pins:
        return wanted.ttl, None
    last_token = getattr(req_context, "get_offload_key_position", lambda _: None)
    names = {legal_key(prefix + key.hex()): last_token(key) or math.inf for key in keys}
    return wanted.ttl, wanted.pinning(names)


def _pin_later(
    pool: ThreadPoolExecutor, client: EngineClient, pinning: Callable[[BlockingClient], None] | None
) -> None:
    """Pins take a request each: in a thread, and after what was submitted before."""
    if pinning is not None:
        with suppress(RuntimeError):  # it was shut down
            pool.submit(client.call, pinning, None)


def _touching(prefix: str, keys: list[bytes]) -> Callable[[BlockingClient], None]:
    return lambda client: client.touch([legal_key(prefix + key.hex()) for key in keys])


def _layout(spec: Any, row_bytes: int, model: str | None) -> dict[str, Any]:
    """The facts that engines must have in common to use each other's blocks, as vLLM's own tiers have them: parallel
    sizes are 1 where its blocks do not depend on them."""
    mapper = FileMapper.from_offloading_spec(
        root_dir="", offloading_spec=spec, blocks_per_file=spec.blocks_per_chunk, parallel_agnostic=True
    )
    return {
        **mapper.get_run_config(),
        "model_name": model or _model_name(spec.config.model.name),
        "rank": mapper.rank,
        "row_bytes": row_bytes,
    }


def _model_name(path: str) -> str:
    """The model's name, whatever folder it is in: a path's last part, or the name in the cache of the hub."""
    *before, last = path.rstrip("/").split("/")
    if before[-1:] == ["snapshots"] and before[-2:-1]:
        return before[-2].rpartition("--")[2]
    return last
