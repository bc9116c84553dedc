"""The embedded engine's front end: a model directory in, text out, with or without a KV store."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from operator import index
from pathlib import Path
from typing import Any

import torch

from kvferry.config import build_config
from kvferry.contract.driver import StepDriver
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.handover import read_handover
from kvferry.contract.spec import Roles
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.config import EngineConfig
from kvferry.engine.connector import cache_arguments, open_roles
from kvferry.engine.generation import (
    Completion,
    Generation,
    SamplingParams,
    TokenEvent,
    Tokenizer,
)
from kvferry.engine.kv_pool import num_blocks_for
from kvferry.engine.model import PagedModel, load_tokenizer
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.ranks import ParallelRunner, Ranks, Start, launch_process
from kvferry.engine.request import FinishReason, Request
from kvferry.engine.runner import ModelRunner
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.tensor_parallel import device_of_rank
from kvferry.errors import ConfigError, ContractError, RankError
from kvferry.identity import weights_state
from kvferry.observe import Observer

logger = logging.getLogger(__name__)

IDLE_STEP_SECONDS = 0.001
"""How long a step without tokens takes at least, so that waiting for the connector does not burn a
core."""

CLOSE_SECONDS = 5.0
"""How long `close` lets the connector finish what it has begun."""

READY_SECONDS = 0.5
"""How long opening the engine waits for the connector's index. The first prompts then find all of a
small store; the index of a large store goes on filling while they run."""

Prompt = str | Sequence[int]


class LLM:
    """A causal LM that generates text, and reads and writes its KV cache through a connector.

    A context manager. Not thread-safe: one thread at a time.

    Attributes:
        tokenizer: tokenizer of the model directory; None if it has none.
        scheduler: holds the requests and their blocks; read only.

    Example:
        >>> with LLM("path/to/model", store="file:///var/cache/kvferry") as llm:  # doctest: +SKIP
        ...     print(llm.generate(["The capital of France is"])[0].text)
    """

    _launch = staticmethod(launch_process)  # replaced by tests

    def __init__(
        self,
        model_dir: str | Path,
        *,
        store: str | Sequence[str] | None = None,
        connector_options: Mapping[str, Any] | None = None,
        roles: Roles | None = None,
        observer: Observer | None = None,
        **config: Any,  # noqa: ANN401 - checked, field by field, by build_config
    ) -> None:
        """Load a model.

        Args:
            model_dir: directory with config.json, weights and mostly a tokenizer, as Transformers
                saves it.
            store: URL of the store that KV is read from and written to, or the URLs of several
                tiers, nearest first; None for no store.
            connector_options: further options of the connector that uses the store.
            roles: a connector made elsewhere, instead of `store`. The engine closes it.
            observer: receives counts.
            config: fields of `EngineConfig`.

        Raises:
            ConfigError: the model, an option or the store cannot be used.
            TopologyError: the kv heads cannot be divided among the ranks.
            RankError: another rank died or did not answer.
        """
        engine = build_config(EngineConfig, config, where="engine")
        if roles is not None:
            _refuse_beside_roles(store, engine)
        self._closed = False
        self._observer = observer or Observer()
        model = ModelConfig(Path(model_dir), engine)
        num_blocks = num_blocks_for(engine, model.geometry)
        hashed = None if store is None else weights_state(model.model_dir)
        arguments = None
        if roles is None:
            arguments = cache_arguments(store, connector_options, model, engine)
            # Before the weights, so that the store's index fills while they are read.
            roles = open_roles(arguments, self._observer)
        self._roles = _guarded(roles, self._observer, engine.block_size)
        self._driver = StepDriver(roles.worker, self._observer)
        self._ranks: Ranks | None = None
        try:
            if engine.tensor_parallel_size > 1:
                start = Start(model.model_dir, engine, num_blocks, arguments)
                self._ranks = Ranks(start, self._observer, launch=self._launch)
            self._load(model, engine, num_blocks)
            _refuse_changed(model.model_dir, hashed)
            self._roles.wait_ready(READY_SECONDS)
        except BaseException:
            self._close_parts()
            raise

    def _load(self, model: ModelConfig, engine: EngineConfig, num_blocks: int) -> None:
        if engine.num_threads is not None:
            torch.set_num_threads(engine.num_threads)
        device = engine.device if self._ranks is None else device_of_rank(engine.device, 0)
        paged = PagedModel(model, device)
        if self._ranks is not None:
            paged.split(self._ranks.connect(paged.device))
        first = ModelRunner(paged, self._driver, engine, num_blocks=num_blocks)
        self._runner: ModelRunner | ParallelRunner = first
        if self._ranks is not None:
            self._ranks.wait_ready()
            self._runner = ParallelRunner(first, self._ranks, self._observer)
        self.scheduler = Scheduler(
            engine, BlockPool(num_blocks), self._roles.scheduler, observer=self._observer
        )
        self._eos_token_ids = paged.eos_token_ids
        self._geometry = model.geometry
        self._pool_tokens = (num_blocks - 1) * engine.block_size
        self._generations: dict[str, Generation] = {}
        self._request_numbers = count()
        self.tokenizer: Tokenizer | None = load_tokenizer(model.model_dir)

    # ---- generating

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete prompts, batched.

        Args:
            prompts: texts or token ids.
            params: one for all prompts, or one per prompt; None for the defaults.

        Returns:
            One completion per prompt, in order.

        Raises:
            ConfigError: a prompt or parameter cannot be served; then nothing was generated.
        """
        if isinstance(prompts, str):
            raise ConfigError("prompts is one text; give a list of prompts")
        wanted = _per_prompt(params, len(prompts))
        requests = [self._request(*pair) for pair in zip(prompts, wanted, strict=True)]
        generations = [
            Generation(request, each, self.tokenizer)
            for request, each in zip(requests, wanted, strict=True)
        ]
        try:
            for generation in generations:
                self._add(generation)
            while any(request.outcome is None for request in requests):
                self.step()
        finally:
            for generation in generations:
                self._drop(generation)
        # Tell the connector now that these requests ended, not only when the next one comes.
        if not self._generations:
            self.step()
        return [generation.completion() for generation in generations]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Complete one prompt token by token. Closing the iterator early aborts the request.

        Other requests of this engine, streams included, move on with every step of this one.

        Raises:
            ConfigError: at the call, as `generate`.
            ContractError: while iterating; the engine ended the request because the connector keeps
                blocks that the request needs.
        """
        params = params or SamplingParams()
        request = self._request(prompt, params)
        return self._stream(Generation(request, params, self.tokenizer))

    def _stream(self, generation: Generation) -> Iterator[TokenEvent]:
        request = generation.request
        try:
            self._add(generation)
            while request.outcome is None:
                self.step()
                # Steps of other requests, between two events, may have added tokens to this one.
                yield from generation.new_events()
        finally:
            self._drop(generation)
        if request.outcome.reason is FinishReason.ERROR:
            raise ContractError(f"{request!r}: blocks lent to the connector never came back")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text.

        Raises:
            ConfigError: the model directory has no tokenizer.
        """
        if self.tokenizer is None:
            raise ConfigError("the model directory has no tokenizer; give prompts as token ids")
        return self.tokenizer.encode(text)

    def reset_prefix_cache(self) -> None:
        """Empty the engine's own prefix cache. The store keeps its records."""
        self.scheduler.pool.reset()

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        self._check_open()
        token_ids = self.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        self._check_prompt(token_ids)
        stop = frozenset(params.stop_token_ids)
        return Request(
            f"request-{next(self._request_numbers)}",
            token_ids,
            max_total_tokens=min(
                len(token_ids) + params.max_tokens,
                self._geometry.context_length,
                self._pool_tokens,
            ),
            stop_token_ids=stop if params.ignore_eos else stop | self._eos_token_ids,
            handover=read_handover(params.kv_transfer_params),
            options=params.request_options,
        )

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise ConfigError("a prompt has no tokens; give at least one")
        # One more token must fit after the prompt.
        for what, limit, remedy in (
            ("the model's context", self._geometry.context_length, "shorten it"),
            ("the KV pool", self._pool_tokens, "set kv_cache_bytes or num_blocks higher"),
        ):
            if len(token_ids) >= limit:
                raise ConfigError(
                    f"a prompt has {len(token_ids)} tokens, {what} holds {limit}; {remedy}"
                )
        for extreme in (min(token_ids), max(token_ids)):
            if not 0 <= extreme < self._geometry.vocab_size:
                raise ConfigError(
                    f"a prompt holds token id {extreme}; the model's vocabulary has "
                    f"{self._geometry.vocab_size}"
                )

    def _add(self, generation: Generation) -> None:
        self._check_open()
        self._generations[generation.request.request_id] = generation
        self.scheduler.add(generation.request)

    def _drop(self, generation: Generation) -> None:
        """Forget a generation, and abort its request if it has not ended."""
        request_id = generation.request.request_id
        self._generations.pop(request_id, None)
        self.scheduler.abort(request_id)

    def step(self) -> None:
        """One engine step: schedule, run, update. A step without tokens still runs the connector,
        which may wait in it, and takes `IDLE_STEP_SECONDS` at least.

        If the forward raises, the requests of the step are aborted, since the content of their
        blocks is unknown. The scheduler gets the connector's report; then the error is raised.
        """
        self._check_open()
        started = time.monotonic()
        step = self.scheduler.schedule()
        work = step.run_step()
        logits: dict[str, torch.Tensor] = {}

        def sample(request: Request) -> int:
            return self._generations[request.request_id].sample(logits[request.request_id])

        try:
            rows = self._runner.run(work)
            wanted = [entry.request.request_id for entry in step.scheduled if entry.wants_logits]
            logits.update(zip(wanted, rows, strict=True))
        except BaseException:
            for entry in step.scheduled:
                self.scheduler.abort(entry.request.request_id)
            raise
        finally:
            self.scheduler.update(step, self._runner.output, sample)
        if not step.scheduled:
            time.sleep(max(0.0, started + IDLE_STEP_SECONDS - time.monotonic()))

    # ---- the end

    def drain(self, timeout_seconds: float) -> bool:
        """Run steps until the connector has finished its background work: saves are visible, lent
        blocks are back or overdue. Returns False if the time ran out first.

        Raises:
            ContractError: something is generating, or the engine is closed.
        """
        self._check_open()
        if self._generations:
            raise ContractError("drain is called while requests are running")
        deadline = time.monotonic() + timeout_seconds
        while self.scheduler.has_work():
            if time.monotonic() >= deadline:
                return False
            self.step()
        return True

    def close(self) -> None:
        """End all requests, let the connector work for at most `CLOSE_SECONDS` more, and close it.
        Idempotent; leaves no thread and no process."""
        if self._closed:
            return
        try:
            for generation in list(self._generations.values()):
                self._drop(generation)
            if not self.drain(CLOSE_SECONDS):
                logger.warning("the connector did not finish within %.0f s", CLOSE_SECONDS)
        except RankError as error:
            logger.warning("closing an engine that cannot run: %s", error)
        finally:
            self._closed = True
            self._close_parts()

    def _close_parts(self) -> None:
        with ExitStack() as closing:  # in reverse order
            closing.callback(self._roles.close_last)
            closing.callback(self._roles.scheduler.close)
            closing.callback(self._driver.close)
            # Closed first: the other ranks would wait for sums with this one.
            if self._ranks is not None:
                closing.callback(self._ranks.close)

    def _check_open(self) -> None:
        if self._closed:
            raise ContractError("the engine is closed")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


def _refuse_beside_roles(store: object, engine: EngineConfig) -> None:
    if store is not None:
        raise ConfigError("both store and roles are given; the engine has one connector")
    if engine.tensor_parallel_size > 1:
        raise ConfigError("roles serve one rank; give a store, or tensor_parallel_size=1")


def _guarded(roles: Roles, observer: Observer, block_size: int) -> Roles:
    if roles.scheduler.rules.is_asynchronous != roles.worker.rules.is_asynchronous:
        raise ConfigError(
            f"{type(roles.scheduler).__name__} and {type(roles.worker).__name__} name `rules` that "
            "do not belong together: both halves of a connector have async loads, or neither"
        )
    scheduler = GuardedScheduler(roles.scheduler, observer, block_size=block_size)
    return replace(roles, scheduler=scheduler)


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """Turn token ids of any integer type (NumPy's, torch's) into Python's integers."""
    try:
        return [index(token_id) for token_id in prompt]
    except TypeError as error:
        raise ConfigError(f"a prompt is neither a text nor a list of token ids: {error}") from error


def _refuse_changed(model_dir: Path, hashed: object) -> None:
    """Refuse weights that changed after they were hashed: what runs must be what was hashed.
    `hashed` is their state before that; None if they were not hashed."""
    if hashed is not None and weights_state(model_dir) != hashed:
        raise ConfigError(
            f"the weights in {model_dir} changed while they were loaded: start again when they are "
            "complete"
        )


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ConfigError(f"{num_prompts} prompts but {len(params)} sampling parameters")
    return params
