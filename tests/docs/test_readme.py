"""The front door: code blocks run, links lead somewhere, tables say what is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from kvferry.cli.main import build_app
from kvferry.contract.messages import LookupMiss
from kvferry.store.file import FileOptions
from kvferry.store.servers.valkey import ValkeyOptions
from kvferry.testing.models import make_tiny_model
from tests.tokenizers import save_tiny_tokenizer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODEL = ".demo/SmolLM2-135M-Instruct"
OPERATE = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
STORES = (ROOT / "docs" / "stores.md").read_text(encoding="utf-8")

CONNECTOR = """
from kvferry.v1 import KVConnectorBase_V1, KVConnectorMetadata

class MyConnector(KVConnectorBase_V1):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass
"""

COUNT = f"""
from pathlib import Path
from prometheus_client import generate_latest
from kvferry.engine import LLM

store = (Path.home() / ".cache/kvferry/readme").as_uri()
with LLM({MODEL!r}, store=store, observer=counters) as llm:
    llm.generate(["The clause was executed. " * 40])
print(generate_latest(REGISTRY).decode())
"""


def _python(*arguments: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:kvferry", *arguments],
        cwd=cwd, env=os.environ | {"HOME": str(cwd)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A home, and a clone in which `make demo` has made its model."""
    place = tmp_path_factory.mktemp("place")
    for model_dir in (place / MODEL, place / "path/to/model"):
        make_tiny_model(model_dir, max_position_embeddings=16384)
        save_tiny_tokenizer(model_dir)
    (place / "docs").mkdir()
    (place / "docs/transformers.md").write_text("The clause was executed. " * 40)
    return place


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_the_code_of_the_readme_runs_and_its_second_run_reads(place, run_here):
    [generate] = blocks_of(ROOT / "README.md")
    [count] = blocks_of(ROOT / "docs/stores.md")
    first = run_here(generate, cwd=place)
    second = _python("-c", generate, cwd=place)
    assert first.startswith("0 of ")
    tokens = int(re.match(r"(\d+) of", second)[1])
    assert tokens > 0
    assert tokens % 128 == 0
    counted = run_here(count + COUNT, cwd=place)
    [looked_up] = re.findall(r"\nkvferry_lookup_tokens_total (\d\S*)", counted)
    assert float(looked_up) >= 128


@pytest.mark.slow
@pytest.mark.parametrize("page", ["engine.md", "v1-connectors.md"])
def test_the_code_of_the_engine_pages_runs(place, run_here, page):
    [code] = blocks_of(ROOT / "docs" / page)
    (place / "my_package.py").write_text(CONNECTOR)
    assert run_here(code.replace("/var/cache", str(place / "cache")), cwd=place).strip()


def test_no_other_page_has_code_that_is_not_run():
    run_elsewhere = {"transformers.md"}
    run_here = {"README.md", "stores.md", "engine.md", "v1-connectors.md"}
    assert {page.name for page in PAGES if blocks_of(page)} == run_here | run_elsewhere


def _told_to_users() -> Iterator[tuple[str, str]]:
    """Yield all that users read, by file: pages, code with its messages, examples, rules."""
    folders = ("src", "docs", "examples", "dashboards")
    found = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    for path in [*PAGES, ROOT / "Makefile", *found]:
        if path.suffix in {".py", ".md", ".yml", ".yaml", ".json", ""} and path.is_file():
            yield path.name, path.read_text(encoding="utf-8")


def test_nothing_names_a_package_of_an_index_where_kvferry_is_not():
    of_index = re.compile(r"kvferry\[\w|pip3? install (?:[-\w.=<>]+ )*'?kvferry\b(?!\.whl)")
    found = [(name, hit[0]) for name, text in _told_to_users() if (hit := of_index.search(text))]
    assert found == []


def test_each_extra_that_users_are_told_to_install_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    told = re.compile(r"""pip install '\.\[(\w+)\]'|install_hint\(['"](\w+)""")
    found = {"".join(pair) for _, text in _told_to_users() for pair in told.findall(text)}
    assert {"demo", "report", "s3", "mooncake", "transformers"} <= found
    assert found <= project["optional-dependencies"].keys()


@pytest.mark.slow
def test_the_examples_run(place, run_here):
    examples = ROOT / "examples"
    store = place / "example store"
    reuse = (examples / "reuse_across_processes.py", "path/to/model", store.as_uri())
    hits: list[int] = []
    while len(hits) < 16 and max(hits, default=0) == 0:  # some first hits are computed, to compare
        out = run_here(*reuse, cwd=place)  # starts processes of its own
        hits += [int(number) for number in re.findall(r"(\d+) read from the store", out)]
    assert hits[0] == 0
    assert max(hits) >= 128
    command = (examples / "transformers_generate.py", "path/to/model", store.as_uri())
    for run in (run_here, _python):
        out = run(*command, cwd=place)
        hits = [int(number) for number in re.findall(r"(\d+) read from the store", out)]
        # The engine above computed the document with the first question.
        assert min(hits) >= 128, run
    record = next((store / "records").glob("*/*.safetensors"))
    out = run_here(examples / "open_a_record.py", str(record), cwd=place)
    assert "kv.0: F32 [3, 4, 128, 16]" in out
    assert "layer 0: rms of K" in out


def test_every_example_is_short_and_tested():
    """Those of `examples/cpu` have tests of their own."""
    longest = {
        "a_record_by_hand.py": 60,
        "open_a_record.py": 60,
        "own_engine.py": 150,
        "proxy.py": 60,
        "reuse_across_processes.py": 60,
        "sqlite_store.py": 120,
        "transformers_generate.py": 60,
    }
    sizes = {
        path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")
    }
    assert sizes.keys() == longest.keys()
    assert {name: size for name, size in sizes.items() if size > longest[name]} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "adr"], ids=lambda page: page.name
)
def test_files_that_a_page_names_are_there(page):
    """Decisions may name what was there when they were made."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:tests|scripts|examples|dashboards|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert list((ROOT / "tests").rglob(name)), name


def test_the_command_table_lists_every_command():
    named = re.findall(r"^\| `kvferry ([\w-]+)", OPERATE, re.MULTILINE)
    commands = [command.name for command in build_app().registered_commands]
    assert named == commands


def test_the_table_of_reasons_lists_every_reason():
    (table,) = re.findall(r"\| reason \| meaning \|\n.*?\n\n", OPERATE, re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
    assert rows == [(str(reason), reason.meaning) for reason in LookupMiss]


def test_the_option_table_lists_every_option_of_a_file_url():
    (table,) = re.findall(r"\| option \|.*?\n\n", STORES, re.DOTALL)
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == {
        field.name for field in fields(FileOptions)
    }


def test_the_option_table_of_servers_lists_every_option():
    (table,) = re.findall(r"\| option of a server \|.*?\n\n", STORES, re.DOTALL)
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == {
        field.name for field in fields(ValkeyOptions)
    }


def test_the_architecture_page_names_every_package():
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = {
        path.stem
        for path in (ROOT / "src" / "kvferry").iterdir()
        if path.name not in ("__init__.py", "__pycache__", "py.typed")
    }
    listed = set(re.findall(r"`(\w+)`", page.partition("## Packages")[2]))
    assert packages <= listed
    steps = re.findall(r"^(\d+)\. ", page, re.MULTILINE)
    assert steps == [str(number) for number in range(1, 11)]


def test_files_named_in_the_architecture_page_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for name in re.findall(r"`([\w/]+\.py)`", page):
        assert (ROOT / "src" / "kvferry" / name).exists(), name
