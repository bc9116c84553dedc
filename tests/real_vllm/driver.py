"""A process that runs vLLM for the tests and takes commands from `harness`.

Started as `python driver.py ANSWERS_FD`, it reads one JSON command per line from standard input and
answers each with one JSON line on the given descriptor (standard output belongs to vLLM's log). If
a command takes too long, the harness kills the process group. The file imports nothing of this
project, since an engine must find the connector as an operator's engine does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from kvferry.store.base import Where

Json = dict[str, Any]

freeze = gc.freeze


class Driver:
    """The commands by name. The process has at most one engine at a time."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.ranks: Any = None
        self.events: Any = None
        self.num_requests = 0

    def start(self, engine: Json, connector: Json | None) -> Json:
        """Build an engine; the answer says how long it took."""
        from vllm import LLM
        from vllm.config import KVTransferConfig

        prepare()
        began = time.monotonic()
        arguments = dict(engine)
        if connector is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**connector)
        if "kv_events_endpoint" in arguments:
            self.events = subscribe(arguments.pop("kv_events_endpoint"), arguments)
        self.llm = LLM(**arguments)
        return {"seconds": time.monotonic() - began}

    def join(self, engine: Json, connector: Json) -> Json:
        """Run the ranks of this machine for an engine that another machine starts, as `vllm serve
        --headless` does. Answers when the engine has started."""
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        prepare()
        arguments = EngineArgs(**engine, kv_transfer_config=KVTransferConfig(**connector))
        config = arguments.create_engine_config(headless=True)
        self.ranks = MultiprocExecutor(config, monitor_workers=False)
        return {}

    def generate(self, requests: list[Json], *, together: bool, deadline: float) -> Json:
        """Run `requests`, one after the other or all at once.

        A request names `token_ids`, `max_tokens`, `logprobs`, and maybe `salt`, `lora`, `after` and
        `abort_after` (steps of the engine after which it comes, and is aborted), `preempts_after`
        (steps after which all requests lose their blocks) and `sampling` (more parameters; with
        `n`, it has as many results, one after the other).
        """
        before = metrics()
        until = time.monotonic() + deadline
        groups = [requests] if together else [[request] for request in requests]
        results = [result for group in groups for result in self._run(group, until)]
        return {"results": results, "metrics": difference(before, metrics())}

    def converse(self, pieces: list[Json], *, preempted: bool, deadline: float) -> Json:
        """Run a streaming session of pieces, each a prompt that continues what was said before.

        A piece names `token_ids`, `max_tokens`, and maybe `image`, the seed of a random picture. If
        `preempted`, the session loses its blocks in each piece after two tokens of the answer. The
        answer says how many tokens the connector brought.
        """
        until, hits = time.monotonic() + deadline, 0
        self.num_requests += 1
        name = f"session-{self.num_requests}"
        said: list[Json] = []
        for number, piece in enumerate(pieces):
            self._add_piece(name, piece)
            hits += self._listen(name, said, 2, until)
            if preempted and number:
                assert self.llm.reset_prefix_cache(reset_running_requests=True)
            hits += self._listen(name, said, piece["max_tokens"] - 2, until)
        self._add_piece(name, {"token_ids": [5], "max_tokens": 1}, resumable=False)
        self.settle(until - time.monotonic())
        return {"said": said, "hits": hits}

    def _add_piece(self, name: str, piece: Json, *, resumable: bool = True) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompt: Json = {"prompt_token_ids": piece["token_ids"]}
        if piece.get("image") is not None:
            prompt["multi_modal_data"] = {"image": [picture(piece["image"])]}
        params = SamplingParams(
            max_tokens=piece["max_tokens"], temperature=0.0, ignore_eos=True, detokenize=False,
            logprobs=1, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        engine = self.llm.llm_engine
        request = engine.input_processor.process_inputs(
            request_id=name, prompt=prompt, params=params, supported_tasks=("generate",),
            resumable=resumable,
        )  # fmt: skip
        engine.engine_core.add_request(request)

    def _listen(self, name: str, said: list[Json], count: int, until: float) -> int:
        """Step until the session has said `count` tokens more. Return the hits meanwhile."""
        wanted, hits = len(said) + count, 0
        while len(said) < wanted:
            if time.monotonic() > until:
                raise TimeoutError(f"{name} has said {len(said)} of {wanted} tokens")
            step = self.llm.llm_engine.engine_core.get_output()
            external = step.scheduler_stats and step.scheduler_stats.connector_prefix_cache_stats
            if external:
                hits += external.hits + external.preempted_hits
            for output in step.outputs:
                if output.request_id == name:
                    if output.new_logprobs is None:
                        raise RuntimeError(f"{name} said nothing: {output}")
                    logprobs = output.new_logprobs.logprobs[:, 0]
                    for token, logprob in zip(output.new_token_ids, logprobs, strict=True):
                        said.append({"token": token, "logprob": float(logprob)})
        return hits

    def settle(self, deadline: float) -> Json:
        """Step until the engine has nothing to do, as a serving engine's own loop would."""
        until = time.monotonic() + deadline
        scheduler = self._scheduler()
        steps = 0
        while scheduler is not None and scheduler.has_requests():
            if time.monotonic() > until:
                raise TimeoutError(f"the engine has work after {steps} steps without a request")
            self.llm.llm_engine.step()
            steps += 1
        return {"steps": steps}

    def reset(self, *, connector: bool) -> Json:
        return {"done": self.llm.reset_prefix_cache(reset_connector=connector)}

    def scale_norms(self, factor: float) -> Json:
        """Multiply the weights of the layers' first norms in place, as a trainer may.

        CPU kernels keep copies of the other weights in their own layout.
        """

        def scale(model: Any) -> None:
            for name, weights in model.named_parameters():
                if "input_layernorm" in name:
                    weights.data.mul_(factor)

        self.llm.apply_model(scale)
        return {}

    def add_lora(self, lora: Json) -> Json:
        """Load an adapter, as the API server does when it is named."""
        return {"done": self.llm.llm_engine.add_lora(as_adapter(lora))}

    def call_workers(self, method: str, **arguments: Any) -> Json:
        """Call a method of all workers by `collective_rpc`."""
        self.llm.collective_rpc(method, kwargs=arguments)
        return {}

    def sleep(self, level: int) -> Json:
        """Sleep and wake. In between, do what a worker of 0.33 does on a device: notify the
        connector, and return with other bytes in the KV memory."""

        def lose_memory(worker: Any) -> None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            get_kv_transfer_group().unregister_kv_caches()
            for tensors in worker.model_runner.kv_caches:
                for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
                    tensor.fill_(7.0)
            get_kv_transfer_group().restore_kv_caches()

        self.llm.sleep(level)
        self.llm.collective_rpc(lose_memory)
        self.llm.wake_up()
        return {}

    def unknown(self, keys: list[str]) -> Json:
        """Count the given records that the connector's look-ups would not find now."""
        store = self._scheduler().connector._cache.store
        return {"count": sum(store.where(bytes.fromhex(key)) is not Where.HERE for key in keys)}

    def blocks(self) -> Json:
        """Count the blocks of the KV memory that no request holds."""
        return {"free": self._scheduler().kv_cache_manager.block_pool.get_num_free_blocks()}

    def metrics(self) -> Json:
        return {"metrics": metrics()}

    def take_events(self) -> Json:
        return {"events": list(received(self.events))}

    def stop(self) -> Json:
        """Shut the engine down; the answer says how long it took."""
        began = time.monotonic()
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
        if self.ranks is not None:
            self.ranks.shutdown()
            self.ranks = None
        release_closed_engines()
        freeze()  # what this engine imported
        return {"seconds": time.monotonic() - began}

    def _scheduler(self) -> Any:
        """Return the scheduler if the engine's core lives in this process, else None."""
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        return getattr(core, "scheduler", None)

    def _run(self, requests: list[Json], until: float) -> list[Json]:
        engine = self.llm.llm_engine
        names = [self._name() for _ in requests]
        named = dict(zip(names, requests, strict=True))
        pending = dict(named)
        began, outputs = time.monotonic(), {}
        first_token: dict[str, tuple[float, int]] = {}
        steps = 0
        while pending or engine.has_unfinished_requests():
            if time.monotonic() > until:
                raise TimeoutError(f"requests unfinished after {steps} steps: {sorted(outputs)}")
            for name in [name for name in pending if named[name].get("after", 0) <= steps]:
                self._add(name, pending.pop(name))
            due = [name for name in named if named[name].get("abort_after") == steps]
            if due:
                engine.abort_request(due)
            if any(each.get("preempts_after") == steps for each in requests):
                # All are preempted. While blocks wait for a load, vLLM then raises.
                with contextlib.suppress(RuntimeError):
                    self.llm.reset_prefix_cache(reset_running_requests=True)
            for output in engine.step():
                outputs[output.request_id] = output
                first_token.setdefault(output.request_id, (time.monotonic() - began, steps))
            steps += 1
        return [
            result
            for name in names
            for result in describe(outputs.get(name), first_token.get(name))
        ]

    def _name(self) -> str:
        self.num_requests += 1
        return f"request-{self.num_requests}"

    def _add(self, name: str, request: Json) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompt: Json = {"prompt_token_ids": request["token_ids"]}
        if request.get("salt") is not None:
            prompt["cache_salt"] = request["salt"]
        lora = request.get("lora")
        options = {
            "temperature": 0.0,
            "max_tokens": request["max_tokens"],
            "logprobs": request["logprobs"],
            "ignore_eos": True,
            "detokenize": False,
        } | request.get("sampling", {})
        if "n" in options:  # the last output then has all sequences
            options["output_kind"] = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**options)
        adapter = None if lora is None else as_adapter(lora)
        self.llm.llm_engine.add_request(name, prompt, params, lora_request=adapter)


def as_adapter(lora: Json) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora["name"], lora["id"], lora["path"])


def picture(seed: int) -> Any:
    """Return a picture of random pixels."""
    import numpy as np
    from PIL import Image

    pixels = np.random.RandomState(seed).randint(0, 255, (56, 56, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def prepare() -> None:
    """Get ready for the first engine of this process."""
    if not gc.isenabled():
        freeze()
        replace_kernels_once()
        fork_ranks()
        gc.enable()
        from vllm.config import CacheConfig

        if hasattr(CacheConfig, "cpu_kvcache_space_bytes"):  # 0.14: a CPU takes whole GiB alone
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"


def keep_imports_frozen() -> None:
    """Exempt the hundreds of thousands of objects of vLLM's import from garbage collection.

    While an engine starts and ends, vLLM unfreezes the heap and collects garbage several times,
    which is slow. Here the driver alone freezes the heap: after the import, and after each engine's
    end. The import itself makes no garbage worth a collection.
    """
    gc.disable()
    gc.freeze = gc.unfreeze = lambda: None


def replace_kernels_once() -> None:
    """Have vLLM replace Triton's kernels only once per process, as if it had a single engine.

    Otherwise each engine replaces the replacements again, and looks at every name of every module.
    """
    from vllm.platforms import current_platform

    platform, name = type(current_platform), "register_triton_kernel_overrides"
    if hasattr(platform, name):  # not in 0.14
        setattr(platform, name, staticmethod(functools.cache(getattr(platform, name))))


def fork_ranks() -> None:
    """Fork an engine's ranks from a process that has imported vLLM.

    vLLM spawns them, and each imports it again, which takes longer than all else that a test does.
    """
    from vllm.platforms import current_platform
    from vllm.v1.executor import multiproc_executor

    if not current_platform.is_cpu():
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.v1.worker.cpu_worker"])
    multiproc_executor.get_mp_context = lambda: context


def release_closed_engines() -> None:
    """Release what engines that were shut down still hold in this process, KV caches above all.

    vLLM 0.14 never releases it: a cache of function signatures holds methods of its model, and the
    process groups made for its model serve the next one too. Later releases clean up themselves.
    """
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.utils.func_utils import supports_kw

    if hasattr(supports_kw, "cache_clear"):
        supports_kw.cache_clear()
    cleanup_dist_env_and_memory()  # which collects garbage


def describe(output: Any, first_token: tuple[float, int] | None) -> Iterator[Json]:
    """Yield what a test needs of a request's last output, for each of its sequences. Without an
    output, yield one empty result."""
    seconds_to_first, steps_to_first = first_token or (None, None)
    if output is None:
        yield {"tokens": [], "logprobs": [], "cached": None, "reason": "none", "seconds": None}
        return
    for answer in output.outputs:
        yield {
            "tokens": list(answer.token_ids),
            "logprobs": by_token(answer.logprobs),
            "prompt_logprobs": by_token(output.prompt_logprobs),
            "cached": output.num_cached_tokens,
            "reason": answer.finish_reason,
            "seconds": seconds_to_first,
            "steps": steps_to_first,
            "params": output.kv_transfer_params,
        }


def by_token(positions: Any) -> list[dict[str, float]]:
    """Return logprobs as JSON, by position and token; the first token of a prompt has none."""
    return [
        {str(token): entry.logprob for token, entry in (position or {}).items()}
        for position in positions or []
    ]


def metrics() -> dict[str, float]:
    """Return this process's Prometheus counts by name: kvferry's by labels too, vLLM's summed."""
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.endswith(("_created", "_bucket")):
                continue
            if "kvferry" in sample.name or sample.name.startswith("vllm:"):
                labels = {k: v for k, v in sample.labels.items() if k not in _COMMON_LABELS}
                name = sample.name
                if "kvferry" in name and labels:
                    name += json.dumps(labels, sort_keys=True)
                found[name] = found.get(name, 0.0) + sample.value
    return found


_COMMON_LABELS = ("model_name", "engine")


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    changed = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: value for name, value in changed.items() if value}


def subscribe(endpoint: str, arguments: Json) -> Any:
    """Have the engine publish KV events at `endpoint`, and listen there."""
    import zmq
    from vllm.config import KVEventsConfig

    arguments["kv_events_config"] = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, topic="kv"
    )
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv")
    socket.connect(endpoint.replace("*", "127.0.0.1"))
    return socket


def received(socket: Any) -> Iterator[Json]:
    """Yield the published events until none has come for a second."""
    import msgspec
    import zmq
    from vllm.distributed.kv_events import KVEventBatch

    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    while socket.poll(1000, zmq.POLLIN):
        *_, payload = socket.recv_multipart()
        for event in decoder.decode(payload).events:
            yield {
                "type": type(event).__name__,
                "medium": getattr(event, "medium", None),
                "num_blocks": len(getattr(event, "block_hashes", [])),
                "block_size": getattr(event, "block_size", None),
                "num_tokens": len(getattr(event, "token_ids", None) or []),
            }


def serve(answers: Any) -> None:
    """Answer commands until standard input ends."""
    keep_imports_frozen()
    driver = Driver()
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("command")
        try:
            answer = getattr(driver, name)(**command)
        except Exception as error:  # the test decides what an error means
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "w") as pipe:
        serve(pipe)
