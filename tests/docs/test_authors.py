"""The pages for authors of stores and engines: their examples pass what the pages promise."""

from __future__ import annotations

import importlib.util
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.engine import LLM, SamplingParams
from kvferry.observe import Observer
from kvferry.store import url as store_url
from kvferry.store.kind import Opening, ServerBounds, StoreUrl
from kvferry.testing.models import make_tiny_model
from kvferry.testing.stores import ProbeTests, RemoteStoreTests, ScanTests
from tests.tokenizers import save_tiny_tokenizer

ROOT = Path(__file__).parents[2]
PROMPT = [3 + number * number % 80 for number in range(700)]
PATIENT = ServerBounds(call_seconds=120, probe_seconds=120, quick_seconds=120)


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


sqlite_store = example("sqlite_store")


class TestSqliteStore(ScanTests, ProbeTests, RemoteStoreTests):
    persistent = True

    def make_store(self, tmp_path, *, max_bytes=None, observer=None):
        url = StoreUrl(scheme="sqlite", path=f"{tmp_path}/kv.db")
        opening = Opening(observer=observer or Observer(), bounds=PATIENT)
        return sqlite_store.KIND.open(url, sqlite_store.SqliteOptions(), opening)

    def ask(self, store, query, *values):
        with closing(sqlite3.connect(store.url.partition("://")[2], timeout=120)) as database:
            rows = database.execute(query, values).fetchall()
            database.commit()
        return rows

    def poke(self, store, key, value):
        name = store.name_of(key)
        self.ask(store, "DELETE FROM kv WHERE name = ?", name)
        if value is not None:
            self.ask(store, "INSERT INTO kv VALUES (?, ?, 0)", name, value)

    def peek(self, store, key):
        found = self.ask(store, "SELECT value FROM kv WHERE name = ?", store.name_of(key))
        return found[0][0] if found else None


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tiny_tokenizer(make_tiny_model(path, max_position_embeddings=4096))
    return path


def until_one_hits(run):
    """Run engines, one after the other, until one reads something: the first hit of a process may
    be computed to be compared, and a machine that stalls makes misses. Return all answers."""
    answers = [run()]
    while len(answers) < 16 and not answers[-1][0]:
        answers.append(run())
    return answers


def run_embedded(model_dir, store, prompt):
    with LLM(model_dir, store=store) as llm:
        [answer] = llm.generate([prompt], SamplingParams(max_tokens=4))
        llm.drain(120.0)
    return answer.num_external_tokens, answer.token_ids


@pytest.mark.slow
def test_an_engine_opens_the_store_by_its_url(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(store_url, "MODULES", {**store_url.MODULES, "sqlite": "sqlite_store"})
    store = f"sqlite://{tmp_path}/kv.db"
    answers = until_one_hits(lambda: run_embedded(model_dir, store, PROMPT))
    assert answers[0][0] == 0
    assert answers[-1][0] >= 128
    assert {tokens for _, tokens in answers} == {answers[0][1]}


@pytest.mark.slow
def test_the_engine_reads_what_it_stored_and_so_does_the_embedded_engine(model_dir, tmp_path):
    own_engine = example("own_engine")
    store = (tmp_path / "store").as_uri()

    def run_own():
        engine = own_engine.Engine(model_dir, store, strict=True)
        hit, request = engine.generate("request", PROMPT, 4)
        engine.close()
        return hit, tuple(request.all_token_ids[len(PROMPT) :])

    answers = until_one_hits(run_own)
    assert answers[0][0] == 0
    assert answers[-1][0] >= 128
    answers += until_one_hits(lambda: run_embedded(model_dir, store, PROMPT))
    assert answers[-1][0] >= 128
    assert {tokens for _, tokens in answers} == {answers[0][1]}


def test_the_page_for_engine_authors_explains_each_step_of_the_example():
    page = (ROOT / "docs/engine-authors.md").read_text(encoding="utf-8")
    code = (ROOT / "examples/own_engine.py").read_text(encoding="utf-8")
    assert re.findall(r"^\| ([A-Z]) \|", page, re.MULTILINE) == list("ABCDEFGH")
    assert set(re.findall(r"# ([A-Z]): ", code)) == set("ABCDEFGH")
