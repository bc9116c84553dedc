"""An engine without a model that drives a connector as one release of vLLM does.

A snapshot of the release (`released`) says what differs between releases: which hooks the engine
calls, with which arguments, and the fields of a step. The KV of a token is a function of all tokens
up to it, so checks notice a byte that is stale, misplaced or of another request.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from kvferry.adapters.vllm.metrics import NOW
from kvferry.testing.stores.hooks import wait_until

from .released import Release
from .versioned_config import at_rank, make_kv_cache_config, of_stage, uniform
from .versioned_kv import (
    BLOCK,
    HEAD_SIZE,
    LayerKV,
    Running,
    expected_kv,
    layer_names,
    make_layer,
    shapes_of,
)
from .versioned_stages import ranks_of, start_ranks


class VersionedHost:
    """The engine of one release around one connector class.

    Args:
        release: the release to imitate.
        connector_class: a class built on the release's base class.
        vllm_config: a configuration from `make_config`.
        backend: the attention backend, one of `BACKENDS`.
        in_multi: whether to hand over counters and messages as `MultiConnector` does. Another child
            has the handshake then.
        is_uniform: whether the layers differ, in one group. As in vLLM, the scheduler's half then
            gets the spec of the first layer for all.
        resumes_as_new: whether to show resumed requests as new, as the second model runner does.
        saves_last: whether to ask for a step's report before `wait_for_save`, as with speculative
            decoding.
    """

    def __init__(
        self,
        release: Release,
        connector_class: type[Any],
        vllm_config: Any,
        *,
        backend: str = "FlashAttentionBackend",
        in_multi: bool = False,
        is_uniform: bool = False,
        resumes_as_new: bool = False,
        saves_last: bool = False,
        num_blocks: int = 64,
    ) -> None:
        self.release = release
        tp_size = vllm_config.parallel_config.tensor_parallel_size
        self._num_stages = vllm_config.parallel_config.pipeline_parallel_size
        self._resumes_as_new = resumes_as_new
        self._saves_last = saves_last
        self._salvaged: list[Any] = []
        self._in_multi = in_multi
        role = release.types["KVConnectorRole"]
        axes = shapes_of(release)[backend]
        vllm_config.compilation_config = SimpleNamespace(
            static_forward_context=dict.fromkeys(layer_names(), make_layer(backend, axes))
        )
        groups = make_kv_cache_config(release, num_blocks, tp_size)
        stages = [of_stage(groups, stage, self._num_stages) for stage in range(self._num_stages)]
        more = release.construction(stages[0])[-1]
        self.scheduler = connector_class(vllm_config, role.SCHEDULER, *more)
        if is_uniform:
            stages = [uniform(groups)]
        self.held = ranks_of(
            self._num_stages, tp_size, lambda heads: LayerKV(axes, backend, num_blocks, heads)
        )
        starts = []
        for rank in range(len(self.held)):
            more = release.construction(stages[rank // tp_size])[-1]
            starts.append(partial(connector_class, at_rank(vllm_config, rank), role.WORKER, *more))
        self.workers = start_ranks(connector_class, self._num_stages, starts)
        for worker, held in zip(self.workers, self.held, strict=True):
            worker.register_kv_caches(held.tensors())
            if release.has("set_host_xfer_buffer_ops"):
                worker.set_host_xfer_buffer_ops(None)
        if not in_multi:
            self._shake_hands()
        self._free = list(range(num_blocks - 1, 0, -1))
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self.counters: dict[str, float] = {}
        self.hooks_skipped_at_rest = not release.has("get_transfer_results")

    def _shake_hands(self) -> None:
        """Bring what the workers say to the scheduler's half, before the first request."""
        tp_size = len(self.workers) // self._num_stages
        said = {
            divmod(rank, tp_size): pickle.loads(pickle.dumps(worker.get_handshake_metadata()))
            for rank, worker in enumerate(self.workers)
        }
        if self.release.has("set_xfer_handshake_metadata_pp_aware"):
            self.scheduler.set_xfer_handshake_metadata_pp_aware(said)
        else:
            self.scheduler.set_xfer_handshake_metadata(
                {rank: metadata for (_, rank), metadata in said.items()}
            )

    @staticmethod
    def groups_of(release: Release) -> Any:
        return make_kv_cache_config(release, 64, 1)

    # -- requests -------------------------------------------------------------------------------

    def run(
        self, request_id: str, tokens: Sequence[int], *, budget: int = 10**9, generate: int = 0
    ) -> Running:
        """Prefill, check every byte, generate, finish."""
        request = self.add(request_id, tokens)
        self.admit(request)
        self.prefill(request, budget)
        for number in range(generate):
            self.append(request, 1000 + number)
            self.prefill(request, 1)
        self.finish(request)
        return request

    def add(
        self, request_id: str, tokens: Sequence[int], params: dict[str, Any] | None = None
    ) -> Running:
        view = self.release.record(
            "Request",
            request_id=request_id,
            prompt_token_ids=list(tokens),
            all_token_ids=list(tokens),
            num_prompt_tokens=len(tokens),
            num_tokens=len(tokens),
            num_computed_tokens=0,
            num_preemptions=0,
            prompt_embeds=None,
            cache_salt=None,
            lora_request=None,
            mm_features=[],
            mm_hashes=[],
            mm_positions=[],
            kv_transfer_params=params,
            skip_reading_prefix_cache=False,
            block_hashes=[],
        )
        if self.release.has("on_new_request"):
            self.scheduler.on_new_request(view)
        return Running(view, list(tokens), len(tokens))

    def append(self, request: Running, token: int) -> None:
        request.tokens.append(token)
        request.view.all_token_ids.append(token)
        request.view.num_tokens = len(request.tokens)

    def admit(
        self, request: Running, timeout: float = 20.0, *, limit: int = 10**9, steps_before: int = 0
    ) -> int:
        """Ask until there is an answer, allocate, notify the connector. Return the hit.

        Args:
            timeout: seconds after which asking ends.
            limit: most tokens of the hit that the host takes.
            steps_before: number of steps between the answer and the allocation.
        """

        def ask() -> int | None:
            hit, is_async = self.scheduler.get_num_new_matched_tokens(request.view, 0)
            assert is_async is False
            return hit

        def is_answered() -> bool:
            nonlocal hit
            self.step([])
            hit = ask()
            return hit is not None

        hit = ask()
        if hit is None:
            wait_until(is_answered, "an answer that is not to ask again", timeout)
        assert hit is not None
        assert 0 <= hit < len(request.tokens)
        assert hit % BLOCK == 0
        for _ in range(steps_before):
            self.step([])
        hit = min(hit, limit)
        request.hit = request.num_computed = hit
        self._grow(request, len(request.tokens))
        blocks = SimpleNamespace(get_block_ids=lambda: (list(request.blocks),))
        self.scheduler.update_state_after_alloc(request.view, blocks, hit)
        return int(hit)

    def prefill(self, request: Running, budget: int = 10**9) -> None:
        """Compute every known token, then check all KV."""
        while request.num_computed < len(request.tokens):
            self.step([(request, min(budget, len(request.tokens) - request.num_computed))])
        assert self.wrong_tokens(request) == 0

    def preempt(self, request: Running) -> None:
        """Release a request's blocks at once; the next step names it as preempted."""
        self._release_blocks(request)
        request.num_computed = 0
        request.resumed = True
        self._preempted.add(request.request_id)

    def finish(self, request: Running) -> None:
        call = "request_finished"
        argument: Any = list(request.blocks)
        if self.release.facts["supports_hma"]:
            call, argument = "request_finished_all_groups", (argument,)
        delay, params = getattr(self.scheduler, call)(request.view, argument)
        assert delay is False
        assert params is None
        self._finished.add(request.request_id)
        self._release_blocks(request)

    def settle(self, timeout: float = 30.0) -> None:
        """Step as an idle engine: once for what finished, then only while the connector asks."""
        self.step([])
        if not self.release.has("has_pending_push_work"):
            return

        def has_ended() -> bool:
            if self.scheduler.has_pending_push_work():
                self.step([])
            return not self.scheduler.has_pending_push_work()

        wait_until(has_ended, "the connector asks for no more steps", timeout)

    def rest_until_saved(self, timeout: float = 30.0) -> None:
        """Step as an engine with other work does, until no slot of memory is in use, and all that
        ended is counted."""

        def is_at_rest() -> bool:
            self.step([])
            in_use = self.scheduler._observer.gauges().get("pool_slots/in_use")
            return not in_use and not self.scheduler.has_pending_push_work()

        wait_until(is_at_rest, "no slot is in use", timeout)
        self.step([])  # threads' counts travel with the next step

    def sleep(self) -> None:
        """Reset the connector and take the KV memory away, between requests. Memory is unregistered
        twice, as after a discard."""
        assert self.scheduler.reset_cache() is not False
        for worker, held in zip(self.workers, self.held, strict=True):
            for _ in range(2 if self.release.has("unregister_kv_caches") else 0):
                worker.unregister_kv_caches()
            for kv in held.layers.values():
                kv.tensor.fill_(float("nan"))

    def wake(self) -> None:
        if self.release.has("restore_kv_caches"):
            for worker in (*self.workers, *self.workers):
                worker.restore_kv_caches()
        if self.release.has("set_xfer_handshake_metadata_pp_aware"):
            self.scheduler.set_xfer_handshake_metadata_pp_aware({})

    def shutdown(self) -> None:
        for connector in (*self.workers, self.scheduler):
            connector.shutdown()

    # -- one step -------------------------------------------------------------------------------

    def step(self, scheduled: Sequence[tuple[Running, int]], *, fails: bool = False) -> None:
        """Run a step: schedule it, run the workers, update the scheduler. If the step `fails` after
        the workers' reports, these reports join those of the next step."""
        output = self._scheduler_output(scheduled)
        metadata = self.scheduler.build_connector_meta(output)
        assert isinstance(metadata, self.release.types["KVConnectorMetadata"])
        sync_loads = any(request.num_computed and not request.shown for request, _ in scheduled)
        wire = pickle.dumps((metadata, output.finished_req_ids))
        preempted, self._preempted = self._preempted, set()
        reports = [
            self._work(rank, wire, scheduled, preempted, sync_loads)
            for rank in range(len(self.workers))
        ]
        for request, num_tokens in scheduled:
            request.num_computed += num_tokens
            request.view.num_computed_tokens = request.num_computed
            request.shown, request.resumed = True, False
        self._finished = set()
        self._salvaged += reports
        if not fails:
            reports, self._salvaged = self._salvaged, []
            self._update(self._fold(reports))

    def _work(
        self,
        rank: int,
        wire: bytes,
        scheduled: Sequence[tuple[Running, int]],
        preempted: set[str],
        sync_loads: bool,
    ) -> Any:
        """Run one worker's part of a step; return its `KVConnectorOutput`."""
        release, worker = self.release, self.workers[rank]
        metadata, finished = pickle.loads(wire)
        if release.has("handle_preemptions"):
            if "kv_connector_metadata" in release.methods["handle_preemptions"]["signature"]:
                worker.handle_preemptions(metadata)
            elif preempted:
                worker.handle_preemptions(preempted)
        worker.bind_connector_metadata(metadata)
        has_layer_hooks = not release.has("has_connector_metadata") or (
            worker.has_connector_metadata()
        )
        context = SimpleNamespace(attn_metadata=None, no_compile_layers={}, virtual_engine=0)
        loads_late = release.has("get_transfer_results") and not sync_loads
        if not loads_late:
            worker.start_load_kv(context)
        for number, kv in self.held[rank].layers.items() if scheduled else ():
            name = layer_names()[number]
            if has_layer_hooks:
                worker.wait_for_layer_load(name)
            for request, num_tokens in scheduled:
                self._compute(rank, number, request, num_tokens)
            if has_layer_hooks:
                worker.save_kv_layer(name, kv.tensor, None)
        if loads_late:
            worker.start_load_kv(context)
        saves = bool(scheduled) or not self.hooks_skipped_at_rest
        return self._report(worker, finished, saves=saves)

    def _report(self, worker: Any, finished: set[str], *, saves: bool) -> Any:
        release = self.release
        if saves and not self._saves_last:
            worker.wait_for_save()
        if release.has("get_transfer_results"):
            results = worker.get_transfer_results(finished)
            values = {name: getattr(results, name) for name in _RESULTS}
        else:
            sending, recving = worker.get_finished(finished)
            values = {"finished_sending": sending, "finished_recving": recving}
        for field_name, getter in (
            ("invalid_block_ids", "get_block_ids_with_load_errors"),
            ("kv_connector_stats", "get_kv_connector_stats"),
            ("kv_cache_events", "get_kv_connector_kv_cache_events"),
            ("kv_connector_worker_meta", "build_connector_worker_meta"),
        ):
            if release.has(getter):
                values[field_name] = getattr(worker, getter)()
        if saves and self._saves_last:
            worker.wait_for_save()
        worker.clear_connector_metadata()
        if release.has("has_connector_metadata"):
            assert not worker.has_connector_metadata()
        return pickle.loads(pickle.dumps(release.make("KVConnectorOutput", **values)))

    def _compute(self, rank: int, layer: int, request: Running, num_tokens: int) -> None:
        seeds, heads = request.seeds(), self.held[rank].heads
        for token in range(request.num_computed, request.num_computed + num_tokens):
            keys, values = self._slot(rank, layer, request, token)
            kv = expected_kv(layer, heads, seeds[token])
            keys.copy_(kv[:, :HEAD_SIZE])
            values.copy_(kv[:, HEAD_SIZE:])

    def _slot(self, rank: int, layer: int, request: Running, token: int) -> Any:
        kv = self.held[rank].layers[layer]
        return kv.token(request.blocks[token // BLOCK], token % BLOCK)

    def wrong_tokens(self, request: Running) -> int:
        """Count the token slots, over layers and ranks, that hold anything but the right KV."""
        seeds = request.seeds()
        wrong = 0
        for rank, held in enumerate(self.held):
            for layer in held.layers:
                for token in range(request.num_computed):
                    found = torch.cat(self._slot(rank, layer, request, token), dim=-1)
                    wrong += not torch.equal(found, expected_kv(layer, held.heads, seeds[token]))
        return wrong

    # -- the scheduler's side of a step ---------------------------------------------------------

    def _scheduler_output(self, scheduled: Sequence[tuple[Running, int]]) -> Any:
        new, continuing = [], []
        for request, num_tokens in scheduled:
            is_new = not request.shown or (request.resumed and self._resumes_as_new)
            (new if is_new else continuing).append((request, num_tokens))
        release = self.release
        return release.record(
            "SchedulerOutput",
            scheduled_new_reqs=[self._new(request) for request, _ in new],
            scheduled_cached_reqs=self._cached([request for request, _ in continuing]),
            num_scheduled_tokens={request.request_id: n for request, n in scheduled},
            total_num_scheduled_tokens=sum(n for _, n in scheduled),
            finished_req_ids=set(self._finished),
            preempted_req_ids=set(self._preempted) or None,
            has_sync_kv_loads=False,
            kv_connector_metadata=None,
        )

    def _new(self, request: Running) -> Any:
        return self.release.record(
            "NewRequestData",
            req_id=request.request_id,
            prompt_token_ids=request.tokens[: request.num_prompt],
            prefill_token_ids=request.tokens,
            block_ids=(list(request.blocks),),
            num_computed_tokens=request.num_computed,
            lora_request=None,
            prompt_embeds=None,
            mm_features=[],
            mm_hashes=[],
            mm_positions=[],
        )

    def _cached(self, requests: Sequence[Running]) -> Any:
        resumed = [request.resumed for request in requests]
        return self.release.record(
            "CachedRequestData",
            req_ids=[request.request_id for request in requests],
            resumed_from_preemption=resumed,
            resumed_req_ids={r.request_id for r in requests if r.resumed},
            new_token_ids=[],
            new_block_ids=[(list(r.blocks),) if r.resumed else self._added(r) for r in requests],
            num_computed_tokens=[request.num_computed for request in requests],
            num_output_tokens=[len(r.tokens) - r.num_prompt for r in requests],
            all_token_ids={},
        )

    def _added(self, request: Running) -> tuple[list[int], ...] | None:
        """Give a request the blocks that it still needs; return them, or None if it needs none."""
        before = len(request.blocks)
        self._grow(request, len(request.tokens))
        return (request.blocks[before:],) if len(request.blocks) > before else None

    def _fold(self, reports: Sequence[Any]) -> Any:
        first = reports[0]
        fields = self.release.fields("KVConnectorOutput")
        for other in reports[1:]:
            for name in ("kv_connector_stats", "kv_connector_worker_meta"):
                if name not in fields or getattr(other, name) is None:
                    continue
                mine, theirs = getattr(first, name), getattr(other, name)
                setattr(first, name, theirs if mine is None else mine.aggregate(theirs))
            if "invalid_block_ids" in fields:
                first.invalid_block_ids |= other.invalid_block_ids
        assert not first.finished_sending
        assert not first.finished_recving
        return first

    def _update(self, output: Any) -> None:
        stats = output.kv_connector_stats
        own = None
        # Before there were messages from workers, the host asked the scheduler for counters only if
        # workers had some.
        if self.release.has("get_kv_connector_stats") and (
            stats is not None or self.release.has("build_connector_worker_meta")
        ):
            own = self.scheduler.get_kv_connector_stats()
        if own is not None:
            stats = own if stats is None else stats.aggregate(own)
        if self._in_multi and output.kv_connector_stats is not None:
            name = type(self.scheduler).__name__
            wrapper = type(output.kv_connector_stats).__mro__[-2]  # the host's
            output.kv_connector_stats = wrapper(data={name: output.kv_connector_stats})
        self.scheduler.update_connector_output(output)
        assert list(self.scheduler.take_events() or ()) == []
        if stats is not None:
            # Within one process `MultiConnector` reads the counters as if they came from another.
            assert stats["data"] is stats.data
            json.dumps(stats.data)  # they go on to another process as plain values
            counted = {name: n for name, n in stats.data.items() if name != NOW}
            for name, amount in counted.items():
                self.counters[name] = self.counters.get(name, 0) + amount

    def _grow(self, request: Running, num_tokens: int) -> None:
        while len(request.blocks) * BLOCK < num_tokens:
            request.blocks.append(self._free.pop())

    def _release_blocks(self, request: Running) -> None:
        """Free a request's blocks and overwrite them, so that later reads and writes show."""
        for held in self.held:
            for kv in held.layers.values():
                kv.keys[request.blocks] = float("nan")
                kv.values[request.blocks] = float("nan")
        self._free.extend(request.blocks)
        request.blocks = []


_RESULTS = ("finished_sending", "finished_recving", "failed_recving")
