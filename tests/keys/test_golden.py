"""The key derivation never changes by accident: golden vectors, an independent implementation, and
other processes agree. A deliberate change is a new KEY_VERSION and new vectors beside these."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.keys import ChunkKeys, ModelIdentity, Namespace, ShardKeys
from kvferry.types import ExtraKeys, KVGroup, MultimodalItem, ShardRows
from tests.keys import reference

GOLDEN_PATH = Path(__file__).with_name("golden.json")
GOLDEN = json.loads(GOLDEN_PATH.read_text())
CHAINS = pytest.mark.parametrize("case", GOLDEN["chains"], ids=lambda case: case["name"])
SPACES = pytest.mark.parametrize("case", GOLDEN["namespaces"], ids=lambda case: case["digest"][:8])


def extra_keys(fields):
    return ExtraKeys(
        cache_salt=fields.get("salt"),
        lora=fields.get("lora"),
        embeds_digest=bytes.fromhex(fields["embeds"]) if "embeds" in fields else None,
        items=tuple(
            MultimodalItem(digest=digest, offset=offset, length=length)
            for digest, offset, length in fields.get("items", [])
        ),
    )


def keys_of(case):
    chain = ChunkKeys(
        bytes.fromhex(case["namespace"]), case["chunk_tokens"], extra_keys(case["extra"])
    )
    chain.extend(case["token_ids"])
    return [key.hex() for key in chain.keys]


@CHAINS
def test_chain_equals_the_golden_vector(case):
    assert keys_of(case) == case["keys"]


@CHAINS
def test_independent_implementation_agrees_on_chains(case):
    keys = reference.chunk_keys(
        bytes.fromhex(case["namespace"]), case["chunk_tokens"], case["token_ids"], case["extra"]
    )
    assert [key.hex() for key in keys] == case["keys"]
    assert len(keys) == len(case["token_ids"]) // case["chunk_tokens"]


def namespace_of(description):
    return Namespace.of(
        ModelIdentity(
            weights=bytes.fromhex(description["weights"]),
            config=description["config"],
            weights_version=description["weights_version"],
        ),
        tuple(KVGroup(**group, block_size=16) for group in description["groups"]),
        description["chunk_tokens"],
        description["tenant"],
    )


@SPACES
def test_namespace_equals_the_golden_vector(case):
    namespace = namespace_of(case["description"])
    assert namespace.description == case["description"]
    assert namespace.digest.hex() == case["digest"]


@SPACES
def test_independent_implementation_agrees_on_namespaces(case):
    assert reference.namespace_digest(case["description"]).hex() == case["digest"]


@pytest.mark.parametrize("case", GOLDEN["shards"], ids=lambda case: case["shard_key"][:8])
def test_keys_of_shards_equal_the_golden_vectors(case):
    key = bytes.fromhex(case["key"])
    rows = [ShardRows(tuple(each[:2]), 64, tuple(each[2:]), 8) for each in case["shard"]]
    assert ShardKeys(rows).of(key).hex() == case["shard_key"]
    assert reference.shard_key(key, case["shard"]).hex() == case["shard_key"]


def test_the_key_of_drafts_equals_the_golden_vector():
    key, drafter = bytes(range(32)), bytes(range(16))
    shard = [[0, 0, 0, 0], [0, 1, 0, 8]]
    rows = [ShardRows(tuple(each[:2]), 64, tuple(each[2:]), 8) for each in shard]
    golden = "9fd7f747a88fca019399a99f0ca2a267baddc84fcf6bf7c73b3ebcbde11e7bd2"
    assert ShardKeys(rows, drafter).of(key).hex() == golden
    assert reference.draft_key(key, drafter, shard).hex() == golden


def test_a_record_with_all_rows_has_the_key_of_the_whole():
    assert ShardKeys(()).of(bytes(range(32))) == bytes(range(32))


def test_golden_keys_are_all_different():
    keys = [key for case in GOLDEN["chains"] for key in case["keys"]]
    # An item enters only the chunks it overlaps: the first chunk of that case holds a part of one.
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_another_process_with_another_hash_seed_gives_the_same_keys(seed):
    code = (
        "import json; from tests.keys.test_golden import GOLDEN, keys_of, namespace_of\n"
        "print(json.dumps([[keys_of(c) for c in GOLDEN['chains']],"
        "[namespace_of(c['description']).digest.hex() for c in GOLDEN['namespaces']]]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(result.stdout) == [
        [case["keys"] for case in GOLDEN["chains"]],
        [case["digest"] for case in GOLDEN["namespaces"]],
    ]
