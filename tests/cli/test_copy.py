"""`kvferry copy`: prompts and namespaces from store to store, each record verified."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry.engine import LLM, SamplingParams
from kvferry.keys import Namespace, opaque_key
from kvferry.store.file.directory import record_path
from kvferry.store.kind import Opening
from kvferry.store.url import open_one
from kvferry.testing.models import make_tiny_model
from kvferry.types import ChunkKey, ExtraKeys
from tests.cli.test_explain import SPACE, TOKENS, put_prompt, put_row, space_of

READER = """
import json, sys
from kvferry.engine import LLM, SamplingParams
given = json.loads(sys.argv[1])
options = {"chunk_tokens": given["chunk_tokens"], "audit": "off"}
first = SamplingParams(max_tokens=1, ignore_eos=True, return_logits=True)
for store in given["stores"]:
    with LLM(given["model"], store=store, connector_options=options) as llm:
        for _ in range(4):  # a busy machine may cut a load short
            llm.reset_prefix_cache()
            (completion,) = llm.generate([given["prompt"]], first)
            if completion.num_external_tokens == given["hit"]:
                break
    print(json.dumps([completion.num_external_tokens, completion.first_logits.tolist()]))
"""


@pytest.fixture
def other(tmp_path):
    return (tmp_path / "other").as_uri()


@pytest.fixture
def prompt(tokens_file):
    """The options that choose what `put_prompt` stores."""
    return ["--namespace", SPACE.digest.hex(), "--tokens", tokens_file]


@pytest.fixture
def copied(run):
    def copy(*arguments: object, code: int = 0) -> dict[str, object]:
        ran = run("copy", *arguments, "--json", "-")
        assert ran.code == code, ran.err
        return json.loads(ran.out)

    return copy


def values(url: str, keys: list[ChunkKey], space: Namespace = SPACE) -> list[bytes | None]:
    """What is stored under each key."""
    found: list[bytes | None] = []
    with open_one(url, Opening(namespace=space.digest)) as store:
        for key in keys:
            size = store.read(key, ())
            value = memoryview(bytearray(size or 0))
            found.append(None if store.read(key, [(0, value)]) is None else bytes(value))
    return found


@pytest.mark.slow
def test_engines_of_another_process_hit_what_was_copied_from_store_to_store(
    run, url, url_of, tmp_path
):
    """Out of a directory into Valkey, out of Valkey into a bucket, out of that into a directory."""
    model, size, num_tokens = make_tiny_model(tmp_path / "model"), 32, 150
    hit = num_tokens // size * size
    rng = np.random.default_rng(3)
    prompt = rng.integers(3, 320, num_tokens).tolist()
    tokens = tmp_path / "ids"
    tokens.write_text(json.dumps(prompt))
    with LLM(model, store=url, connector_options={"chunk_tokens": size}) as llm:
        params = SamplingParams(max_tokens=1, ignore_eos=True, return_logits=True)
        (cold,) = llm.generate([prompt], params)
        assert llm.drain(60)
    stores = [url_of("valkey"), url_of("s3"), (tmp_path / "other").as_uri()]
    for source, target in zip([url, *stores], stores, strict=False):
        ran = run("copy", source, target, "--model", model, "--tokens", tokens)
        assert (ran.code, "4 copied" in ran.out) == (0, True), ran.err
    given = {
        "model": str(model), "stores": stores, "prompt": prompt, "hit": hit, "chunk_tokens": size,
    }  # fmt: skip
    command = [sys.executable, "-W", "error", "-c", READER, json.dumps(given)]
    ended = subprocess.run(
        command, env=os.environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [answer[0] for answer in answers] == [hit] * 3
    for _, logits in answers:
        assert np.abs(np.array(logits) - cold.first_logits).max() <= 1e-3


def test_a_prompt_with_salt_and_lora_and_what_its_namespace_is(copied, url, other, prompt):
    keys = put_prompt(url, extra=ExtraKeys(cache_salt="s", lora="l"))
    put_prompt(url)
    value = copied(url, other, *prompt, "--salt", "s", "--lora", "l")
    assert (value["records"], value["stored"], value["bad"]) == (4, 4, [])
    assert values(other, keys) == values(url, keys)
    with open_one(other) as store:
        assert store.catalogue().description(SPACE.digest) == SPACE.as_text()
        assert store.stat().num_records == 4


def test_without_options_everything_is_copied_and_what_is_there_stays(copied, url, other):
    keys, more = put_prompt(url), put_prompt(url, space_of("b"))
    put_prompt(other, tokens=TOKENS[:14])
    assert copied(url, other, "--tenant", "b", "--dry-run")["records"] == 4
    assert values(other, more, space_of("b")) == [None] * 4
    value = copied(url, other)
    assert (value["records"], value["stored"], value["existing"]) == (8, 6, 2)
    assert values(other, keys) == values(url, keys)
    assert values(other, more, space_of("b")) == values(url, more, space_of("b"))


def test_a_wrong_record_is_left_out_and_named(copied, url, other):
    keys = put_prompt(url)
    path = Path(record_path(url.removeprefix("file://"), keys[1]))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    value = copied(url, other, code=1)
    assert value["bad"] == [{"key": keys[1].hex(), "reason": "bad_checksum"}]
    assert value["stored"] == 3
    assert values(other, keys)[1] is None
    assert path.exists()


def test_a_record_under_the_key_of_another_is_left_out(copied, url, other):
    keys = put_prompt(url)
    root = url.removeprefix("file://")
    content = Path(record_path(root, keys[0])).read_bytes()
    Path(record_path(root, keys[1])).write_bytes(content)
    assert copied(url, other, code=1)["bad"] == [{"key": keys[1].hex(), "reason": "other_record"}]


def test_a_description_that_is_not_of_its_namespace_is_not_copied(copied, url, other):
    put_prompt(url)
    with open_one(url) as store:
        store.describe(SPACE.digest, space_of("b").as_text())
    assert copied(url, other)["stored"] == 4
    with open_one(other) as store:
        assert store.catalogue().description(SPACE.digest) is None


def test_nothing_chosen_makes_no_store(run, url, other, prompt, tmp_path):
    put_prompt(url, tokens=range(50))
    ran = run("copy", url, other, *prompt)
    assert (ran.code, "no chunk of this prompt" in ran.error_line) == (1, True)
    assert not (tmp_path / "other").exists()


def test_opaque_rows_are_copied_but_follow_from_no_prompt(
    copied, run, url, other, prompt, tmp_path
):
    opaque = put_row(url)
    of_rows = ["--namespace", opaque.digest.hex(), *prompt[2:]]
    for name, *rest in (("copy", other), ("rm", "--yes"), ("pin", "--until", "1h")):
        ran = run(name, f"{url}?max_bytes=1GiB", *rest, *of_rows)
        assert ran.code == 2
        assert "holds opaque m (rows of vllm): their keys are hashes of the host" in ran.error_line
    assert not (tmp_path / "other").exists()
    assert copied(url, other, *of_rows[:2])["stored"] == 1
    key = [opaque_key(opaque.digest, b"host key")]
    assert values(other, key, opaque) == values(url, key, opaque) != [None]


def test_stores_that_cannot_take_it(run, url, tmp_path):
    put_prompt(url)
    place = tmp_path / "target"
    for target, says in (
        ("memory://x", "ends with its process"),
        ("peer://127.0.0.1:1", "ends with its process"),
        (f"{place.as_uri()}?read_only=true", "says read_only"),
        (f"{place.as_uri()}?max_bytes=1KiB", "less than the chosen records have"),
        ("nothing", "no scheme"),
    ):
        ran = run("copy", url, target)
        assert (ran.code, says in ran.error_line) == (2, True), ran.err
        assert not place.exists()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("precious")
    ran = run("copy", url, (tmp_path / "thesis").as_uri())
    assert ran.code == 2, ran.out
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["text"]
    assert "thesis" in ran.error_line
