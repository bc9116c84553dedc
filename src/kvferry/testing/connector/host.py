"""What the kit's two hosts have in common: requests, one rank's forward, a watch on look-ups.

The scheduler is an engine's own (`vllm_host`, `own_host`); only the model is made up (`content`).
"""

# ruff: noqa: ANN401 - connectors and their requests are of any class

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, NoReturn

from kvferry.testing.connector.content import (
    ComputedPart,
    Group,
    Memory,
    RequestRow,
    Shape,
    layer_name,
)

HEADS, HEAD_DIM, LAYERS = 2, 8, 2
IDLE_SECONDS = 0.002
KILLED = 91
"""Exit status of a process that a case ended."""


class RuleBrokenError(Exception):
    """The connector gave wrong KV, or did what a host cannot live with."""


class MissedError(Exception):
    """Nothing wrong, but nothing reused where the rule expects it."""


class EngineDeadError(Exception):
    """An exception of the connector, or of the scheduler about it, reached the engine."""


class RefusedError(Exception):
    """The connector, or the host for it, did not start in this configuration."""


class NotHereError(Exception):
    """This host, or this class, cannot do what the case needs."""


class Item(NamedTuple):
    """An image of a prompt. Its tokens are all the same placeholder."""

    name: str
    offset: int
    length: int = 8


class LoraAdapter(NamedTuple):
    """A LoRA adapter. `content`: what its files hold."""

    name: str
    number: int
    path: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request. `embeds`, the seed of prompt embeddings, replaces the tokens. `grows`: it is a
    session that takes more tokens when it has answered."""

    name: str
    tokens: tuple[int, ...]
    max_tokens: int = 1
    salt: str | None = None
    adapter: LoraAdapter | None = None
    items: tuple[Item, ...] = ()
    embeds: int | None = None
    grows: bool = False

    def row(self, model: str) -> RequestRow:
        """The request as a model runner sees it before it has blocks."""
        content = self.adapter and self.adapter.content
        shown = {
            item.offset + place: place + int.from_bytes(item.name.encode()) + 1
            for item in self.items
            for place in range(item.length)
        }
        identity = repr((model, self.salt, content, self.embeds))
        return RequestRow(self.name, identity, list(self.tokens), shown)


@dataclass
class Answer:
    """What became of a request. `hits`: tokens that the connector brought, by admission; `reason`:
    why it ended."""

    ask: Ask
    hits: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None

    @property
    def hit(self) -> int:
        return self.hits[0] if self.hits else 0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a host runs.

    Attributes:
        directory: of the model; `identity` is what decides its KV.
        budget: most tokens of a step.
        in_flight: steps that are scheduled before the first one's results are in.
        runner: 1 or 2: vLLM's model runners show steps differently.
        hooks: whether hooks are called around layers, even of a class that does not ask for
            piecewise graphs; replayed graphs call none.
        attention_metadata: whether connectors see it; in replayed graphs there is none.
        late_rank: steps by which the last rank's reports of ended transfers come later.
        windows: by layer.
    """

    directory: str
    identity: str
    block_size: int = 16
    num_blocks: int = 64
    budget: int = 512
    ranks: int = 1
    in_flight: int = 1
    runner: int = 1
    hooks: bool = True
    attention_metadata: bool = True
    late_rank: int = 0
    dtype: str = "float32"
    windows: tuple[int | None, ...] = (None,) * LAYERS

    def shape(self, *, keys_across: bool = False) -> Shape:
        """The memory of one rank."""
        groups = [
            Group(tuple(i for i, each in enumerate(self.windows) if each == window), window)
            for window in dict.fromkeys(self.windows)
        ]
        heads = HEADS // self.ranks
        size = self.num_blocks, self.block_size
        return Shape(tuple(groups), *size, heads, 2 * HEAD_DIM, self.dtype, keys_across)


class LookupWatch:
    """Stands between a host and its connector's scheduler half: checks what look-ups answer, notes
    what is promised, and lets a case withhold answers.

    Attributes:
        hold: requests whose look-ups are answered "ask again".
        wanted: by request, the hit without which "ask again" is answered while there is hope.
        refuse: the host takes no hit.
        waits: the last look-up was answered "ask again" in this hope, which ends in time.
        around: entered around each look-up.
        promised: blocks that the connector may write, by request.
        after_promise: called once the connector knows where to load to.
    """

    def __init__(self, connector: Any, host: KitHost) -> None:
        self.hold: set[str] = set()
        self.wanted: dict[str, int] = {}
        self.refuse = False
        self.waits = False
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.promised: dict[str, set[int]] = {}
        self.after_promise: Callable[[], None] = lambda: None
        self._host = host
        self._answers: dict[str, tuple[int, bool]] = {}  # local tokens, is the load async
        self._lookup = connector.get_num_new_matched_tokens
        self._update = connector.update_state_after_alloc
        connector.get_num_new_matched_tokens = self.lookup
        connector.update_state_after_alloc = self.update

    def lookup(self, request: Any, num_local: int) -> tuple[int | None, bool]:
        name = request.request_id
        before = (list(request.all_token_ids), request.num_computed_tokens)
        with self.around():
            answer = self._lookup(request, num_local)
        if before != (list(request.all_token_ids), request.num_computed_tokens):
            raise RuleBrokenError("a look-up changed the request")
        said = f"look-up of {name} ({request.num_tokens} tokens, {num_local} local): {answer}"
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise RuleBrokenError(f"{said}: not a pair of a count and whether it is async")
        count, is_async = answer
        hopes = count is not None and num_local + count < self.wanted.get(name, 0)
        self.waits = hopes and self._host.is_hopeful()
        if count is None or name in self.hold or self.waits:
            return None, False
        if count < 0:
            raise RuleBrokenError(f"{said}: a negative count, which vLLM takes as it is")
        if count == 0 and is_async:
            raise EngineDeadError(f"{said}: vLLM asserts that an async load brings something")
        if num_local + count > request.num_tokens - (0 if is_async else 1):
            raise EngineDeadError(f"{said}: vLLM asserts that the prompt has so many tokens")
        if not is_async and count % self._host.setup.block_size:
            raise RuleBrokenError(f"{said}: ends within a block, so no failure can be reported")
        self._answers[name] = num_local, bool(is_async)
        return (0, False) if self.refuse else (count, bool(is_async))

    def update(self, request: Any, blocks: Any, num_external: int) -> None:
        name, size = request.request_id, self._host.setup.block_size
        local, is_async = self._answers.get(name, (0, False))
        if num_external:
            first, last = local // size, -(-(local + num_external) // size)
            tables = blocks.get_block_ids()
            self.promised[name] = {b for table in tables for b in table[first:last]} - {0}
            for memory in self._host.memories:
                memory.empty(self.promised[name])
            if self._host.marks_local_blocks and not is_async:
                self._host.marked = sorted({b for t in tables for b in t[:first]} - {0})
        if num_external or not is_async:  # else the second call after an async load
            self._host.answers[name].hits.append(num_external)
        if not num_external:
            self._answers.pop(name, None)
        self._update(request, blocks, num_external)
        if num_external:
            self.after_promise()

    def is_loading(self) -> bool:
        """Whether async loads are under way."""
        return any(self._answers.get(name, (0, False))[1] for name in self.promised)


class KitHost(ABC):
    """An engine's scheduler with a connector and a made-up model.

    Attributes:
        answers, rows: by request name.
        memories, worker_halves: by rank.
        last_stats: what the connector reported last, if it was not empty.
        is_hopeful: whether a look-up may still find more than now.
        after_layer: called after each layer's hooks.
        marks_local_blocks: whether blocks of local hits are watched while sync loads run.
    """

    keys_across: ClassVar[bool] = False

    def __init__(self, setup: Setup, *, has_hooks: bool) -> None:
        self.setup = setup
        self.answers: dict[str, Answer] = {}
        self.rows: dict[str, RequestRow] = {}
        shape = setup.shape(keys_across=self.keys_across)
        self.memories = [Memory(shape, rank) for rank in range(setup.ranks)]
        self.last_stats: Any = None
        self.is_hopeful: Callable[[], bool] = lambda: False
        self.after_layer: Callable[[], None] = lambda: None
        self.marks_local_blocks = False
        self.marked: list[int] = []
        self.lost: set[int] = set()
        self.has_hooks = has_hooks
        self.watch: LookupWatch
        self.scheduler_half: Any = None
        self.worker_halves: list[Any] = []

    # What cases do.

    def add(self, ask: Ask) -> Answer:
        """Queue a request, or more tokens of a session."""
        answer = self.answers.setdefault(ask.name, Answer(ask))
        self.rows.setdefault(ask.name, ask.row(self.setup.identity))
        with self.blamed():
            self._add(ask)
        return answer

    def step(self, count: int = 1) -> None:
        """Run steps of the engine.

        Raises:
            RuleBrokenError, EngineDeadError: the connector's fault.
        """
        for _ in range(count):
            with self.blamed():
                has_tokens = self._step()
            if not has_tokens:
                time.sleep(IDLE_SECONDS)

    def abort(self, name: str) -> None:
        if self.answers[name].reason is None:
            with self.blamed():
                self._abort(name)
            self.answers[name].reason = "abort"

    def run(self, max_steps: int = 6_000) -> None:
        """Step until every request has ended and nothing is under way."""
        while self.is_busy():
            self.watch.waits = False
            self.step()
            max_steps -= not self.watch.waits
            if not max_steps:
                names = [name for name, answer in self.answers.items() if answer.reason is None]
                waits = f"requests {names}" if names else "an end that the connector must report"
                raise RuleBrokenError(f"the engine steps for ever, waiting for {waits}")
        leaked = self.setup.num_blocks - 1 - len(self.free_blocks())
        if leaked:
            raise RuleBrokenError(f"{leaked} blocks are held though no request is left")
        for answer in self.answers.values():
            if answer.reason == "length" and not answer.ask.grows:
                row = answer.ask.row(self.setup.identity)
                start = len(row.tokens)
                right = [row.next_token(start + i) for i in range(answer.ask.max_tokens)]
                if answer.tokens != right:
                    raise RuleBrokenError(f"{row.name} got tokens {answer.tokens}, not {right}")

    def close(self) -> None:
        """Shut both halves of the connector down."""
        with self.blamed():
            for half in (*self.worker_halves, self.scheduler_half):
                half.shutdown()

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Turn exceptions of what is run inside into the end of the engine."""
        try:
            yield
        except (RuleBrokenError, EngineDeadError, NotHereError):
            raise
        except Exception as error:
            raise EngineDeadError(describe(error)) from error

    # A step.

    def forward(
        self,
        memory: Memory,
        parts: Sequence[ComputedPart],
        wait: Callable[[str], Any],
        save: Callable[[str, Any], Any],
    ) -> list[str]:
        """Compute the parts of a step on one rank. `wait` and `save` are the layer hooks."""
        found: list[str] = []
        rewritten = memory.unmark(self.marked)
        if rewritten:
            raise RuleBrokenError(f"a load wrote blocks {rewritten} of a local hit")
        self._check_writes(memory)
        memory.empty(self.lost & self.free_blocks())
        for layer in memory.shape.layers if parts else ():
            if self.has_hooks:
                wait(layer_name(layer))
            for part in parts:
                bad = memory.attend(layer, part, self.rows.values())
                found += bad
                memory.compute(layer, part, spoiled=bool(bad))
            if self.has_hooks:
                save(layer_name(layer), memory.tensors[layer_name(layer)])
            self.after_layer()
        return found

    def judge(self, found: Sequence[str], invalid: set[int]) -> None:
        """Raise RuleBrokenError for wrong KV of which no failure was reported, or blocks that the
        connector wrote without leave. After a failure was reported, later KV is wrong, too."""
        if found and not invalid:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise RuleBrokenError(found[0] + more)
        for memory in self.memories:
            self._check_writes(memory)
        self.lost = set()

    def _check_writes(self, memory: Memory) -> None:
        stray = memory.stray_writes({0}.union(*self.watch.promised.values()))
        if stray:
            raise RuleBrokenError(f"the connector wrote to blocks {sorted(stray)} unasked")

    def end_step(self, arrived: Iterable[str], stats: Any) -> None:
        """Call when all ranks have reported: loads of these requests are over."""
        self.marked = []
        for name in arrived:
            self.watch.promised.pop(name, None)
        if stats is not None and not stats.is_empty():
            self.last_stats = stats

    # What the hosts differ in.

    @abstractmethod
    def is_busy(self) -> bool: ...

    @abstractmethod
    def free_blocks(self) -> set[int]: ...

    @abstractmethod
    def forget(self) -> None:
        """Empty the engine's own prefix cache."""

    def preempt(self) -> None:
        """Take the blocks of all running requests. The next step overwrites them."""
        rows = [self.rows[name] for name, answer in self.answers.items() if answer.reason is None]
        self.lost = {block for row in rows for table in row.tables for block in table}
        with self.blamed():
            self._preempt()

    @abstractmethod
    def _add(self, ask: Ask) -> None: ...

    @abstractmethod
    def _preempt(self) -> None: ...

    @abstractmethod
    def _abort(self, name: str) -> None: ...

    @abstractmethod
    def _step(self) -> bool:
        """Returns whether there was something to compute."""


def die() -> NoReturn:
    """End this process as a crash would, without any clean-up."""
    os._exit(KILLED)


def describe(error: BaseException) -> str:
    """An exception in one line, with the place where it was raised."""
    where, trace = "", error.__traceback__
    while trace is not None:
        code, trace = trace.tb_frame.f_code, trace.tb_next
        where = f" ({code.co_filename.rpartition('/')[2]}, {code.co_name})"
    text = " ".join(str(error).split())[:300]
    return type(error).__name__ + (f": {text}" if text else "") + where
