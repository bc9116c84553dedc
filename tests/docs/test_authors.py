"""The pages for authors of stores and engines: their examples pass what the pages promise."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.engine import LLM, SamplingParams
from kvferry.observe import Observer
from kvferry.store import kinds
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


@pytest.fixture
def package(tmp_path):
    """The page's package, as an installer leaves it."""
    page = (ROOT / "docs/store-authors.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    project = tomllib.loads(block)["project"]
    site = tmp_path / "site"
    about = site / f"my_store-{project['version']}.dist-info"
    about.mkdir(parents=True)
    shutil.copy(ROOT / "examples" / "sqlite_store.py", site)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    [(group, points)] = project["entry-points"].items()
    lines = [f"{name} = {value}" for name, value in points.items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    return site


@pytest.mark.slow
def test_an_engine_opens_the_store_by_its_url(model_dir, tmp_path, package, monkeypatch):
    monkeypatch.syspath_prepend(package)
    importlib.invalidate_caches()
    kinds._installed.cache_clear()
    store = f"sqlite://{tmp_path}/kv.db"
    try:
        answers = until_one_hits(lambda: run_embedded(model_dir, store, PROMPT))
    finally:
        kinds._installed.cache_clear()
    assert answers[0][0] == 0
    assert answers[-1][0] >= 128
    assert {tokens for _, tokens in answers} == {answers[0][1]}


def test_commands_open_the_store_of_an_installed_package(tmp_path, package):
    """In processes of their own, which know of it by nothing but its metadata."""
    store = f"sqlite://{tmp_path}/kv.db"

    def run(*arguments):
        path = os.pathsep.join([str(package), *sys.path])
        ran = subprocess.run(
            [sys.executable, "-m", "kvferry.cli", *arguments],
            env={**os.environ, "PYTHONPATH": path},
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return ran.returncode, ran.stdout + ran.stderr

    for command in ("doctor", "ls"):
        code, said = run(command, store)
        assert code == 0, said
    code, said = run("doctor", store.replace("sqlite", "sqlit"))
    assert code != 0
    assert "did you mean 'sqlite'?" in said


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
