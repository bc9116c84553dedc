"""One engine of vLLM in a process of its own: `python -m kvferry.bench.vllm.child`.

Its work comes as one JSON object on stdin, and its result goes as one to stdout; all else that the
process prints goes to stderr. The keys of the work are `arguments`, `connector`, `warm_up` and
`stored` for the `Engine`; `prompts` and `max_tokens`, which are timed twice; and the arguments of
`serve` and `decode`, or null where the process does neither.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvferry.bench.limits import bring_into_cache
from kvferry.bench.vllm.cases import Json
from kvferry.bench.vllm.hooks import HookTimer

IDLE_SECONDS = 0.001
"""What vLLM's own loop sleeps after a step that ran no model."""

SETTLE_SECONDS = 30.0

WARM_UP_ANSWER = 4
"""Tokens."""

QUIET_SECONDS = 1.5
"""For what a connector does behind an engine that has started."""

UNCOUNTED_STEPS = 100
"""CPython forgets what it has learnt about a class that changes, as when hooks are wrapped, and
learns it again after some eighty calls: until then hooks take a third more than later on."""


class Engine:
    """vLLM, stepped the way its own loop in a server does it.

    Args:
        arguments: of vLLM's `LLM`.
        connector: vLLM's `kv_transfer_config`.
        warm_up: tokens of a short prompt, which is done at once.
        stored: directory with what timed prompts will find; None if they find nothing.
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
        self.hooks = HookTimer(self.connectors(), clock=time.thread_time_ns)
        prompt(self, warm_up, WARM_UP_ANSWER)

    def connectors(self) -> list[Any]:
        """Both halves; none without a connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return []
        return [self._scheduler.connector, get_kv_transfer_group()]

    def get_ready(self) -> None:
        """Before a timed prompt that finds something stored: work a little, with all stored files
        in the page cache. Some systems drop files that were idle for a few seconds."""
        if self._stored is not None:
            bring_into_cache([path for path in self._stored.rglob("*") if path.is_file()])
            prompt(self, self._warm_up, WARM_UP_ANSWER)

    def add(self, tokens: list[int], max_tokens: int, logprobs: int | None) -> str:
        from vllm import SamplingParams

        self._count += 1
        name = f"r{self._count}"
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            logprobs=logprobs,
            ignore_eos=True,
            detokenize=False,
        )
        self._engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    def step(self) -> list[Any]:
        outputs = self._engine.step()
        if not self._executed and self._scheduler.has_requests():
            time.sleep(IDLE_SECONDS)
        return list(outputs)

    def has_work(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def settle(self) -> None:
        """Step until nothing is left to do, saves included.

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
    """One prompt on an idle engine: time to first token, and CPU time until it is idle again.

    `own_cpu_s` of the CPU time is the connector's: in threads that are neither this one nor
    vLLM's, and in this one inside hooks.
    """
    engine.hooks.take()
    cpu, host, began = time.process_time(), _host_cpu_s(), time.perf_counter()
    engine.add(tokens, max_tokens, logprobs=5)
    first, last = None, None
    while engine.has_work():
        for output in engine.step():
            if first is None and output.outputs[0].token_ids:
                first = time.perf_counter() - began
            last = output
    engine.settle()
    cpu, host = time.process_time() - cpu, _host_cpu_s() - host
    if last is None or first is None:
        raise RuntimeError("the engine gave no answer")
    answer = last.outputs[0]
    return {
        "cpu_s": cpu,
        "own_cpu_s": cpu - host + engine.hooks.take() / 1e6,
        "wall_s": first,
        "hit_tokens": last.num_cached_tokens or 0,
        "tokens": list(answer.token_ids),
        "logprobs": [
            {str(token): entry.logprob for token, entry in position.items()}
            for position in answer.logprobs or []
        ],
    }


def _host_cpu_s() -> float:
    """CPU time of this thread and of those of gloo, which vLLM starts and which are never idle."""
    nanoseconds = 0
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has just ended
            if "gloo" in (task / "comm").read_text():
                nanoseconds += int((task / "schedstat").read_text().split()[0])
    return time.thread_time() + nanoseconds / 1e9


def decode(engine: Engine, tokens: list[int], num_steps: int) -> Json:
    """Decode steps of one request: what hooks take of each, and how long it is."""
    engine.hooks.remove()
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


def serve(engine: Engine, prompts: list[list[int]], max_tokens: list[int], at_once: int) -> Json:
    """Keep `at_once` requests running until all are done: gaps between tokens, and throughput."""
    engine.hooks.remove()
    waiting = list(zip(prompts, max_tokens, strict=True))
    seen: dict[str, tuple[int, float]] = {}
    gaps: list[float] = []
    running = 0
    cpu, began = time.process_time(), time.perf_counter()
    while waiting or engine.has_work():
        while waiting and running < at_once:
            engine.add(*waiting.pop(0), logprobs=None)
            running += 1
        for output in engine.step():
            now, count = time.perf_counter(), len(output.outputs[0].token_ids)
            before = seen.get(output.request_id)
            if before is not None and count > before[0]:
                gaps += [(now - before[1]) / (count - before[0])] * (count - before[0])
            seen[output.request_id] = (count, now)
            running -= output.finished
    wall = time.perf_counter() - began
    engine.settle()
    cpu = time.process_time() - cpu
    return {"cpu_s": cpu, "wall_s": wall, "gaps_s": gaps, "tokens": sum(max_tokens)}


def timed_prompts(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[Json]:
    """Prompts one after the other, each on an engine that has just worked if it can find something
    stored."""
    answers = []
    for tokens in prompts:
        engine.get_ready()
        answers.append(prompt(engine, tokens, max_tokens))
    return answers


def measure(work: Json) -> Json:
    """All that one process measures, with a new engine."""
    names = ("arguments", "connector", "warm_up", "stored")
    engine = Engine(**{name: work[name] for name in names})
    time.sleep(QUIET_SECONDS)
    result: Json = {
        "prompts": timed_prompts(engine, work["prompts"], work["max_tokens"]),
        "again": timed_prompts(engine, work["prompts"], work["max_tokens"]),
    }
    if work["serve"] is not None:
        result["serve"] = serve(engine, **work["serve"])
    if work["decode"] is not None:
        result["decode"] = decode(engine, **work["decode"])
    engine.close()
    return result


def main() -> None:
    # vLLM prints; what it prints goes to the log with stderr, and the result stays alone.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with answer:
        json.dump(measure(json.load(sys.stdin)), answer)


if __name__ == "__main__":
    main()
