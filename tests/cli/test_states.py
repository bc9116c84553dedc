"""Commands know the records of states: they list, check, explain, copy and remove them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.adapters.transformers import StoredKV
from kvferry.config import format_size
from kvferry.engine.model import quiet_transformers
from kvferry.keys import ChunkKeys, Namespace, state_keys
from kvferry.store.base import Where
from kvferry.store.url import open_store
from kvferry.testing.models import write_random_model
from tests.adapters.transformers.tiny_configs import build_model, tiny_config

CHUNK = 64
TOKENS = [3 + number * 7 % 240 for number in range(2 * CHUNK + 9)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("lfm2") / "model"
    return write_random_model(place, partial(build_model, tiny_config("lfm2")))


@pytest.fixture
def prompt_file(tmp_path) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS))
    return path


@pytest.fixture
def url(model_dir, tmp_path) -> str:
    """A store with a prompt of two chunks, and the state behind the second."""
    url = (tmp_path / "store").as_uri()
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with StoredKV(model, url, chunk_tokens=CHUNK) as kv:
        kv.prefill(TOKENS)
    return url


def keys_of(url) -> tuple[list[bytes], list[bytes]]:
    """Keys of the chunks, and of the parts of the state behind the last."""
    with open_store(url) as store:
        (digest,) = store.catalogue().namespaces()
        space = Namespace.from_text(digest, store.catalogue().description(digest))
    chunks = ChunkKeys(digest, CHUNK)
    chunks.extend(TOKENS)
    return chunks.keys, state_keys(chunks.keys[-1], space.state_parts)


def test_a_listing_says_which_records_are_of_states(url, run):
    rows = json.loads(run("ls", url, "--json", "-").out)
    _, states = keys_of(url)
    found = {row["key"] for row in rows if row.get("is_state")}
    assert found == {key.hex() for key in states}
    assert {row["first_token"] for row in rows if row.get("is_state")} == {2 * CHUNK}
    assert "state" in run("ls", url).out
    shown = json.loads(run("ls", url, states[0].hex(), "--json", "-").out)
    assert (shown["is_state"], shown["verdict"]) == (True, "right")
    assert [each["name"] for each in shown["components"]] == ["state"]


def test_all_are_checked_and_counted(url, run):
    chunks, states = keys_of(url)
    assert json.loads(run("verify", url, "--json", "-").out)["records"] == len(chunks) + len(states)
    (space,) = json.loads(run("ls", url, "--by", "namespace", "--json", "-").out)["namespaces"]
    assert space["num_records"] == len(chunks) + len(states)


def test_a_hit_is_explained_by_where_a_state_is(url, run, model_dir, prompt_file):
    def explained():
        options = ("--model", str(model_dir), "--tokens", prompt_file, "--block-size", "1")
        return json.loads(run("explain", url, *options, "--json", "-").out)

    said, (_, states) = explained(), keys_of(url)
    assert said["hit_tokens"] == 2 * CHUNK
    assert said["namespaces"][0]["states"] == [2 * CHUNK]
    (noted,) = (each for each in said["notes"] if each.startswith("States are stored after"))
    rows = json.loads(run("ls", url, "--json", "-").out)
    size = sum(row["num_bytes"] for row in rows if row.get("is_state"))
    assert said["namespaces"][0]["state_bytes"] == size
    assert f"after {2 * CHUNK} tokens, each of {format_size(size)} in {len(states)} rec" in noted
    chunks = sum(each["num_bytes"] for each in said["namespaces"][0]["chunks"])
    assert chunks + size == sum(row["num_bytes"] for row in rows)
    with open_store(url) as store:
        assert store.delete(states[-1])
    said = explained()
    assert (said["hit_tokens"], said["reason"]) == (0, "behind")
    assert "no state is stored at its end" in said["summary"]
    assert said["namespaces"][0]["states"] == []
    assert said["namespaces"][0]["state_bytes"] == 0
    assert not any("States are stored" in each for each in said["notes"])


def test_a_prompt_is_copied_and_removed_with_its_states(url, run, tmp_path, model_dir, prompt_file):
    chunks, states = keys_of(url)
    choice = ("--model", str(model_dir), "--tokens", prompt_file)
    copy = (tmp_path / "copy").as_uri()
    run("copy", url, copy, *choice)
    run("rm", url, *choice, "--yes")
    for store_url, are_there in ((url, False), (copy, True)):
        with open_store(store_url) as store:
            assert store.wait_indexed(60.0)
            assert {store.where(key) is Where.HERE for key in (*chunks, *states)} == {are_there}
