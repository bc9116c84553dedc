"""A process with one vLLM engine, which the benchmark `vllm` starts for each measurement.

It reads its work as one JSON object from stdin and writes its result as one JSON object to stdout;
everything else that it prints goes to stderr. The work holds `arguments`, `connector`, `warm_up`
and `stored` for `Engine`; `prompts`, each timed twice, and their `max_tokens`; and `decode`, the
arguments of the function `decode`, or null.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.limits import bring_into_cache
from kvferry.v1.base import KVConnectorBase_V1

Json = dict[str, Any]

IDLE_SECONDS = 0.001
"""Pause of vLLM's own loop after a step that ran no model."""

SETTLE_SECONDS = 30.0

WARM_UP_ANSWER = 4
"""Tokens that a warm-up prompt generates."""

QUIET_SECONDS = 1.5
"""Pause after the start of the engine, for background work of its connector."""

UNCOUNTED_STEPS = 100
"""Steps before the timed ones. CPython drops its specialised code for a class whose methods are
replaced, here by the timer. Until CPython has specialised the code again, hooks take longer."""

HOOKS = frozenset(
    name
    for name in (*vars(KVConnectorBase_V1), "request_finished_all_groups")
    # vLLM's own decorator around each layer calls `has_connector_metadata`.
    if not name.startswith("_") and name != "has_connector_metadata"
)


class HookTimer:
    """Adds up the time spent in the hooks of connectors. One thread calls all hooks.

    It wraps the methods of the connectors' classes and leaves the instances as they are. If a hook
    calls another, only the outer one is timed. It measures its own cost and subtracts that.
    """

    def __init__(self, connectors: Iterable[Any]) -> None:
        self._nanoseconds = 0
        self._calls = 0
        self._is_inside = False
        for kind in {type(connector) for connector in connectors}:
            for name in HOOKS:
                if inspect.isfunction(hook := getattr(kind, name, None)):
                    setattr(kind, name, self._timed(hook))
        self._overhead = self._measure_overhead()

    def take(self) -> float:
        """Return the microseconds spent in hooks since the last call."""
        spent = self._nanoseconds - self._calls * self._overhead
        self._nanoseconds = self._calls = 0
        return max(0.0, spent / 1e3)

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the hook takes
            if self._is_inside:
                return hook(*args, **kwargs)
            self._is_inside = True
            began = time.perf_counter_ns()
            try:
                return hook(*args, **kwargs)
            finally:
                self._nanoseconds += time.perf_counter_ns() - began
                self._calls += 1
                self._is_inside = False

        return timed

    def _measure_overhead(self) -> float:
        """Return the nanoseconds that timing adds to an empty hook."""
        empty = self._timed(lambda: None)
        best = float("inf")
        for _ in range(20):
            self._nanoseconds = 0
            for _ in range(1000):
                empty()
            best = min(best, self._nanoseconds / 1000)
        self._nanoseconds = self._calls = 0
        return best


class Engine:
    """A vLLM engine that is stepped as the loop of vLLM's server does.

    Args:
        arguments: arguments of vLLM's `LLM`.
        connector: `kv_transfer_config` of vLLM; None for no connector.
        warm_up: tokens of a short prompt, which runs at once.
        stored: directory of the store that timed prompts will hit; None if they hit nothing.
    """

    def __init__(
        self, arguments: Json, connector: Json | None, warm_up: list[int], stored: str | None
    ) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if connector is not None:
            arguments = arguments | {"kv_transfer_config": KVTransferConfig(**connector)}
        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        core = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._executed = True
        post_step = core.post_step

        def noting(model_executed: bool) -> None:
            self._executed = model_executed
            post_step(model_executed)

        core.post_step = noting
        self._count = 0
        self._warm_up = warm_up
        self._stored = None if stored is None else Path(stored)
        prompt(self, warm_up, WARM_UP_ANSWER)

    def connectors(self) -> list[Any]:
        """Return the connector's scheduler and worker halves; empty without a connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return []
        return [self._scheduler.connector, get_kv_transfer_group()]

    def get_ready(self) -> None:
        """Prepare for a timed prompt that hits the store: bring the stored files into the page
        cache, which some systems clear of idle files within seconds, and run a short prompt."""
        if self._stored is not None:
            bring_into_cache([path for path in self._stored.rglob("*") if path.is_file()])
            prompt(self, self._warm_up, WARM_UP_ANSWER)

    def add(self, tokens: list[int], max_tokens: int, logprobs: int | None) -> None:
        from vllm import SamplingParams

        self._count += 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            logprobs=logprobs,
            ignore_eos=True,
            detokenize=False,
        )
        self._engine.add_request(f"r{self._count}", {"prompt_token_ids": tokens}, params)

    def step(self) -> list[Any]:
        outputs = self._engine.step()
        if not self._executed and self._scheduler.has_requests():
            time.sleep(IDLE_SECONDS)
        return list(outputs)

    def has_work(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def settle(self) -> None:
        """Step until all work is done, saves included.

        Raises:
            TimeoutError: there is still work after `SETTLE_SECONDS`.
        """
        until = time.monotonic() + SETTLE_SECONDS
        while self._scheduler.has_requests():
            self.step()
            if time.monotonic() > until:
                raise TimeoutError("the engine does not come to rest")

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def prompt(engine: Engine, tokens: list[int], max_tokens: int) -> Json:
    """Run a prompt on an idle engine; time the first token, and the CPU until it is idle again."""
    cpu, began = time.process_time(), time.perf_counter()
    engine.add(tokens, max_tokens, logprobs=5)
    first, last = None, None
    while engine.has_work():
        for output in engine.step():
            if first is None and output.outputs[0].token_ids:
                first = time.perf_counter() - began
            last = output
    engine.settle()
    cpu = time.process_time() - cpu
    if last is None or first is None:
        raise RuntimeError("the engine gave no answer")
    answer = last.outputs[0]
    return {
        "cpu_s": cpu,
        "wall_s": first,
        "hit_tokens": last.num_cached_tokens or 0,
        "tokens": list(answer.token_ids),
        "logprobs": [
            {str(token): entry.logprob for token, entry in position.items()}
            for position in answer.logprobs or []
        ],
    }


def decode(engine: Engine, tokens: list[int], num_steps: int) -> Json:
    """Time the decode steps of one request, and the hooks in each step."""
    engine.add(tokens, UNCOUNTED_STEPS + num_steps + 2, logprobs=None)
    while not engine.step():
        pass
    timer = HookTimer(engine.connectors())
    for _ in range(UNCOUNTED_STEPS):
        engine.step()
    timer.take()
    hooks, steps = [], []
    cpu = time.process_time()
    while engine.has_work():
        began = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - began)
        hooks.append(timer.take())
    cpu = time.process_time() - cpu
    engine.settle()
    return {"hooks_us": hooks, "steps_s": steps, "cpu_s": cpu}


def measure(work: Json) -> Json:
    """Measure everything that one process is asked for, with a new engine."""
    names = ("arguments", "connector", "warm_up", "stored")
    engine = Engine(**{name: work[name] for name in names})
    time.sleep(QUIET_SECONDS)
    result: Json = {"prompts": [], "again": []}
    for answers in result.values():
        for tokens in work["prompts"]:
            engine.get_ready()
            answers.append(prompt(engine, tokens, work["max_tokens"]))
    if work["decode"] is not None:
        result["decode"] = decode(engine, **work["decode"])
    engine.close()
    return result


def main() -> None:
    # vLLM's prints to stdout go to stderr, so that stdout holds nothing but the result.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with answer:
        json.dump(measure(json.load(sys.stdin)), answer)


if __name__ == "__main__":
    main()
