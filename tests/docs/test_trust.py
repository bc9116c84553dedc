"""The security officer's page: every kind of store, every place, every option of requests."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from kvferry.engine import LLM, SamplingParams
from kvferry.store.file import FileStore
from kvferry.store.kinds import MODULES
from kvferry.testing.models import make_tiny_model
from kvferry.v1.host import CLIENT_OPTIONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/trust.md").read_text()


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return found


def first_cells(text: str) -> str:
    return "\n".join(re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE))


@pytest.mark.parametrize("scheme", MODULES)
def test_each_kind_of_store_says_what_is_encrypted(scheme):
    assert f"`{scheme}`" in first_cells(section("Encryption"))


@pytest.mark.parametrize("name", sorted(CLIENT_OPTIONS))
def test_each_option_of_requests_can_be_forbidden_by_the_name_that_operators_read(name):
    table = (ROOT / "docs/operate.md").read_text().partition("## Options of a request")[2]
    assert f"| `{name}` |" in table


def test_each_place_of_an_engine_is_listed_and_private(tmp_path, monkeypatch):
    """The store, its index, the journal, digests of weights, the key of peers."""
    cache, model = tmp_path / "cache", make_tiny_model(tmp_path / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    before = os.umask(0o022)
    try:
        with LLM(
            model, store=f"file://{cache}/kvferry/kv?max_bytes=1GiB", num_blocks=64,
            connector_options={
                "record": str(cache / "kvferry/kv/requests.jsonl"), "serve": "127.0.0.1:0",
                "memory_bytes": 1 << 24,
            },
        ) as llm:  # fmt: skip
            llm.generate([list(range(5, 300))], SamplingParams(max_tokens=1))
        with FileStore(cache / "kvferry/kv") as store:
            store.catalogue().notice("{}")  # as `rm` leaves one
    finally:
        os.umask(before)
    listed = section("Where data of prompts lies")
    found = set()
    for path in (cache / "kvferry").rglob("*"):
        inside = path.relative_to(cache / "kvferry")
        assert not stat.S_IMODE(path.lstat().st_mode) & 0o077, inside
        inside = inside.relative_to("kv") if inside.parts[0] == "kv" else inside
        name = inside.parts[0] if inside.parts else "kv"
        found.add(name)
    places = {
        "records": "`records/`", "namespaces": "`namespaces/`", "index.sqlite3": "`index.sqlite3`",
        "requests.jsonl": "(`record`)", "weights": "(`weights/`)", "kv": "(`kv/`)",
        "peer.key": "(`peer.key`)", "erased.json": "`erased.json`",
        "writing": "`writing/`", "quarantine": "`quarantine/`",
    }  # fmt: skip
    without_prompts = {"kvferry.json", "index.sqlite3-journal"}
    assert {
        "records",
        "index.sqlite3",
        "requests.jsonl",
        "weights",
        "peer.key",
        "erased.json",
    } <= found
    assert found - without_prompts <= set(places)
    for name in found - without_prompts:
        assert places[name] in listed
