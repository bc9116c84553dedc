"""The embedded engine does not use a hit of another model: it is checked before its first token."""

from __future__ import annotations

import logging
import random
import shutil

import numpy as np
import pytest

import kvferry.engine.llm as engine_llm
from kvferry.cache.build import PrefixCache
from kvferry.contract.spec import Roles
from kvferry.engine import LLM, SamplingParams
from kvferry.engine.config import EngineConfig
from kvferry.engine.connector import cache_arguments, open_roles
from kvferry.engine.model import PagedModel
from kvferry.engine.model_config import ModelConfig
from kvferry.identity import directory
from kvferry.observe import Counters
from tests.engine.test_llm import prompt
from tests.model_changes import CHANGES

pytestmark = pytest.mark.slow

CHUNK = 64
LENGTH = 1500
GREEDY = SamplingParams(max_tokens=2, ignore_eos=True, return_logits=True)


@pytest.fixture
def one_identity(monkeypatch):
    """All weights have one identity."""
    monkeypatch.setattr(directory, "weights_digest", lambda *_, **__: b"w" * 32)


@pytest.fixture
def changed(monkeypatch):
    """Makes engines that are opened from now on run a changed model."""

    def use(change):
        class Changed(PagedModel):
            def __init__(self, *args):
                super().__init__(*args)
                change(self.model)

        monkeypatch.setattr(engine_llm, "PagedModel", Changed)

    return use


def from_the_end():
    """A draw for which the last chunk of a hit is compared, not the first."""
    return 0.99


def complete(path, prompts, *, store=None, counts=None, options=None, draw=from_the_end, **config):
    """The logits of the first tokens of each prompt, and how many tokens of each were loaded."""
    found = []
    if store is not None:
        options = {"chunk_tokens": CHUNK, **(options or {})}
    counts = Counters() if counts is None else counts
    engine = EngineConfig(**config)
    arguments = cache_arguments(store, options, ModelConfig(path, engine), engine)
    roles = open_roles(None, counts)
    if arguments is not None:
        cache = PrefixCache(arguments.spec, arguments.options, counts)
        scheduler = cache.scheduler(draw=draw)
        roles = Roles(scheduler, cache.worker(), cache.close, cache.wait_ready)
    with LLM(path, roles=roles, observer=counts, **config) as llm:
        for each in prompts:
            completion = llm.generate([each], GREEDY)[0]
            found.append((completion.first_logits, completion.num_external_tokens))
        assert llm.drain(60.0)
    return found


@pytest.fixture(scope="module")
def stored_once(model_dir, tmp_path_factory):
    """The URL of a store with a prompt of the model as it is, in two dtypes."""
    url = (tmp_path_factory.mktemp("audit") / "store").as_uri()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "weights_digest", lambda *_, **__: b"w" * 32)
        for dtype in ("float32", "bfloat16"):
            path = model_dir(max_position_embeddings=4096)
            complete(path, [prompt(LENGTH)], store=url, dtype=dtype)
    return url


@pytest.fixture
def stored(stored_once, tmp_path):
    """A copy of that store: a mismatch takes a record out."""
    copy = shutil.copytree(stored_once.removeprefix("file://"), tmp_path / "copy")
    return copy.as_uri()


def assert_same(found, expected, *, limit):
    for (logits, _), (others, _) in zip(found, expected, strict=True):
        assert np.abs(logits - others).max() < limit


IN_BFLOAT16 = ("values scaled", "an adapter merged", "frequencies rounded", "attention scaled")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float32") for name in CHANGES] + [(name, "bfloat16") for name in IN_BFLOAT16],
)
@pytest.mark.usefixtures("one_identity")
def test_a_changed_model_is_found_at_its_first_hit(model_dir, stored, changed, name, dtype, caplog):
    changed(CHANGES[name])
    path = model_dir(max_position_embeddings=4096)
    longer = [prompt(LENGTH), [*prompt(LENGTH)[:900], *prompt(100, seed=5)]]
    cold = complete(path, longer, dtype=dtype)
    counts = Counters()
    with caplog.at_level(logging.WARNING):
        found = complete(path, longer, store=stored, counts=counts, dtype=dtype)
    assert counts["audit_mismatch"] >= 1
    assert counts["audits"] == counts["put_stored"] == 0
    assert_same(found, cold, limit=1e-3 if dtype == "float32" else 0.2)
    assert found[1][1] == 0
    assert caplog.text.count("computes other KV than is stored") == 1


@pytest.mark.usefixtures("one_identity")
def test_without_the_audit_it_would_be_served(model_dir, stored, changed):
    changed(CHANGES["an adapter merged"])
    path = model_dir(max_position_embeddings=4096)
    prompts = [prompt(LENGTH)]
    cold = complete(path, prompts, dtype="float32")
    found = complete(path, prompts, store=stored, options={"audit": "off"}, dtype="float32")
    assert found[0][1] == LENGTH // CHUNK * CHUNK
    with pytest.raises(AssertionError):
        assert_same(found, cold, limit=0.05)


@pytest.mark.parametrize("max_batched_tokens", [16, 50, 4096])
@pytest.mark.usefixtures("one_identity")
def test_in_small_steps_no_token_comes_of_an_unchecked_hit(
    model_dir, stored, changed, max_batched_tokens
):
    changed(CHANGES["values scaled"])
    path = model_dir(max_position_embeddings=4096)
    prompts = [prompt(LENGTH), prompt(LENGTH)]
    options = {"dtype": "float32", "max_batched_tokens": max_batched_tokens}
    cold = complete(path, prompts, **options)
    found = complete(path, prompts, store=stored, **options)
    assert_same(found, cold, limit=1e-3)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("qwen3", "float16"),
        ("gemma3_text", "bfloat16"),
        ("deepseek_v3", "bfloat16"),
        ("gpt_oss", "float16"),
    ],
)
def test_an_honest_engine_is_never_suspected(model_dir, tmp_path, arch, dtype):
    path = model_dir(arch)
    url = (tmp_path / "store").as_uri()
    prompts = [prompt(length, seed=length) for length in (70, 333, 600)]
    complete(path, prompts, store=url, dtype=dtype, max_batched_tokens=100)
    num_audits = 0
    for block_size, budget in ((16, 4096), (32, 37), (128, 200)):
        counts = Counters()
        complete(
            path,
            [each[:cut] for each in prompts for cut in (65, 130, 333, 600) if cut <= len(each)],
            store=url,
            counts=counts,
            options={"audit": 1.0},
            dtype=dtype,
            draw=random.Random(block_size).random,
            block_size=block_size,
            max_batched_tokens=budget,
            prefix_caching=False,
        )
        assert counts["audit_mismatch"] == counts["audit_failed"] == 0
        num_audits += counts["audits"]
    assert num_audits >= 21
