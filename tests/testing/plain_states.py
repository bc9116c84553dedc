"""`Plain` for models with recurrent layers, whose states it keeps beside the KV, and bugs of it. It
runs on vLLM alone."""

from __future__ import annotations

from itertools import pairwise

from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.v1.kv_cache_interface import MambaSpec

from tests.testing.plain import Plain


class PlainStates(Plain, SupportsHMA):
    """A state is stored under a key of its own, when vLLM says in which block it is."""

    loads_async = True

    def __init__(self, vllm_config, role, kv_cache_config=None):
        groups = kv_cache_config.kv_cache_groups
        found = [i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, MambaSpec)]
        self.states = found[0] if found else None  # the kit also starts models without states
        self.group = 1 if self.states == 0 else 0
        self.recurrent = {name for i in found for name in groups[i].layer_names}
        super().__init__(vllm_config, role, kv_cache_config)

    def state_key(self, key: str) -> str:
        """The key of the state behind a block."""
        return key[:-1] + "s"

    def tensors(self, key):
        return [kv for name, kv in self.kv.items() if (name in self.recurrent) == (key[-1] == "s")]

    # --- look-ups and loads ---

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self.states is None:
            return count, is_async
        stop, keys = num_computed_tokens + count, self.keys(request, request.num_tokens)
        while stop > num_computed_tokens:
            if self.state_key(keys[stop // self.size - 1]) in self.stored:
                return stop - num_computed_tokens, self.loads_async
            stop -= self.size
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens and self.states is not None:
            end = (self.known[request.request_id].local + num_external_tokens) // self.size
            key = self.state_key(self.keys(request, request.num_tokens)[end - 1])
            table = blocks.get_block_ids()[self.states]
            self.loads[request.request_id] += [(block, key) for block in self.filled(table, end)]

    def filled(self, table: list[int], end: int) -> list[int]:
        """The blocks that a state is loaded to which stands behind `end` blocks."""
        return table[end - 1 : end]

    # --- saves ---

    def save(self, name, computed, step, moves):
        super().save(name, computed, step, moves)
        if self.states is None:
            return
        known, stop = self.known[name], computed + step.num_scheduled_tokens[name]
        keys = self.keys(known.request, min(stop, known.request.num_tokens))
        for num_tokens, block in self.offered(name, stop, step):
            at = num_tokens // self.size - 1
            if num_tokens % self.size == 0 and at < len(keys):
                moves.saves.append((block, self.state_key(keys[at])))

    def offered(self, name: str, stop: int, step) -> list[tuple[int, int]]:
        """States of a request that stand in blocks after a step, each by its tokens."""
        state = step.kv_connector_block_state
        offers = [(n, block) for group, block, n in state.boundary_state_offloads.get(name, ())]
        table = state.get_block_ids(name)[self.states]
        return [*offers, (stop, table[-(-stop // self.size) - 1])]

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, ())


class LoadsStatesWithinTheStep(PlainStates):
    """Vllm#43935: the runner has copied the state on before the load fills its block."""

    loads_async = False


class FillsTheLastBlockToo(LoadsStatesWithinTheStep):
    """Right until blocks are short."""

    def filled(self, table, end):
        return sorted({table[end - 1], table[-1]})


class FillsTheLastBlockAlone(LoadsStatesWithinTheStep):
    def filled(self, table, end):
        return table[-1:]


class SavesStatesByPosition(PlainStates):
    """It keeps a table of its own, where a block stays that vLLM has given to others."""

    def offered(self, name, stop, step):
        table = vars(self.known[name]).setdefault("state_table", [])
        new = [new.block_ids for new in step.scheduled_new_reqs if new.req_id == name]
        cached = step.scheduled_cached_reqs
        added = [cached.new_block_ids[i] for i, n in enumerate(cached.req_ids) if n == name]
        for blocks in (*new, *added):
            table += blocks[self.states] if blocks else ()
        ends = range(self.size, stop + 1, self.size)
        return [(end, table[end // self.size - 1]) for end in ends if table[end // self.size - 1]]


class SavesOffersAStepLate(PlainStates):
    def offered(self, name, stop, step):
        late = vars(self.known[name])
        found, late["offers"] = late.get("offers", []), super().offered(name, stop, step)
        return found


class LoadsStatesOfABlockMore(PlainStates):
    """The state of n tokens beside the KV of another number."""

    def state_key(self, key):
        return self.later.get(key, key)[:-1] + "s"

    def keys(self, request, count):
        keys = super().keys(request, count)
        self.later = {**getattr(self, "later", {}), **dict(pairwise(keys))}
        return keys
