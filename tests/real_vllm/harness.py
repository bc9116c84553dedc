"""Starts and commands processes that run vLLM (`driver.py`), and compares their answers."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from kvferry.testing.stores.hooks import wait_until

DRIVER = Path(__file__).with_name("driver.py")
EXAMPLES = Path(__file__).parents[2] / "examples" / "cpu"
START_SECONDS = 240.0
GENERATE_SECONDS = 120.0
STOP_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Device:
    """What of an engine depends on where it runs.

    Attributes:
        env: variables of its process.
        engine: arguments of vLLM's `LLM`.
        tolerance: by how much logprobs may differ from those of another run.
    """

    env: dict[str, str]
    engine: dict[str, Any]
    tolerance: float


def device_of(name: str, dtype: str = "float32", *, graphs: bool = False) -> Device:
    """Return the settings of `cpu`, or of `cuda`, which `scripts/gpu-vllm` asks for."""
    if name not in ("cpu", "cuda"):
        raise ValueError(f"KVFERRY_TEST_DEVICE is {name!r}; it must be cpu or cuda")
    engine: dict[str, Any] = {"dtype": dtype, "enforce_eager": not graphs}
    tolerance = 1e-3 if dtype == "float32" else 0.1
    # One helper of the sampler takes 10 s to compile.
    env = {} if graphs else {"TORCHDYNAMO_DISABLE": "1"}
    if name == "cpu":
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    else:
        engine["gpu_memory_utilization"] = 0.3  # three processes have an engine at a time
    return Device(env=env, engine=engine, tolerance=tolerance)


DEVICE = device_of(
    os.environ.get("KVFERRY_TEST_DEVICE", "cpu"),
    os.environ.get("KVFERRY_TEST_DTYPE", "float32"),
    graphs=os.environ.get("KVFERRY_TEST_GRAPHS") == "1",
)
TOLERANCE = DEVICE.tolerance

CONNECTOR = {"kv_connector": "KVFerryConnector", "kv_role": "kv_both"}


class EngineError(Exception):
    """The engine raised; the message is what it said."""


class EngineHungError(Exception):
    """No answer within the deadline; the process was killed."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of one request.

    Attributes:
        tokens: generated tokens.
        logprobs: one mapping per generated token, from tokens (as text) to logprobs.
        prompt_logprobs: the same per token of the prompt, empty for the first; only if asked for.
        cached: prompt tokens that were not computed, wherever they came from.
        reason: why the request ended: length, abort, error, or none if no output ever came.
        seconds, steps: seconds and steps of the engine until the first token.
        params: parameters of the connector for the client.
    """

    tokens: list[int]
    logprobs: list[dict[str, float]]
    cached: int | None
    reason: str | None
    seconds: float | None
    steps: int | None = None
    prompt_logprobs: list[dict[str, float]] = field(default_factory=list)
    params: Any = None


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers of one `generate`, in the order of the requests.

    Attributes:
        metrics: changes of the process's metrics, by name.
    """

    answers: list[Answer]
    metrics: dict[str, float]

    @overload
    def __getitem__(self, index: int) -> Answer: ...
    @overload
    def __getitem__(self, index: slice) -> list[Answer]: ...
    def __getitem__(self, index: int | slice) -> Answer | list[Answer]:
        return self.answers[index]

    def __iter__(self) -> Iterator[Answer]:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def external(self) -> int:
        """Prompt tokens that came from the connector."""
        return int(self.metrics.get("vllm:external_prefix_cache_hits_total", 0))

    @property
    def local(self) -> int:
        """Prompt tokens that the engine had in its own prefix cache.

        They are not read from vLLM's metric, to which 0.14 adds the same tokens again in each step
        in which a request waits for its look-up.
        """
        return sum(answer.cached or 0 for answer in self.answers) - self.external

    def counted(self, *parts: str) -> float:
        """Sum of our metrics whose name holds one of `parts`, as far as steps of these requests
        brought them: see `Engine.wait_counted`."""
        return total(self.metrics, *parts)


@dataclass
class Process:
    """A process that runs engines, one after the other. A context manager.

    Attributes:
        log: file that receives the engine's log.
        env: variables beyond the environment of the tests.
        prefix: words in front of the command, to run it elsewhere.
    """

    log: Path
    env: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)

    def __enter__(self) -> Process:
        self.usable = True
        read_fd, write_fd = os.pipe()
        paths = filter(None, [os.environ.get("PYTHONPATH")])
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *paths]),  # its spec of tiers
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "vllm"),  # else it inspects each model
            "TOKENIZERS_PARALLELISM": "false",
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.prefix, sys.executable, "-u", str(DRIVER), str(write_fd)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd,),
                env=environment | DEVICE.env | self.env,
                start_new_session=True,
            )
        os.close(write_fd)
        self._answers = os.fdopen(read_fd, "rb", buffering=0)
        self._rest = b""
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=20)
        except (subprocess.TimeoutExpired, OSError):
            pass
        finally:
            self.kill()
            self._answers.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kill the process and all that it started with SIGKILL."""
        self.usable = False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=20)

    def send(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting for its answer."""
        assert self._process.stdin is not None
        line = json.dumps({"command": command, **arguments}) + "\n"
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()

    def receive(self, seconds: float) -> dict[str, Any]:
        """Return the answer to the oldest command that has none yet.

        Raises:
            EngineError: the engine raised, or its process died.
            EngineHungError: there was no answer in time; the process was killed.
        """
        until = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                self.kill()
                raise EngineHungError(f"no answer within {seconds:.0f} s\n{self.tail()}")
            data = self._answers.read(1 << 20)
            if not data:
                self.usable = False
                status = self._process.wait(timeout=20)
                raise EngineError(f"the process ended with {status}\n{self.tail()}")
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def call(self, command: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        self.send(command, **arguments)
        return self.receive(seconds)

    def tail(self, lines: int = 60) -> str:
        """The end of the engine's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    @contextmanager
    def engine(
        self, model: Path, connector: dict[str, Any] | None = None, **engine: Any
    ) -> Iterator[Engine]:
        """Run a fresh engine for the block; it has to shut down within a deadline afterwards."""
        try:
            self.start(model, connector, **engine)
            yield Engine(self)
        except BaseException:
            self.kill()  # its state is unknown
            raise
        self.call("stop", STOP_SECONDS)

    def start(self, model: Path, connector: dict[str, Any] | None = None, **engine: Any) -> None:
        """Start an engine that runs until a `stop` or the end of the process."""
        self.call("start", START_SECONDS, engine=arguments_of(model, **engine), connector=connector)


def arguments_of(model: Path, **engine: Any) -> dict[str, Any]:
    """Return the arguments of an engine."""
    common = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "block_size": 128,
        "kv_cache_memory_bytes": 128 << 20,  # small, since each engine writes every byte of it
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_logprobs": -1,
        "disable_log_stats": False,
        "seed": 0,
    }
    return common | DEVICE.engine | engine


@dataclass
class Engine:
    """The engine of a process, as long as it lives."""

    process: Process

    def generate(
        self,
        prompts: Sequence[Sequence[int] | dict[str, Any]],
        *,
        max_tokens: int = 4,
        logprobs: int = 20,
        together: bool = False,
        deadline: float = GENERATE_SECONDS,
    ) -> Answers:
        """Run prompts: token ids, or a mapping with more (see `Driver.generate`). The engine runs
        on afterwards until it is idle, as a server would."""
        self.send(
            prompts, max_tokens=max_tokens, logprobs=logprobs, together=together, deadline=deadline
        )
        answers = self.receive(deadline)
        self.settle()
        return answers

    def send(
        self,
        prompts: Sequence[Sequence[int] | dict[str, Any]],
        *,
        max_tokens: int = 4,
        logprobs: int = 20,
        together: bool = False,
        deadline: float = GENERATE_SECONDS,
    ) -> None:
        """Start to run prompts; `receive` returns the answers."""
        common = {"max_tokens": max_tokens, "logprobs": logprobs}
        requests = [
            common | (prompt if isinstance(prompt, dict) else {"token_ids": list(prompt)})
            for prompt in prompts
        ]
        self.process.send("generate", requests=requests, together=together, deadline=deadline)

    def receive(self, deadline: float = GENERATE_SECONDS) -> Answers:
        answer = self.process.receive(deadline + 10)
        return Answers(
            answers=[Answer(**result) for result in answer["results"]], metrics=answer["metrics"]
        )

    def settle(self, seconds: float = 30.0) -> None:
        """Let the engine run until it has nothing to do."""
        self.process.call("settle", seconds + 10, deadline=seconds)

    def wait_until_known(self, files: Iterable[Path], seconds: float = 60.0) -> None:
        """Wait until look-ups of this engine find these records.

        Even of its own records the scheduler hears only in a step, and 0.14 runs no step without
        requests. Records that were stored after the last step are known once the store has listed
        the directory again.
        """
        keys = [path.stem for path in files]

        def are_known() -> bool:
            return self.process.call("unknown", 30, keys=keys)["count"] == 0

        wait_until(are_known, f"all {len(keys)} records are known", seconds, interval=0.02)

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = self.process.call("metrics", 30)["metrics"]
        return found

    def wait_counted(
        self, is_so: Callable[[dict[str, float]], bool], what: str, seconds: float = 60.0
    ) -> dict[str, float]:
        """Run steps until this is so of the metrics; return them. What other threads count travels
        with the next step."""
        found = self.metrics()

        def is_counted() -> bool:
            nonlocal found
            if not is_so(found):
                self.generate([[7, 8, 9]], max_tokens=2)
                found = self.metrics()
            return is_so(found)

        wait_until(is_counted, what, seconds, interval=0.05)
        return found


def total(metrics: dict[str, float], *parts: str) -> float:
    """Sum of our metrics whose name holds one of `parts`."""
    ours = {name: value for name, value in metrics.items() if "kvferry" in name}
    return sum(value for name, value in ours.items() if any(part in name for part in parts))


class Oracle:
    """Answers as an engine without a connector gives them by its own prefix hit.

    The engine starts at the first question.
    """

    def __init__(self, model: Path, process: Process, **engine: Any) -> None:
        self._model = model
        self._process = process
        self._options = engine
        self._engine: Engine | None = None

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 4,
        logprobs: int = 20,
        **sampling: Any,
    ) -> Answers:
        """Run prompts twice, the second time with more parameters of `sampling`. Return the second
        answers, which hit all whole blocks of a prompt."""
        if self._engine is None:
            self._process.start(self._model, max_model_len=4096, **self._options)
            self._engine = Engine(self._process)
        self._engine.generate(prompts, max_tokens=1)
        asked = [{"token_ids": list(prompt), "sampling": sampling} for prompt in prompts]
        answers = self._engine.generate(asked, max_tokens=max_tokens, logprobs=logprobs)
        whole = sum((len(prompt) - 1) // 128 * 128 for prompt in prompts) * sampling.get("n", 1)
        assert answers.local == whole, "the engine's own prefix cache was too small"
        return answers

    def close(self) -> None:
        if self._engine is not None and self._process.usable:
            self._process.call("stop", STOP_SECONDS)


def kvferry(store: Path | str | list[str], policy: str = "fail", **options: Any) -> dict[str, Any]:
    """Return the connector's JSON, as an operator writes it.

    Args:
        store: a directory, a URL, or the URLs of tiers.
        policy: the `kv_load_failure_policy`.
        options: options in `kv_connector_extra_config`. By default hits are not audited, so that
            they have the same length in every process.
    """
    url = f"file://{store}" if isinstance(store, Path) else store
    return {
        **CONNECTOR,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"store": url, "audit": "off", **options},
    }


def random_prompts(seed: int, lengths: Mapping[str, Sequence[int]]) -> dict[str, list[list[int]]]:
    """Return random prompts of some lengths, by name."""
    source = random.Random(seed)
    return {
        name: [[source.randrange(3, 320) for _ in range(n)] for n in each]
        for name, each in lengths.items()
    }


def records(store: Path) -> set[Path]:
    """Return the files of the stored chunks."""
    return set((store / "records").glob("*/*.safetensors"))


def memory_of(store: Path, chunks: int) -> int:
    """Return `memory_bytes` with room for so many chunks. Once a hit has filled it, all other
    chunks come from the store."""
    return chunks * next(iter(records(store))).stat().st_size


def wait_for_records(store: Path, count: int, seconds: float = 60.0) -> set[Path]:
    """Wait until at least `count` chunks are stored; return their files."""
    wait_until(lambda: len(records(store)) >= count, f"{count} records in {store}", seconds)
    return records(store)


def largest_difference(reference: Answer, other: Answer) -> float:
    """Return the largest difference of a logprob at any position; both must list the same tokens,
    but for the last two."""
    assert len(reference.logprobs) == len(other.logprobs) > 0
    largest = 0.0
    for ours, theirs in zip(reference.logprobs, other.logprobs, strict=True):
        common = ours.keys() & theirs.keys()
        assert len(common) >= len(ours) - 2  # the last of the top ones may change places
        largest = max(largest, *(abs(ours[token] - theirs[token]) for token in common))
    return largest


def assert_same(
    reference: Iterable[Answer], others: Iterable[Answer], tolerance: float = TOLERANCE
) -> None:
    """Assert that tokens and reasons are equal, and that logprobs differ by at most `tolerance`."""
    for index, (one, other) in enumerate(zip(reference, others, strict=True)):
        assert other.reason == one.reason == "length", f"prompt {index}: ended by {other.reason}"
        assert other.tokens == one.tokens, f"prompt {index}: other tokens"
        difference = largest_difference(one, other)
        assert difference <= tolerance, f"prompt {index}: logprobs differ by {difference}"


def assert_reused(own: Answers, cold: Answers, warm: Answers, hits: list[int]) -> None:
    """Assert that both runs answer as the engine does without a connector, that the first run had
    no hit, and that the second hit so many tokens of each prompt."""
    assert_same(own, cold)
    assert_same(own, warm)
    assert cold.external == 0
    assert [answer.cached for answer in warm] == hits
    assert warm.external == sum(hits)


def expected_hit(num_tokens: int, *, chunk: int = 128, block: int = 128) -> int:
    """Return how many tokens of a prompt hit, if an equal prompt was stored before."""
    whole = min(num_tokens // chunk * chunk, num_tokens - 1)
    return max(0, whole // block * block)
