"""vLLM's second model runner, the default on GPUs, as far as it runs on a CPU: its own code for
connectors (`ActiveKVConnector`) with vLLM's own scheduler and our two halves, in every order of a
step. The model is left out: a forward writes KV that depends on all tokens before, and checks the
KV of these, as attention would read it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.host import HostRequest
from kvferry.testing.stores.hooks import wait_until
from tests.host_tables import kv_values
from tests.real_vllm.host import RELEASE
from tests.real_vllm.test_lifecycles import BLOCK, Engine, MakeKind, make_kind, model, utils
from tests.simulated_host import prefix_seeds

__all__ = ["make_kind", "model", "utils"]

pytestmark = [
    pytest.mark.skipif(RELEASE != (0, 32), reason="vLLM's tests are those of 0.32"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
]

ORDERS = tuple(
    "-".join(parts)
    for parts in itertools.product(
        ("graph", "eager"),  # the connector is called outside of the forward's context, or inside
        ("", "dummy"),  # a run of nothing before the step, as for data-parallel ranks
        ("", "drafter"),  # another forward between the model's and the end of the step
    )
)
GARBAGE = 9.0


def kv_of(tokens: list[int]) -> torch.Tensor:
    """The KV of each token, `[tokens, 2]`, exact in float32."""
    seeds = prefix_seeds(HostRequest("", tokens, len(tokens)))
    return kv_values(seeds, 0, range(1), 2).float().view(-1, 2)


class Runner(Engine):
    """`GPUModelRunner` of vLLM's `v1/worker/gpu`, without a model."""

    is_late = False
    """A mutant: loads start after the forward."""

    def __init__(
        self, utils: Any, num_blocks: int, patch: pytest.MonkeyPatch, **config: Any
    ) -> None:
        super().__init__(utils, "kv_both", num_blocks, **config)
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector, get_kv_connector

        patch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.worker)
        self.config = self.worker._host_config
        caches = dict(self.worker._kv_caches)
        [self.kv] = caches.values()
        self.kv.fill_(GARBAGE)
        self.active = get_kv_connector(self.config, caches)
        assert isinstance(self.active, ActiveKVConnector)
        self.order = ORDERS[0]
        self.wrong = self.num_empty = 0

    def step(self, *ending: Any) -> Any:
        """One step of the engine's core in the order that is set."""
        if "dummy" in self.order:
            self._dummy_run()
        output = self.scheduler.schedule()
        requests = [self.scheduler.requests[name] for name in output.num_scheduled_tokens]
        if not output.total_num_scheduled_tokens:
            self.num_empty += 1
            made = self.active.no_forward(output)
            self._count(made.kv_connector_output)
        else:
            made = self.utils.create_model_runner_output(requests)
            made.kv_connector_output = self._execute(output)
        for request in ending:
            index = made.req_id_to_index[request.request_id]
            made.sampled_token_ids[index] = [self.utils.EOS_TOKEN_ID]
        return self.scheduler.update_from_output(output, made)

    def _execute(self, output: Any) -> Any:
        from vllm.forward_context import set_forward_context

        given = replace(output, has_sync_kv_loads=False) if self.is_late else output
        names = list(output.num_scheduled_tokens)
        batch = SimpleNamespace(
            idx_mapping=torch.arange(len(names)),
            req_ids=names,
            num_tokens=output.total_num_scheduled_tokens,
        )
        is_graph = "graph" in self.order
        with nullcontext() if is_graph else set_forward_context(None, self.config):
            self.active.pre_forward(given, batch, attn_metadata={} if is_graph else None)
            self._forward(output)
        self.active.finish_forward()
        if "drafter" in self.order:  # it uses layers of its own
            self.kv[0].fill_(GARBAGE)
        found = self.active.post_forward(output.finished_req_ids)
        self._count(found)
        return found

    def _count(self, found: Any) -> None:
        stats = None if found is None else found.kv_connector_stats
        self.loaded += 0 if stats is None else stats.data.get("loaded_tokens", 0)

    def _forward(self, output: Any) -> None:
        computed = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for name, count in output.num_scheduled_tokens.items():
            start, tokens = computed[name], list(self.scheduler.requests[name].all_token_ids)
            [ids] = self.scheduler.kv_cache_manager.get_block_ids(name)
            places = torch.arange(start + count)
            at = torch.tensor(ids)[places // BLOCK], 0, places % BLOCK
            values = kv_of(tokens[: start + count])
            self.wrong += int((self.kv[at][:start] != values[:start]).any(1).sum())
            self.kv[at[0][start:], 0, at[2][start:]] = values[start:]

    def _dummy_run(self) -> None:
        """Nothing of it reaches the connector, whose metadata it lacks."""
        from vllm.v1.core.sched.output import SchedulerOutput

        empty = SchedulerOutput.make_empty()
        self.active.set_disabled(True)
        self.active.pre_forward(empty)
        self.active.finish_forward()
        assert self.active.post_forward(set()) is None
        self.active.no_forward(empty)
        self.active.set_disabled(False)

    def run(self, *requests: Any) -> int:
        """Let requests say three tokens and end. Return how many tokens were loaded meanwhile."""
        before = self.loaded

        def have_said() -> bool:
            return all(request.num_output_tokens >= 3 for request in requests)

        self.until(have_said, "three tokens of each")
        self.end(*requests)
        return self.loaded - before


MakeRunner = Callable[..., Runner]


@pytest.fixture
def make(make_kind: MakeKind, monkeypatch: pytest.MonkeyPatch) -> MakeRunner:
    def make(num_blocks: int = 100, kind: type[Runner] = Runner) -> Runner:
        runner: Runner = make_kind(kind, num_blocks, monkeypatch)
        return runner

    return make


LENGTHS = (40, 100, 17)


def stored_by(make: MakeRunner, order: str) -> None:
    writer = make()
    writer.order = order
    assert writer.run(*added(writer)) == 0
    assert writer.wrong == 0
    store = writer.scheduler.connector._cache.store
    wait_until(lambda: store.stat().num_records >= 9, "9 chunks are stored", 60.0)


def added(runner: Runner) -> list[Any]:
    return [runner.add(number, length) for number, length in enumerate(LENGTHS, 1)]


def read_by(make: MakeRunner, order: str, kind: type[Runner] = Runner) -> Runner:
    """A hit that comes late is cut short, as on a busy machine: ask until all is loaded."""
    reader = make(kind=kind)
    reader.order = order

    def are_loaded() -> bool:
        found = reader.run(*added(reader))
        assert reader.scheduler.reset_prefix_cache()
        reader.kv.fill_(GARBAGE)
        return found == 32 + 96 + 16

    wait_until(are_loaded, "all whole chunks are loaded", 120.0)
    return reader


@pytest.mark.parametrize("order", ORDERS)
def test_in_every_order_a_hit_is_there_before_the_forward_reads_it(
    make: MakeRunner, order: str
) -> None:
    stored_by(make, order)
    reader = read_by(make, order)
    assert reader.wrong == 0
    assert reader.num_empty, "no step without tokens: nothing was waited for"


@pytest.mark.parametrize("seed", range(5))
def test_orders_in_turn_with_preemptions_and_aborts(make: MakeRunner, seed: int) -> None:
    from vllm.v1.request import RequestStatus

    stored_by(make, ORDERS[0])
    source, runner = random.Random(seed), make(num_blocks=12)
    alive: dict[int, Any] = {}

    def step() -> None:
        runner.order = source.choice(ORDERS)
        asked = source.randrange(1, 4)
        if asked not in alive:
            alive[asked] = runner.add(asked, LENGTHS[asked - 1], max_tokens=12)
        event = source.random()
        if event < 0.05 and runner.scheduler.reset_prefix_cache(reset_running_requests=True):
            runner.kv.fill_(GARBAGE)
        elif event < 0.1:
            runner.scheduler.finish_requests(
                alive[asked].request_id, RequestStatus.FINISHED_ABORTED
            )
        runner.step()
        for number, request in list(alive.items()):
            if request.request_id not in runner.scheduler.requests:
                del alive[number]

    def have_been_loaded() -> bool:
        step()
        return runner.loaded >= 500

    wait_until(have_been_loaded, "500 tokens are loaded", 120.0)
    runner.scheduler.finish_requests(
        [each.request_id for each in alive.values()], RequestStatus.FINISHED_ABORTED
    )
    runner.end()
    assert runner.wrong == 0


class Late(Runner):
    is_late = True


def test_the_forward_sees_a_load_that_comes_after_it(make: MakeRunner) -> None:
    """The control: without it, the tests above could not fail."""
    stored_by(make, ORDERS[0])
    assert read_by(make, ORDERS[0], Late).wrong > 0
