"""A small host for tests of connectors, which follows vLLM's rules on KV in which errors show.

The KV of a token is a number that depends on the KV of the previous token, so an error in a block
spreads to all later tokens, the generated ones included. Freed blocks are overwritten. Where a
connector would crash vLLM's engine, an assertion here fails.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import torch

from kvferry.contract.lifecycle import StepLifecycle
from kvferry.contract.messages import LookupResult, WorkerOutput
from kvferry.types import DEFAULT_OPTIONS, NO_EXTRA_KEYS

PRIME = 2**31 - 1


def next_kv(before: int, token: int, layer: int) -> int:
    return (before * 1_000_003 + token * 31 + layer + 7) % PRIME


def true_kv(tokens, layer: int) -> list[int]:
    """Return the right KV of every token."""
    values, value = [], 1
    for token in tokens:
        value = next_kv(value, token, layer)
        values.append(value)
    return values


def true_output(prompt, num_new: int, num_layers: int = 2) -> list[int]:
    """Return the prompt and the generated tokens of a request for which nothing went wrong."""
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(true_kv(tokens, num_layers - 1)[-1] % 50)
    return tokens


class TinyRequest:
    def __init__(self, request_id: str, prompt, num_new: int) -> None:
        self.request_id = request_id
        self.all_token_ids = list(prompt)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.extra_keys = NO_EXTRA_KEYS
        self.handover = None
        self.options = DEFAULT_OPTIONS
        self.num_new = num_new
        self.block_ids: list[int] = []
        self.num_computed = 0
        self.state = "waiting"
        self.promised = 0
        self.hit_tokens = 0


class TinyHost:
    """The host. Tests `add` requests, then `run` it, or `step` it and interfere."""

    def __init__(
        self, scheduler, worker, *, block_size=4, num_blocks=40, num_layers=2, budget=11,
        observer=None, strict=False,
    ) -> None:  # fmt: skip
        self.scheduler, self.worker = scheduler, worker
        self.block_size, self.budget = block_size, budget
        self.kv = {
            f"layer.{i}": torch.full((num_blocks, block_size), -1, dtype=torch.int64)
            for i in range(num_layers)
        }
        self.free = list(range(1, num_blocks))
        self.lifecycle = StepLifecycle(worker, observer=observer, strict=strict)
        worker.register_kv_caches(self.kv)
        self.requests: dict[str, TinyRequest] = {}
        self.queue: list[TinyRequest] = []
        self.running: list[TinyRequest] = []
        self.finished_ids: set[str] = set()
        self.preempted_ids: set[str] = set()
        self.outputs: list[WorkerOutput] = []
        self.fail_forward = False

    # --- from outside

    def add(self, request_id: str, prompt, num_new: int = 2) -> TinyRequest:
        request = TinyRequest(request_id, prompt, num_new)
        self.requests[request_id] = request
        self.queue.append(request)
        self.scheduler.on_new_request(request)
        return request

    def abort(self, request: TinyRequest) -> None:
        if request.state not in ("finished", "sending", "aborted loading"):
            self._finish(request)

    def preempt(self, request: TinyRequest) -> None:
        assert request.state == "running"
        self._release(request)
        self.running.remove(request)
        request.num_computed, request.state = 0, "waiting"
        self.queue.insert(0, request)
        self.preempted_ids.add(request.request_id)

    @property
    def busy(self) -> bool:
        held = ("sending", "aborted loading")
        return bool(
            self.queue or self.running or any(r.state in held for r in self.requests.values())
        )

    def run(self, max_steps: int = 300) -> None:
        while self.busy:
            assert max_steps > 0, {r.request_id: r.state for r in self.requests.values()}
            max_steps -= 1
            self.step()

    # --- one step

    def step(self) -> WorkerOutput:
        scheduled = self._schedule()
        finished, self.finished_ids = frozenset(self.finished_ids), set()
        preempted, self.preempted_ids = self.preempted_ids, set()
        plan = self.scheduler.build_plan(
            SimpleNamespace(
                scheduled=[
                    SimpleNamespace(
                        request=r, block_ids=(r.block_ids,),
                        num_computed_tokens=r.num_computed, num_scheduled_tokens=n,
                    )
                    for r, n in scheduled
                ],
                preempted_request_ids=preempted,
                finished_request_ids=finished,
            )
        )  # fmt: skip
        plan = pickle.loads(pickle.dumps(plan))
        if scheduled:
            with self.lifecycle.step(plan, finished) as step:
                self._forward(scheduled)
            output = step.output
        else:
            output = self.lifecycle.no_forward(plan, finished)
        self.outputs.append(output)
        self._learn(output, scheduled)
        return output

    def _schedule(self) -> list[tuple[TinyRequest, int]]:
        budget, scheduled = self.budget, []
        for request in list(self.running):
            num = min(budget, len(request.all_token_ids) - request.num_computed)
            if num and self._allocate(request, request.num_computed + num):
                scheduled.append((request, num))
                budget -= num
            elif num:
                self.preempt(request)
        for request in list(self.queue):
            if budget == 0 or (self.preempted_ids and not scheduled):
                break
            num = self._admit(request, budget)
            if num:
                scheduled.append((request, num))
                budget -= num
        if not scheduled and not any(r.state in ("running", "loading") for r in self.queue):
            self._make_room()
        return scheduled

    def _make_room(self) -> None:
        """If no request runs, take the blocks of the last waiting request that holds some."""
        holders = [r for r in self.queue if r.block_ids]
        if holders and not self.running:
            holders[-1].num_computed = 0
            self._release(holders[-1])

    def _admit(self, request: TinyRequest, budget: int) -> int:
        if request.state == "loading":
            return 0
        num_external, is_async = 0, False
        if request.num_computed == 0:
            answer = self.scheduler.lookup(request, 0)
            self._check(answer, request)
            if answer.num_tokens is None:
                return 0
            num_external, is_async, _ = answer
        num_tokens = len(request.all_token_ids)
        if is_async:
            if self._allocate(request, num_external):
                self.scheduler.update_after_alloc(request, (request.block_ids,), num_external)
                request.state, request.promised = "loading", num_external
                request.hit_tokens = num_external
            return 0
        computed = request.num_computed + num_external
        num = min(budget, num_tokens - computed)
        if not self._allocate(request, computed + num):
            return 0
        self.scheduler.update_after_alloc(request, (request.block_ids,), num_external)
        request.num_computed, request.state = computed, "running"
        request.hit_tokens = max(request.hit_tokens, num_external)
        self.queue.remove(request)
        self.running.append(request)
        return num

    def _check(self, answer: LookupResult, request: TinyRequest) -> None:
        count, is_async, _ = answer
        if count is None:
            return
        num_tokens = len(request.all_token_ids)
        assert 0 <= count <= (num_tokens if is_async else num_tokens - 1), answer
        assert count % self.block_size == 0, answer
        assert count or not is_async, answer

    def _allocate(self, request: TinyRequest, num_tokens: int) -> bool:
        missing = -(-num_tokens // self.block_size) - len(request.block_ids)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            request.block_ids.append(self.free.pop(0))
        return True

    def _forward(self, scheduled) -> None:
        layers = self.lifecycle.layerwise
        for index, (name, kv) in enumerate(self.kv.items()):
            if layers is not None:
                layers.wait_for_layer_load(name)
            for request, num in scheduled:
                for pos in range(request.num_computed, request.num_computed + num):
                    before = int(kv[self._slot(request, pos - 1)]) if pos else 1
                    token = request.all_token_ids[pos]
                    kv[self._slot(request, pos)] = next_kv(before, token, index)
            if layers is not None:
                layers.save_layer(name, kv, None)
            if self.fail_forward:
                raise ZeroDivisionError

    def _slot(self, request: TinyRequest, pos: int) -> tuple[int, int]:
        return request.block_ids[pos // self.block_size], pos % self.block_size

    def _learn(self, output: WorkerOutput, scheduled) -> None:
        num_blocks = next(iter(self.kv.values())).shape[0]
        assert all(0 <= block < num_blocks for block in output.invalid_block_ids)
        lost = self._truncate(output.invalid_block_ids)
        for request, num in scheduled:
            if request not in lost and request.state == "running":
                self._advance(request, num)
        self.scheduler.update_output(output)
        assert output.failed_recving <= output.finished_recving
        for request_id in output.finished_recving:
            request = self.requests[request_id]
            assert request.state in ("loading", "aborted loading"), (request_id, request.state)
            self._arrived(request, failed=request_id in output.failed_recving)
        for request_id in output.finished_sending:
            request = self.requests[request_id]
            assert request.state == "sending", (request_id, request.state)
            self._release(request)
            request.state = "finished"

    def _truncate(self, invalid) -> set[TinyRequest]:
        """Discard each request's KV from its first invalid block on. Return the running ones."""
        lost = set()
        for request in self.requests.values():
            had = request.promised if request.state == "loading" else request.num_computed
            covered = request.block_ids[: -(-had // self.block_size)]
            bad = [i for i, block in enumerate(covered) if block in invalid]
            if bad and request.state == "loading":
                request.promised = bad[0] * self.block_size
            elif bad and request.state == "running":
                request.num_computed = bad[0] * self.block_size
                lost.add(request)
        return lost

    def _advance(self, request: TinyRequest, num: int) -> None:
        request.num_computed += num
        tokens = request.all_token_ids
        if request.num_computed < len(tokens):
            return
        last = self._slot(request, len(tokens) - 1)
        tokens.append(int(list(self.kv.values())[-1][last]) % 50)
        if len(tokens) == request.num_prompt_tokens + request.num_new:
            self._finish(request)

    def _arrived(self, request: TinyRequest, *, failed: bool) -> None:
        if request.state == "aborted loading":
            self._release(request)
            request.state = "finished"
            return
        request.state = "waiting"
        request.num_computed = (
            0 if failed else min(request.promised, len(request.all_token_ids) - 1)
        )
        if request.num_computed == 0:
            self._release(request)

    def _finish(self, request: TinyRequest) -> None:
        delay, _ = self.scheduler.request_finished(request, (list(request.block_ids),))
        self.finished_ids.add(request.request_id)
        if request in self.queue:
            self.queue.remove(request)
        if request in self.running:
            self.running.remove(request)
        if request.state == "loading":
            assert not delay, "the end of the load frees the blocks"
            request.state = "aborted loading"
        elif delay:
            request.state = "sending"
        else:
            self._release(request)
            request.state = "finished"

    def _release(self, request: TinyRequest) -> None:
        for kv in self.kv.values():
            kv[request.block_ids] = -1
        self.free.extend(request.block_ids)
        request.block_ids = []
