"""A V1 connector as a newcomer writes it: one file for each block, in as few lines as do it right.
Bugs of public connectors are made in subclasses (`seeded`)."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import torch

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
    )
except ImportError:
    from kvferry.v1 import KVConnectorBase_V1, KVConnectorMetadata

CHECKSUM = 16


@dataclass
class Moves(KVConnectorMetadata):
    """What a step loads and saves: block ids and keys, by request."""

    loads: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    saves: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class Known:
    """A request as the scheduler half knows it."""

    request: object
    table: list[int] = field(default_factory=list)
    local: int = 0


class Plain(KVConnectorBase_V1):
    """See the module. `loads_async`: loads span steps."""

    loads_async = False
    group = 0  # of the block table

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.directory = Path(self._kv_transfer_config.kv_connector_extra_config["path"])
        self.size = vllm_config.cache_config.block_size
        self.known: dict[str, Known] = {}
        self.loads: dict[str, list[tuple[int, str]]] = {}  # of the next step
        self.plans: deque[list] = deque(maxlen=3)  # what the last steps moved
        self.kv: dict = {}
        self.bad_blocks: set[int] = set()
        self.running: dict[str, list[tuple[int, str]]] = {}  # async loads
        self.failed: set[str] = set()  # requests with a load that failed
        self.root = self.identity(vllm_config).hex()[:24]
        self.rank = vllm_config.parallel_config.rank
        self.stored = {path.name[:32] for path in self.directory.glob(f"*-{self.root}-0")}

    # --- keys ---

    def identity(self, config) -> bytes:
        model, parallel = config.model_config, config.parallel_config
        said = blake2b(repr((str(model.dtype), self.size, parallel.world_size)).encode())
        for path in sorted(Path(model.model).iterdir()):
            said.update(path.read_bytes())
        return said.digest()

    def keys(self, request, count: int) -> list[str]:
        """The keys of the first whole blocks of a request."""
        keys, tokens = [], list(request.all_token_ids)
        before = repr((self.seed(request),)).encode()
        for start in range(0, count // self.size * self.size, self.size):
            before = self.key(before, start, tokens[start : start + self.size])
            keys.append(before.hex())
        return keys

    def seed(self, request):
        return request.cache_salt

    def key(self, before: bytes, start: int, tokens: list[int]) -> bytes:
        return blake2b(before + repr(tokens).encode(), digest_size=16).digest()

    # --- scheduler ---

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.request_id in self.failed:
            return 0, False
        count, local = 0, num_computed_tokens // self.size
        for key in self.keys(request, request.num_tokens - 1)[local:]:
            if key not in self.stored:
                break
            count += self.size
        self.known.setdefault(request.request_id, Known(request)).local = num_computed_tokens
        return count, self.loads_async and count > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        known = self.known.setdefault(request.request_id, Known(request))
        if num_external_tokens:
            first, last = self.range(known.local, num_external_tokens)
            table = blocks.get_block_ids()[self.group]
            keys = self.keys(request, request.num_tokens)
            pairs = zip(table[first:last], keys[first:last], strict=True)
            self.loads[request.request_id] = list(pairs)

    def range(self, local: int, count: int) -> tuple[int, int]:
        return local // self.size, (local + count) // self.size

    def build_connector_meta(self, scheduler_output):
        moves = Moves(loads=self.loads)
        self.loads = {}
        for new in scheduler_output.scheduled_new_reqs:
            self.known[new.req_id].table = list(new.block_ids[self.group])
            self.save(new.req_id, new.num_computed_tokens, scheduler_output, moves)
        cached = scheduler_output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            added = cached.new_block_ids[i]
            more = list(added[self.group] if added else ())
            self.grow(self.known[name], name in cached.resumed_req_ids, more)
            self.save(name, cached.num_computed_tokens[i], scheduler_output, moves)
        # A plan of two steps ago has been carried out.
        if len(self.plans) > 1:
            self.stored.update(key for _, key in self.plans[-2].saves)
        self.plans.append(moves)
        return moves

    def grow(self, known: Known, is_resumed: bool, blocks: list[int]) -> None:
        known.table = blocks if is_resumed else known.table + blocks

    def save(self, name: str, computed: int, step, moves: Moves) -> None:
        known, count = self.known[name], computed + step.num_scheduled_tokens[name]
        count = min(count, known.request.num_tokens)
        for block, key in zip(known.table, self.keys(known.request, count), strict=False):
            if key not in self.stored:
                moves.saves.append((block, key))

    def update_connector_output(self, connector_output):
        bad = connector_output.invalid_block_ids
        for moves in self.plans if bad else ():
            for name, pairs in moves.loads.items():
                if bad & {block for block, _ in pairs}:
                    self.failed.add(name)
                    self.stored -= {key for _, key in pairs}

    def request_finished(self, request, block_ids):
        self.known.pop(request.request_id, None)
        self.failed.discard(request.request_id)
        return False, None

    # --- worker ---

    def register_kv_caches(self, kv_caches):
        self.kv = kv_caches

    def start_load_kv(self, forward_context, **kwargs):
        loads = self._get_connector_metadata().loads
        if self.loads_async:
            self.running.update(loads)
            return
        for pairs in loads.values():
            self.load(pairs)

    def load(self, pairs) -> None:
        for block, key in pairs:
            if not self.read(block, key):
                self.bad_blocks.add(block)

    def tensors(self, key: str) -> list[torch.Tensor]:
        """Of the layers that are stored under a key."""
        return list(self.kv.values())

    def path(self, key: str) -> Path:
        return self.directory / f"{key}-{self.root}-{self.rank}"

    def read(self, block: int, key: str) -> bool:
        try:
            stored = self.path(key).read_bytes()
        except OSError:
            return False
        checksum, content = stored[:CHECKSUM], stored[CHECKSUM:]
        size = sum(kv[block].nbytes for kv in self.tensors(key))
        if len(content) != size or blake2b(content, digest_size=CHECKSUM).digest() != checksum:
            return False
        for kv in self.tensors(key):
            part, content = content[: kv[block].nbytes], content[kv[block].nbytes :]
            values = torch.frombuffer(bytearray(part), dtype=kv.dtype)
            kv[block] = values.view(kv[block].shape)
        return True

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        for block, key in self._get_connector_metadata().saves:
            self.write(block, key)

    def write(self, block: int, key: str) -> None:
        parts = [
            kv[block].contiguous().view(torch.uint8).numpy().tobytes() for kv in self.tensors(key)
        ]
        content = b"".join(parts)
        with suppress(OSError):
            handle, name = tempfile.mkstemp(prefix="tmp-", dir=self.directory)
            with os.fdopen(handle, "wb") as file:
                file.write(blake2b(content, digest_size=CHECKSUM).digest() + content)
            Path(name).rename(self.path(key))

    def get_finished(self, finished_req_ids):
        ended, self.running = self.running, {}
        for pairs in ended.values():
            self.load(pairs)
        return None, set(ended) or None

    def get_block_ids_with_load_errors(self):
        bad, self.bad_blocks = self.bad_blocks, set()
        return bad

    def reset_cache(self):
        return False
