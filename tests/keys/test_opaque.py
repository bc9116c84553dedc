"""Opaque rows: keys and namespaces that never change, and never meet those of tokens."""

import json
from pathlib import Path

import pytest
from blake3 import blake3

from kvferry.errors import ConfigError
from kvferry.keys import ChunkKeys, ModelIdentity, Namespace, opaque_key, opaque_namespace
from tests.keys import reference

GOLDEN = json.loads(Path(__file__).with_name("opaque.json").read_text())

IDENTITY = ModelIdentity(
    weights=bytes(range(32)), config={"model_type": "llama", "rope_theta": 1e4}, name="m"
)
HOST = {
    "name": "vllm",
    "release": "0.32",
    "hash": ["sha256", "seed"],
    "tp": 2,
    "groups": [{"tokens_per_block": 16, "layer_names": ["a", "b"]}],
}


def space(identity=IDENTITY, host=HOST, **changes):
    options = {"row_bytes": 65_536, "chunk_tokens": 128, "tenant": ""}
    return opaque_namespace(identity, host, **{**options, **changes})


def test_a_namespace_equals_the_golden_vector():
    assert space().description == GOLDEN["description"]
    assert space().digest.hex() == GOLDEN["digest"]
    assert reference.namespace_digest(GOLDEN["description"]).hex() == GOLDEN["digest"]


def test_keys_equal_the_golden_vectors():
    namespace = bytes.fromhex(GOLDEN["digest"])
    for host_key, key in GOLDEN["keys"].items():
        raw = bytes.fromhex(host_key)
        assert opaque_key(namespace, raw).hex() == key
        assert blake3(b"kvferry.row.v1.\0" + namespace + raw).hexdigest() == key


OTHERS = {
    "weights": lambda: space(ModelIdentity(weights=bytes(32), config=IDENTITY.config)),
    "version": lambda: space(
        ModelIdentity(weights=IDENTITY.weights, config=IDENTITY.config, weights_version="2")
    ),
    "config": lambda: space(ModelIdentity(weights=IDENTITY.weights, config={"rope_theta": 2e4})),
    "row_bytes": lambda: space(row_bytes=65_540),
    "chunk_tokens": lambda: space(chunk_tokens=64),
    "tenant": lambda: space(tenant="a"),
    **{name: lambda name=name: space(host={**HOST, name: "x"}) for name in HOST},
}


def test_everything_in_a_description_decides_the_namespace():
    digests = {space().digest} | {other().digest for other in OTHERS.values()}
    assert len(digests) == 1 + len(OTHERS)


def test_a_namespace_says_that_it_is_opaque_and_of_which_host():
    assert space().title == "m (rows of vllm)"
    read = Namespace.from_text(space().digest, space().as_text())
    assert read == space()
    assert read.is_opaque


def test_no_key_of_a_row_is_a_key_of_tokens():
    chain = ChunkKeys(space().digest, 1)
    chain.extend([1, 2])
    parts = (chain.keys[0], (1).to_bytes(4, "little"), (2).to_bytes(4, "little"))
    assert opaque_key(space().digest, b"".join(parts)) not in chain.keys


@pytest.mark.parametrize("size", ["row_bytes", "chunk_tokens"])
def test_an_empty_row_is_refused(size):
    with pytest.raises(ConfigError, match="above 0"):
        space(**{size: 0})
