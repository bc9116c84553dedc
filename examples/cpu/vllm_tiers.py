"""Two processes of vLLM on a CPU get one prompt: through vLLM's own tiers, the second reads the KV
that the first computed. `make demo-tier` runs this with the model of `make demo`.

    .venv-vllm/bin/python examples/cpu/vllm_tiers.py MODEL_DIR STORE_URL

vLLM's worker copies only between a GPU and host memory. The worker here copies blocks with NumPy;
everything else is vLLM's, and kvferry is the tier. A vLLM server can use `CpuTieringSpec`, too,
with this folder on Python's path and `spec_name` and `spec_module_path` as below. The code for
several ranks and the canonical layout is for the tests.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies at once, on the calling thread. A row of host memory holds the blocks of a chunk, one
    after another; a block holds the pages of its group's layers. The pages are this rank's or, in
    the canonical layout, pages that all ranks share, of which this rank has parts."""

    def __init__(
        self, caches: CanonicalKVCaches, rows: np.ndarray, blocks_per_chunk: int, *, canonical: bool
    ) -> None:
        self._pages = [
            [
                (caches.tensors[ref.tensor_idx].tensor.view(torch.int8).flatten(1), ref)
                for ref in refs
            ]
            for refs in caches.group_data_refs
        ]
        self._rows = rows
        self._canonical = canonical
        self._blocks_per_chunk = blocks_per_chunk
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for page, part in self._pairs(src_spec, dst_spec.chunk_ids):
            part[:] = page.numpy()
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for page, part in self._pairs(dst_spec, src_spec.chunk_ids):
            page.numpy()[:] = part
        return self._end(job_id)

    def _pairs(self, blocks: Any, chunks: Any) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        """Yield each part of a page in the engine's blocks, with its bytes in a row."""
        ids, chunks = iter(blocks.block_ids.tolist()), list(chunks)
        for group, (count, first) in enumerate(
            zip(blocks.group_sizes, blocks.block_indices, strict=True)
        ):
            start = first % self._blocks_per_chunk
            for place in range(start, start + count):
                block = next(ids)
                row = self._rows[chunks[place // self._blocks_per_chunk]]
                offset = place % self._blocks_per_chunk * sum(map(self._size, self._refs(group)))
                for tensor, ref in self._pages[group]:
                    page = row[offset : offset + self._size(ref)]
                    for local, shared, size in self._parts(ref):
                        yield tensor[block, local : local + size], page[shared : shared + size]
                    offset += self._size(ref)
            del chunks[: -(-(start + count) // self._blocks_per_chunk) if count else 0]

    def _refs(self, group: int) -> list[CanonicalKVCacheRef]:
        return [ref for _, ref in self._pages[group]]

    def _size(self, ref: CanonicalKVCacheRef) -> int:
        """Return the bytes of a page in a row: of all ranks' page, or of this rank's."""
        return ref.mapping.canonical_page_size_bytes if self._canonical else ref.page_size_bytes

    def _parts(self, ref: CanonicalKVCacheRef) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of a rank's page: offset in it, offset in the row's page, and size."""
        if not self._canonical:
            yield 0, 0, ref.page_size_bytes
            return
        for run in ref.mapping.runs:
            for index in range(run.num_fragments):
                yield (
                    run.local_offset + index * run.local_stride,
                    run.canonical_offset + index * run.canonical_stride,
                    run.fragment_size,
                )

    def _end(self, job_id: int) -> bool:
        self._done.append(TransferResult(job_id, success=True, transfer_size=1, transfer_time=1e-6))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches: CanonicalKVCaches) -> CopyingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        atexit.register(region.cleanup)  # removes the file of the region from /dev/shm
        canonical = self.config.canonical_layout
        if canonical:
            self._validate_canonical_refs(kv_caches)
        start = 0 if canonical else self.config.parallel.rank * self.cpu_page_size_per_worker
        rows = region._base.numpy().reshape(self.num_chunks, -1)[:, start:]
        return CopyingWorker(kv_caches, rows, self.blocks_per_chunk, canonical=canonical)


PROMPT = "One line of a text that is asked about again and again.\n" * 40 + "In short:"


def ask(model_dir: str, store: str) -> None:
    tier = {"type": "KVFerryTier", "module_path": "kvferry.adapters.vllm.tier", "store": store}
    offloading = {
        "spec_name": CpuTieringSpec.__name__,
        "spec_module_path": "vllm_tiers",
        "cpu_bytes_to_use": 256 << 20,
        "block_size": 128,
        "secondary_tiers": [tier],
    }
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": offloading,
    }
    llm = LLM(model_dir, enforce_eager=True, max_model_len=2048, kv_transfer_config=transfer)
    llm.generate(["Good morning."], SamplingParams(max_tokens=1), use_tqdm=False)  # a warm-up
    started = time.perf_counter()
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    [answer] = llm.generate([PROMPT], greedy, use_tqdm=False)
    seconds = time.perf_counter() - started
    print(
        f"{len(answer.prompt_token_ids)} prompt tokens, {answer.num_cached_tokens} read by the "
        f"tier, 8 tokens after {seconds:.2f} s: {answer.outputs[0].text!r}"
    )
    llm.llm_engine.engine_core.shutdown()


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1] == "--ask":
        return ask(sys.argv[2], sys.argv[3])
    if len(sys.argv) != 3 or not Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    for number in (1, 2):
        print(f"process {number} of 2: vLLM starts", file=sys.stderr, flush=True)
        again = [sys.executable, __file__, "--ask", *sys.argv[1:]]
        if subprocess.run(again, env=quiet | os.environ, check=False).returncode:
            sys.exit("vLLM failed; the first error above says why")
    return None


if __name__ == "__main__":
    main()
