"""What it costs to keep states: starts of `StoredKV`, first tokens, and bytes.

A random model in the shape of Qwen3.5-0.8B (18 layers with states, 6 with attention; fewer rows of
vocabulary, float32) computes a long prompt, stores it and reads it. The limits are the model
without a store, and a plain read of the files.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from benchmarks import Options
from benchmarks.limits import timed
from benchmarks.report import Row
from kvferry.adapters.transformers import StoredKV
from kvferry.adapters.transformers.cache_copies import TreeForm
from kvferry.engine.model import quiet_transformers
from kvferry.observe import Counters
from kvferry.testing.models import write_random_model

SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
}

QUICK = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

Cells = dict[str, str | int | float | None]


def run(options: Options) -> Sequence[Row]:
    """Return a row for the first start, with its proof, and one for later starts; then one for each
    way to the first token, with its share of computing it; then one for the stored bytes. All but
    the first are medians of rounds, by turns."""
    num_tokens, rounds = (300, 1) if options.quick else (3000, options.rounds or 3)
    model = _model(options)
    generator = torch.Generator().manual_seed(options.seed)
    prompt = torch.randint(3, SHAPE["vocab_size"], (1, num_tokens), generator=generator)
    store, counts = options.directory / "store", Counters()
    open_kv = partial(StoredKV, model, store.as_uri())
    started = time.perf_counter()
    kv = open_kv(observer=counts)
    first_start = time.perf_counter() - started
    with kv:
        stored = timed(lambda: _first_token(kv, prompt)).wall
        assert isinstance(kv._form, TreeForm)
        tree = kv._form.tree
    seconds = _rounds(model, prompt, open_kv, _files(store), rounds)
    cold = seconds["no store"]
    proof = counts.snapshot()["proof_seconds"]
    rows: list[Cells] = [
        {"case": "first start", "seconds": first_start, "proof_seconds": proof},
        {"case": "later start", "seconds": seconds.pop("start")},
        {"case": "computed and stored", "seconds": stored, "of_computing": stored / cold},
    ]
    rows += [
        {"case": case, "seconds": each, "of_computing": each / cold}
        for case, each in seconds.items()
    ]
    kv_bytes = sum(each.num_bytes for each in tree.components) / tree.chunk_tokens
    rows.append(
        {
            "case": "bytes",
            "kv_bytes_a_token": int(kv_bytes),
            "state_bytes": tree.state_bytes,
            "state_in_tokens_of_kv": tree.state_bytes / kv_bytes,
            "tokens_between_states": tree.snapshot_tokens,
            "stored_bytes": sum(each.stat().st_size for each in _files(store)),
            "prompt_tokens": num_tokens,
        }
    )
    return rows


def _rounds(
    model: Any,  # noqa: ANN401 - Transformers' own
    prompt: torch.Tensor,
    open_kv: Callable[..., StoredKV],
    files: Sequence[Path],
    rounds: int,
) -> dict[str, float]:
    """Return the median seconds of each case."""
    found: dict[str, list[float]] = {}

    def note(case: str, work: Callable[[], object]) -> None:
        found.setdefault(case, []).append(timed(work).wall)

    for _ in range(rounds):
        note("no store", lambda: _first_token(model, prompt))
        started = time.perf_counter()
        kv = open_kv()
        found.setdefault("start", []).append(time.perf_counter() - started)
        with kv:
            note("first hit, audited", partial(_first_token, kv, prompt))
            note("later hit", partial(_first_token, kv, prompt))
        note("plain read of the files", lambda: [each.read_bytes() for each in files])
    return {case: statistics.median(each) for case, each in found.items()}


def _first_token(by: Any, prompt: torch.Tensor) -> None:  # noqa: ANN401 - a model or a StoredKV
    mask = torch.ones_like(prompt)
    by.generate(prompt, attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=0)


def _files(store: Path) -> list[Path]:
    return sorted(store.glob("records/*/*.safetensors"))


def _model(options: Options) -> Any:  # noqa: ANN401 - Transformers' own
    shape = {**SHAPE, **QUICK} if options.quick else SHAPE
    config = Qwen3_5TextConfig(**shape)
    with quiet_transformers():
        path = write_random_model(
            options.directory / "model",
            partial(AutoModelForCausalLM.from_config, config),
            options.seed,
        )
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
