"""Connectors and parts of them that vLLM loads by name, to compare ours with.

`NoOpConnector` keeps nothing: the cost of having a connector at all. Every hook returns at once,
most of them in vLLM's base class.

`HostTieringSpec` is vLLM's tiered offloading where the "device" is the host itself. vLLM's own spec
refuses such hosts, because a device's copy engine makes its copies. Here tensors copy at once, and
everything else (scheduler, primary tier, file tier) is vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput


class NoOpConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Finds nothing, stores nothing."""

    _metadata = KVConnectorMetadata()
    _results = KVConnectorOutput()
    requires_kv_delivery = False

    def bind_connector_metadata(self, connector_metadata: object) -> None:
        """Bound to nothing: vLLM then leaves out the hooks around layers."""

    def clear_connector_metadata(self) -> None:
        pass

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:  # noqa: ANN401
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        pass

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: object) -> Any:  # noqa: ANN401
        return self._results

    def get_num_new_matched_tokens(self, request: object, num_computed_tokens: int) -> Any:  # noqa: ANN401
        return 0, False

    def update_state_after_alloc(self, *args: object) -> None:
        pass

    def build_connector_meta(self, scheduler_output: object) -> Any:  # noqa: ANN401
        return self._metadata

    def request_finished_all_groups(self, request: object, block_ids: object) -> Any:  # noqa: ANN401
        return False, None


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between KV blocks and the primary tier, both in host memory."""

    def __init__(self, kv_caches: Any, region: Any) -> None:  # noqa: ANN401 - vLLM's
        self._region = region
        self._refs = kv_caches.group_data_refs
        self._blocks = []
        self._chunks = []
        for cache in kv_caches.tensors:
            size = cache.page_size_bytes
            self._blocks.append(cache.tensor.view(torch.int8).view(-1, size))
            self._chunks.append(region.create_next_worker_view(size))
        self._finished: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:  # noqa: ANN401
        moved = 0
        for tensor, block, chunk in self._pairs(src_spec, dst_spec):
            self._chunks[tensor][chunk].copy_(self._blocks[tensor][block])
            moved += self._blocks[tensor].shape[1]
        return self._finish(job_id, moved)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:  # noqa: ANN401
        moved = 0
        for tensor, block, chunk in self._pairs(dst_spec, src_spec):
            self._blocks[tensor][block].copy_(self._chunks[tensor][chunk])
            moved += self._blocks[tensor].shape[1]
        return self._finish(job_id, moved)

    def _pairs(self, blocks: Any, chunks: Any) -> Iterator[tuple[int, int, int]]:  # noqa: ANN401
        """Tensor, block and chunk of each copy; a chunk is one block."""
        start = 0
        for group, count in enumerate(blocks.group_sizes):
            for block, chunk in zip(
                blocks.block_ids[start : start + count].tolist(),
                chunks.block_ids[start : start + count].tolist(),
                strict=True,
            ):
                for ref in self._refs[group]:
                    yield ref.tensor_idx, block, chunk
            start += count

    def _finish(self, job_id: int, moved: int) -> bool:
        self._finished.append(
            TransferResult(job_id=job_id, success=True, transfer_size=moved, transfer_time=1e-6)
        )
        return True

    def get_finished(self) -> list[Any]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every copy ended when it was submitted."""

    def shutdown(self) -> None:
        self._blocks.clear()
        self._chunks.clear()
        self._region.cleanup()


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering with `HostWorker`."""

    _worker: HostWorker | None

    def get_worker(self, kv_caches: Any) -> HostWorker:  # noqa: ANN401 - vLLM's
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region)
        return self._worker
