"""What the kit's two hosts have in common: a step of the ranks, and the eyes on look-ups.

The scheduler is an engine's own (`vllm_host`, `own_host`); only the model is made up (`content`).
"""

# ruff: noqa: ANN401 - connectors and their requests are of any class

from __future__ import annotations

import pickle
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import msgspec

from kvferry.contract.driver import StepDriver
from kvferry.contract.messages import Plan, WorkerOutput
from kvferry.testing.connector.content import LAYER_NAMES, STATE, Ask, Memory, Part, Row, Setup
from kvferry.v1.driven import Release, V1WorkerRole

IDLE_SECONDS = 0.002
_ENDS = ("finished_sending", "finished_recving", "failed_recving")
Verdict = Literal["right", "miss", "refused", "engine dead", "hangs", "wrong", "not run"]


class CaseEnd(Exception):
    """A case shows something else than that all is right."""

    def __init__(self, verdict: Verdict, text: str) -> None:
        super().__init__(text)
        self.verdict = verdict


class KitHost(ABC):
    """An engine's scheduler with a connector and a made-up model."""

    keys_across: ClassVar[bool] = False

    def __init__(self, connector: type[Any], options: dict[str, Any], setup: Setup) -> None:
        """Build the engine and both halves.

        Raises:
            CaseEnd: "not run" if the engine does not run so, "refused" if the class raised.
        """
        self.setup = setup
        self.rows: dict[str, Row] = {}
        self.memories = [
            Memory(setup, rank, keys_across=self.keys_across) for rank in range(setup.ranks)
        ]
        self.promised: dict[str, frozenset[int]] = {}  # blocks that the connector may write
        self.last_stats: Any = None  # what the connector reported last, if it was not empty
        self.lost: set[int] = set()  # blocks that a preemption took; the next step overwrites them
        # What cases may change.
        self.hold: set[str] = set()  # requests whose look-ups are answered "ask again"
        # By request, the hit without which "ask again" is answered while there is hope for more.
        self.wanted: dict[str, int] = {}
        self.is_hopeful: Callable[[], bool] = lambda: False
        self.max_steps = 6_000  # until it steps for ever
        self.most = 1 << 30  # tokens that the host takes of a hit
        self.repeats_reports = False  # whether the scheduler half gets each report twice
        self.hides_local_blocks = False  # while sync loads run, to see who writes to them
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext  # each look-up
        self.after_promise: Callable[[], object] = lambda: None
        self.after_layer: Callable[[], object] = lambda: None
        self._waits = False  # the last look-up was answered "ask again" in hope, which ends in time
        self._hidden: list[int] = []
        self._answers: dict[str, tuple[int, bool]] = {}  # local tokens, is the load async
        self._starting: dict[str, frozenset[int]] = {}  # async loads of the next step
        self.seen_requests: list[weakref.ref[Any]] = []  # what look-ups were asked about
        self._late = deque([dict.fromkeys(_ENDS, frozenset[str]())] * setup.late_rank)
        self.scheduler_half: Any
        self.worker_halves: list[Any] = []
        with self.blamed("refused"):
            self._has_hooks = connector.requires_piecewise_for_cudagraph(options) or setup.hooks
            self._build(connector, options)
            release: Release = getattr(connector, "written_for", "0.32")
            roles = [V1WorkerRole(half, release=release) for half in self.worker_halves]
            for role, memory in zip(roles, self.memories, strict=True):
                self._be_rank(memory.rank)
                role.register_kv_caches(memory.shown())
            said = [half.get_handshake_metadata() for half in self.worker_halves]
            if any(each is not None for each in said):
                by_rank = {(0, rank): each for rank, each in enumerate(said)}
                self.scheduler_half.set_xfer_handshake_metadata_pp_aware(by_rank)
        self._drivers = [StepDriver(role, strict=True) for role in roles]
        for name, watched in (
            ("get_num_new_matched_tokens", self._lookup),
            ("update_state_after_alloc", self._allocated),
            ("update_connector_output", self._reported),
            ("build_connector_meta", self._planned),
        ):
            setattr(self.scheduler_half, name, partial(watched, getattr(self.scheduler_half, name)))

    # --- what cases do

    def add(self, ask: Ask) -> Row:
        """Queue a request, or more tokens of a session."""
        row = self.rows.setdefault(ask.name, Row(ask, self.setup.identity))
        with self.blamed():
            self._add(ask)
        return row

    def step(self, count: int = 1) -> None:
        """Run steps of the engine. Raises CaseEnd for what the connector did wrong."""
        for _ in range(count):
            with self.blamed():
                has_tokens = self._step()
            if not has_tokens:
                time.sleep(IDLE_SECONDS)

    def abort(self, row: Row) -> None:
        if row.reason is None:
            with self.blamed():
                self._abort(row.ask.name)
            row.reason = "abort"

    def preempt(self) -> None:
        """Take the blocks of all running requests."""
        rows = [row for row in self.rows.values() if row.reason is None]
        self.lost = {block for row in rows for table in row.tables for block in table}
        for row in rows:
            row.num_computed = 0
        with self.blamed():
            self._preempt()

    def is_half_computed(self) -> bool:
        """Whether the prompt of a running request is computed in part."""
        rows = [row for row in self.rows.values() if row.reason is None]
        return any(0 < row.num_computed < len(row.ask.tokens) for row in rows)

    def run(self) -> None:
        """Step until every request has ended and nothing is under way."""
        steps = self.max_steps
        while self.is_busy():
            self._waits = False
            self.step()
            steps -= not self._waits
            if not steps:
                names = [name for name, row in self.rows.items() if row.reason is None]
                ends = f"the connector to report the end of a load or save ({self._held()} blocks "
                waits = (
                    f"requests {names}" if names else f"{ends}of ended requests are never freed)"
                )
                raise CaseEnd("hangs", f"the engine steps for ever, waiting for {waits}")
        if leaked := self._held():
            raise CaseEnd("wrong", f"{leaked} blocks are held though no request is left")
        for row in self.rows.values():
            if row.reason == "length" and not row.ask.grows:
                again, start = Row(row.ask, self.setup.identity), len(row.ask.tokens)
                right = [again.next_token(start + i) for i in range(row.ask.max_tokens)]
                if row.said != right:
                    said = f"{row.ask.name} got tokens {row.said}, not {right}"
                    raise CaseEnd("wrong", said)

    def _held(self) -> int:
        """How many blocks requests hold."""
        return self.setup.num_blocks - 1 - len(self.free_blocks())

    def is_loading(self) -> bool:
        """Whether async loads are under way, or over and their requests not admitted yet."""
        return any(
            is_async and (name in self.promised or self.rows[name].reason is None)
            for name, (_, is_async) in self._answers.items()
        )

    def close(self) -> None:
        """Shut both halves of the connector down."""
        with self.blamed():
            for half in (*self.worker_halves, self.scheduler_half):
                half.shutdown()

    @contextmanager
    def blamed(self, verdict: Verdict = "engine dead") -> Iterator[None]:
        """Turn exceptions of what is run inside into the end of the case."""
        try:
            yield
        except CaseEnd:
            raise
        except Exception as error:
            raise CaseEnd(verdict, describe(error)) from error

    # --- between the scheduler and the connector

    def _lookup(self, ask: Any, request: Any, num_local: int) -> tuple[int | None, bool]:
        name = request.request_id
        self.seen_requests.append(weakref.ref(request))
        before = (list(request.all_token_ids), request.num_computed_tokens)
        with self.around():
            answer = ask(request, num_local)
        if before != (list(request.all_token_ids), request.num_computed_tokens):
            raise CaseEnd("wrong", "a look-up changed the request")
        said = f"look-up of {name} ({request.num_tokens} tokens, {num_local} local): {answer}"
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise CaseEnd("wrong", f"{said}: not a pair of a count and whether it is async")
        count, is_async = answer
        hopes = count is not None and num_local + count < self.wanted.get(name, 0)
        self._waits = hopes and self.is_hopeful()
        if count is None or name in self.hold or self._waits:
            return None, False
        if count < 0:
            raise CaseEnd("wrong", f"{said}: a negative count, which vLLM takes as it is")
        if count == 0 and is_async:
            raise CaseEnd("engine dead", f"{said}: vLLM asserts that async loads are not empty")
        if num_local + count > request.num_tokens - (0 if is_async else 1):
            raise CaseEnd("engine dead", f"{said}: vLLM asserts that the prompt has so many tokens")
        if not is_async and count % self.setup.block_size:
            raise CaseEnd("wrong", f"{said}: ends within a block, so no failure can be reported")
        count = min(count, self.most)
        self._answers[name] = num_local, bool(is_async and count)
        return count, bool(is_async and count)

    def _allocated(self, tell: Any, request: Any, blocks: Any, num_external: int) -> None:
        name, size = request.request_id, self.setup.block_size
        local, is_async = self._answers.get(name, (0, False))
        if num_external:
            first, last = local // size, -(-(local + num_external) // size)
            tables = blocks.get_block_ids()
            filled = [table[first:last] for table in tables]
            if not is_async:
                # The runner has copied states on when a load within the step begins.
                groups = zip(tables, self.setup.groups, strict=True)
                filled += [table[-1:] for table, window in groups if window == STATE]
            self.promised[name] = frozenset(b for part in filled for b in part) - {0}
            for memory in self.memories:
                memory.empty(self.promised[name])
            if is_async:
                self._starting[name] = self.promised[name]
            elif self.hides_local_blocks:
                self._hidden = sorted({b for t in tables for b in t[:first]} - {0})
        if num_external or not is_async:  # else the second call after an async load
            self.rows[name].hits.append(num_external)
        if not num_external:
            self._answers.pop(name, None)
        tell(request, blocks, num_external)
        if num_external:
            self.after_promise()

    def _reported(self, tell: Any, output: Any) -> None:
        tell(output)
        if self.repeats_reports:
            tell(replace(output, kv_connector_stats=None, kv_connector_worker_meta=None))

    def _planned(self, build: Any, output: Any) -> Any:
        before = _shown(output)
        metadata = build(output)
        if _shown(output) != before:
            raise CaseEnd(
                "wrong", "build_connector_meta changed the step that the host goes on with"
            )
        return metadata

    # --- a step of the ranks

    def step_ranks(
        self, parts: Sequence[Part], plan: Plan, finished: Collection[str], *, late: bool = False
    ) -> list[WorkerOutput]:
        """Compute the parts of a step on all ranks; return their reports. `late`: loads start after
        the forward."""
        found, outputs, message = list[str](), [], pickle.dumps(plan)
        for memory, driver in zip(self.memories, self._drivers, strict=True):
            self._be_rank(memory.rank)
            memory.hide(self._hidden)
            driver.begin(pickle.loads(message))
            memory.carry_states(parts)
            if not late:
                driver.start_load()
            found += self._forward(memory, parts)
            if late:
                driver.start_load()
            driver.save()
            outputs.append(driver.finish(finished))
        # After a failure was reported, later KV is wrong, too.
        if found and not any(output.invalid_block_ids for output in outputs):
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise CaseEnd("wrong", found[0] + more)
        for memory in self.memories:
            self._check_writes(memory)
        self.lost, self._hidden, self._starting = set(), [], {}
        failed = frozenset[int]().union(*(output.invalid_block_ids for output in outputs))
        for name, blocks in self.promised.items():
            if blocks & failed:
                self.rows[name].hits[-1] = 0
        if self._late:
            *_, last = outputs
            self._late.append({name: getattr(last, name) for name in _ENDS})
            outputs[-1] = msgspec.structs.replace(last, **self._late.popleft())
        return outputs

    def _forward(self, memory: Memory, parts: Sequence[Part]) -> list[str]:
        self._check_writes(memory)
        memory.show(self._hidden)
        memory.empty(self.lost & self.free_blocks())
        driver, found = self._drivers[memory.rank], list[str]()
        for layer, name in enumerate(LAYER_NAMES if parts else ()):
            # VLLM calls them around attention alone.
            has_hooks = self._has_hooks and self.setup.windows[layer] != STATE
            if has_hooks:
                driver.wait_for_layer_load(name)
            for part in parts:
                bad = memory.attend(layer, part, self.rows.values())
                found += bad
                memory.compute(layer, part, spoiled=bool(bad))
            if has_hooks:
                driver.save_layer(name, memory.tensors[name], SimpleNamespace())
            self.after_layer()
        return found

    def _check_writes(self, memory: Memory) -> None:
        stray = memory.stray_writes({0}.union(*self.promised.values()))
        if stray:
            raise CaseEnd("wrong", f"the connector wrote to blocks {stray} unasked")

    def end_step(self, parts: Iterable[Part], loaded: Iterable[str], stats: Any) -> None:
        """Call when all ranks have reported: loads of these requests are over."""
        for part in parts:
            part.row.num_computed = part.stop
        for name in (*(part.row.ask.name for part in parts), *loaded):
            self.promised.pop(name, None)
        if stats is not None and not stats.is_empty():
            self.last_stats = stats

    # --- what the hosts differ in

    @abstractmethod
    def _build(self, connector: type[Any], options: dict[str, Any]) -> None:
        """Set `scheduler_half` and `worker_halves`."""

    def _be_rank(self, rank: int) -> None:  # noqa: B027 - one of them needs it
        """Calls that follow are a rank's."""

    @abstractmethod
    def is_busy(self) -> bool: ...

    @abstractmethod
    def free_blocks(self) -> set[int]: ...

    @abstractmethod
    def forget(self) -> None:
        """Empty the engine's own prefix cache."""

    @abstractmethod
    def _add(self, ask: Ask) -> None: ...

    @abstractmethod
    def _preempt(self) -> None: ...

    @abstractmethod
    def _abort(self, name: str) -> None: ...

    @abstractmethod
    def _step(self) -> bool:
        """Returns whether there was something to compute."""


def _shown(output: Any) -> str:
    """What a step shows of its requests."""
    new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
    shown = [(each.req_id, each.block_ids, each.num_computed_tokens) for each in new]
    known = cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
    ended = sorted(output.finished_req_ids), sorted(cached.resumed_req_ids)
    return repr((shown, known, ended, output.num_scheduled_tokens))


def describe(error: BaseException) -> str:
    """An exception in one line, with the place where it was raised."""
    where, trace = "", error.__traceback__
    while trace is not None:
        code, trace = trace.tb_frame.f_code, trace.tb_next
        where = f" ({code.co_filename.rpartition('/')[2]}, {code.co_name})"
    text = " ".join(str(error).split())[:300]
    return type(error).__name__ + (f": {text}" if text else "") + where
