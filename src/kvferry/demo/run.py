"""Runs `kvferry demo`: three phases, each in a new process with the engine's prefix cache off.

Cold: every question is computed, with a fresh store. Warm: a new process answers all questions with
the store that the first question filled. Corrupted: another new process answers the first question,
after one byte of one record was flipped on disk.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from kvferry.demo.child import DemoProcess
from kvferry.engine import LLM, SamplingParams
from kvferry.engine import model as engine_model
from kvferry.errors import ConfigError, KVError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RUN_DIR = "kvferry-demo-run"

DOCUMENT_TOKENS = 3050
"""The document is cut to so many: a small machine computes them in about ten seconds."""

_ANSWER_TOKENS = 24
_CHUNK_TOKENS = 128

_WARM_UP_TOKENS = 12
"""Less than a usual chunk, so not stored. Keeps the cost of a first forward out of the figures."""

MAX_LOGIT_DIFF = 1e-3
"""Most that logits may differ in float32. Correct reuse differs by some 1e-5, because prompts that
are computed in other parts round differently; a single wrong block differs by more than 1."""

Advance = Callable[[str], None]

QUESTIONS = (
    "When is the finally clause executed?",
    "What does the with statement do?",
    "What happens if an exception is not handled?",
)
"""Asked about the document, in this order."""

_TOPICS = (
    "with", "try", "raise", "assert", "import", "class", "function", "for", "yield", "return",
    "calls", "naming", "execmodel", "types",
)  # fmt: skip


# --- the prompts ----------------------------------------------------------------------------------


def default_document() -> str:
    """Return chapters of the Python reference that come with CPython. Raises ConfigError if this
    Python has no `pydoc_data`."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError("this Python comes without pydoc_data; use another one") from error
    return "\n\n".join(topics[name].strip() for name in _TOPICS if name in topics)


def load_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model directory. Raises ConfigError without one, or a model."""
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"{model_dir} is not a model directory: it has no config.json")
    tokenizer: PreTrainedTokenizerBase | None = engine_model.load_tokenizer(model_dir)
    if tokenizer is None:
        raise ConfigError(f"{model_dir} has no tokenizer")
    return tokenizer


def make_prompts(
    tokenizer: PreTrainedTokenizerBase, text: str, num_tokens: int, questions: Sequence[str]
) -> list[list[int]]:
    """Make one prompt per question, in the chat template: the document first, cut to `num_tokens`,
    and the question last, so that they start alike."""
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    document = str(tokenizer.decode(token_ids[:num_tokens]))
    start = f"Read this text.\n\n{document}\n\nQuestion about the text: "
    end = " Answer in one short sentence."
    texts = [f"{start}{question}{end}" for question in questions]
    return [engine_model.encode_message(tokenizer, text) for text in texts]


# --- the three phases -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The prompts, the model, and where files go.

    Attributes:
        prompts: token ids, one list for each of `QUESTIONS`; they start alike.
        work_dir: directory in which `RUN_DIR` is replaced.
    """

    model_dir: Path
    prompts: Sequence[list[int]]
    work_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """The answer to one prompt.

    Attributes:
        hit_tokens: tokens of the prompt that were read from the store instead of computed.
        ttft_seconds: time from the request to its first token.
        logits: `[vocab]` float32, of the first generated position.
    """

    prompt_tokens: int
    hit_tokens: int
    ttft_seconds: float
    token_ids: tuple[int, ...]
    text: str
    logits: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The answers to one question: with the whole prompt computed, and with the store."""

    question: str
    cold: TimedAnswer
    reused: TimedAnswer

    @property
    def speedup(self) -> float:
        return self.cold.ttft_seconds / self.reused.ttft_seconds

    @property
    def tokens_equal(self) -> bool:
        return self.cold.token_ids == self.reused.token_ids

    @property
    def max_abs_logit_diff(self) -> float:
        """Largest difference of a logit. Greedy text can agree while the KV cache is wrong."""
        difference = np.abs(self.cold.logits - self.reused.logits)
        # NaN counts as a difference; JSON has no infinity.
        return float(np.nan_to_num(difference, nan=np.finfo(difference.dtype).max).max())


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the three phases showed.

    Attributes:
        model: name of the model's directory.
        warm: every question, answered from the store.
        corrupted: the first question, answered from the store with a corrupted record.
        quarantined: records that were taken out of the store.
        store: URL of the store, left in place for the other commands.
    """

    model: str
    warm: list[Comparison]
    corrupted: Comparison
    quarantined: int
    store: str

    def median(self, name: str) -> float:
        """Return the median of a field of the answers from the store."""
        return float(median(getattr(run.reused, name) for run in self.warm))

    @property
    def cold_ttft_seconds(self) -> float:
        """Median time to first token over the questions, with all tokens computed."""
        return median(run.cold.ttft_seconds for run in self.warm)

    @property
    def warm_ttft_seconds(self) -> float:
        """The same in a new process with the store."""
        return self.median("ttft_seconds")

    @property
    def speedup(self) -> float:
        return self.cold_ttft_seconds / self.warm_ttft_seconds

    @property
    def max_abs_logit_diff(self) -> float:
        """The largest over all questions and phases."""
        return max(run.max_abs_logit_diff for run in [*self.warm, self.corrupted])

    @property
    def tokens_equal(self) -> bool:
        """Whether no answer changed, in any phase."""
        return all(run.tokens_equal for run in [*self.warm, self.corrupted])

    def faults(self) -> list[str]:
        """What was wrong; empty if reuse changed nothing and the corrupted record was found."""
        faults = []
        if not self.tokens_equal:
            faults.append("an answer changed")
        if not self.max_abs_logit_diff <= MAX_LOGIT_DIFF:
            faults.append(f"logits differ by {self.max_abs_logit_diff:.1e}")
        if self.quarantined != 1:
            faults.append(f"{self.quarantined} records quarantined instead of 1")
        return faults


def run_demo(options: DemoOptions, advance: Advance) -> DemoResult:
    """Run all three phases; `advance` is called with the name of the phase after every answer.

    Raises:
        ConfigError: the model or a directory cannot be used.
        KVError: a phase failed, or the store holds no record to corrupt.
    """
    root = options.work_dir / RUN_DIR
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    store, others = root / "store", [root / f"cold-{n}" for n in range(1, len(options.prompts))]
    url, *other_urls = (each.resolve().as_uri() for each in [store, *others])
    cold = _run_phase("cold", options, [url, *other_urls], advance)
    for other in others:
        shutil.rmtree(other)
    warm = _run_phase("warm", options, [url] * len(cold), advance)
    _flip_byte(_middle_record(store, options))
    [corrupted] = _run_phase("corrupted", options, [url], advance)
    return DemoResult(
        model=options.model_dir.resolve().name,
        warm=[
            Comparison(question=question, cold=computed, reused=read)
            for question, computed, read in zip(QUESTIONS, cold, warm, strict=False)
        ],
        corrupted=Comparison(question=QUESTIONS[0], cold=cold[0], reused=corrupted),
        quarantined=len(list((store / "quarantine").glob("*"))),
        store=url,
    )


def _run_phase(
    name: str, options: DemoOptions, stores: Sequence[str], advance: Advance
) -> list[TimedAnswer]:
    """Let a new process answer the first prompts, each with the store at its URL in `stores`. Call
    `advance` after each answer."""
    answers: list[TimedAnswer] = []
    with DemoProcess(f"the {name} phase", _answer_all, options, stores) as child:
        for _ in stores:
            answers.append(child.receive())
            advance(name)
    return answers


def _answer_all(options: DemoOptions, stores: Sequence[str], answers: Connection) -> None:
    """Send each answer, computed in float32, once it is there; an error is sent last.

    Runs in: the process of a phase.
    """
    logging.getLogger().addHandler(logging.NullHandler())  # the report has all that matters
    with closing(answers):
        try:
            # Prompts with the same store share an engine, whose own prefix cache is off.
            prompts = iter(options.prompts)
            for store, same in itertools.groupby(stores):
                _answer_from(options, store, [next(prompts) for _ in same], answers)
        except KVError as error:
            answers.send(error)


def _answer_from(
    options: DemoOptions, store: str, prompts: Sequence[list[int]], answers: Connection
) -> None:
    params = SamplingParams(max_tokens=_ANSWER_TOKENS, return_logits=True)
    # Every answer is compared with a cold one, so no hit is computed again for an audit.
    connector_options = {"chunk_tokens": _CHUNK_TOKENS, "audit": "off"}
    with LLM(
        options.model_dir,
        store=store,
        connector_options=connector_options,
        dtype="float32",
        prefix_caching=False,
    ) as llm:
        llm.generate([prompts[0][:_WARM_UP_TOKENS]], SamplingParams(max_tokens=2))
        for prompt in prompts:
            [found] = llm.generate([prompt], params)
            if found.first_logits is None or found.ttft_seconds is None:
                raise KVError("the engine ended a request before its first token")
            answers.send(
                TimedAnswer(
                    prompt_tokens=len(prompt),
                    hit_tokens=found.num_external_tokens,
                    ttft_seconds=found.ttft_seconds,
                    token_ids=found.token_ids,
                    text=found.text or "",
                    logits=found.first_logits,
                )
            )


def _middle_record(store: Path, options: DemoOptions) -> Path:
    """Find the record in the middle of what all prompts share, by the headers: records are
    safetensors files, so none of our own code is needed to read them."""
    columns = zip(*options.prompts, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    wanted = str(shared // _CHUNK_TOKENS // 2 * _CHUNK_TOKENS)
    for path in sorted((store / "records").glob("*/*.safetensors")):
        with safe_open(path, framework="numpy") as record:
            if record.metadata()["first_token"] == wanted:
                return path
    raise KVError(f"{store} holds no record of the tokens from {wanted} on; was it filled?")


def _flip_byte(path: Path) -> None:
    with path.open("r+b") as file:
        at = path.stat().st_size * 3 // 4  # well within the payload
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
