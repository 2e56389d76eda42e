"""vLLM's TieringOffloadingSpec on its CPU build, where the device's memory is plain memory: blocks are copied.

vLLM's own spec wants a GPU. Scheduler, connector and tiers are vLLM's own here, too.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies blocks between the engine's memory and the primary tier, at once."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._region, self._per_chunk = region, blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._device, self._host = [], []
        for each in kv_caches.tensors:
            size = each.page_size_bytes
            self._device.append(each.tensor.view(torch.int8).view(-1, size))
            self._host.append(region.create_next_worker_view(size * blocks_per_chunk))
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._move(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        return self._move(job_id, dst_spec, src_spec, is_store=False)

    def _move(self, job_id: int, device: Any, host: Any, *, is_store: bool) -> bool:
        begin, moved = time.perf_counter(), 0
        block = chunk = 0
        for group, (count, first) in enumerate(
            zip(device.group_sizes, device.block_indices, strict=True)
        ):
            if not count:
                continue
            skip = first % self._per_chunk
            for ref in self._refs[group]:
                size, pages = ref.page_size_bytes, self._device[ref.tensor_idx]
                rows = self._host[ref.tensor_idx]
                whole = rows.shape[1] // self._per_chunk
                for number in range(count):
                    at, place = divmod(number + skip, self._per_chunk)
                    row = rows[int(host.block_ids[chunk + at])]
                    piece = row[place * whole : place * whole + size]
                    page = pages[int(device.block_ids[block + number])][:size]
                    (piece if is_store else page).copy_(page if is_store else piece)
                    moved += size
            block += count
            chunk += -(-(count + skip) // self._per_chunk)
        self._done.append(TransferResult(job_id, True, moved, time.perf_counter() - begin))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        self._host.clear()
        self._device.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None


class CPUTieringSpec(TieringOffloadingSpec):
    """The tiering spec with the worker above."""

    def get_worker(self, kv_caches: Any) -> CopyingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
