import dataclasses
import json
import math

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity, Namespace, relevant_config
from kvferry.keys.encoding import MAX_DEPTH, canonical
from kvferry.keys.namespace import NAMESPACE_TAG
from kvferry.record.schema import FORMAT_VERSION as RECORD_FORMAT_VERSION
from kvferry.types import KVGroup
from tests.keys import reference

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "layer_types": ["full_attention", "sliding_attention"],
    "dtype": "bfloat16",
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def identity(*, weights=b"w" * 32, config=CONFIG, weights_version=None):
    return ModelIdentity(weights=weights, config=config, weights_version=weights_version)


def group(
    *,
    num_layers=5,
    num_kv_heads=3,
    content_size=26,
    dtype="bfloat16",
    block_size=16,
    window=None,
    chunk=None,
):
    return KVGroup(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        content_size=content_size,
        dtype=dtype,
        block_size=block_size,
        window=window,
        chunk=chunk,
    )


def digest_of(model=None, groups=None, chunk_tokens=128, tenant=""):
    return Namespace.of(model or identity(), groups or (group(),), chunk_tokens, tenant).digest


VARIANTS = {
    "weights": lambda: digest_of(identity(weights=b"x" * 32)),
    "weights_version": lambda: digest_of(identity(weights_version="1")),
    "empty weights_version": lambda: digest_of(identity(weights_version="")),
    "chunk_tokens": lambda: digest_of(chunk_tokens=127),
    "tenant": lambda: digest_of(tenant="a"),
    "two groups": lambda: digest_of(groups=(group(), group())),
    "layers": lambda: digest_of(groups=(group(num_layers=6),)),
    "heads": lambda: digest_of(groups=(group(num_kv_heads=4),)),
    "content": lambda: digest_of(groups=(group(content_size=28),)),
    "dtype": lambda: digest_of(groups=(group(dtype="float16"),)),
    "window": lambda: digest_of(groups=(group(window=64),)),
    "attention chunk": lambda: digest_of(groups=(group(chunk=64),)),
    "states": lambda: (
        Namespace.of(identity(), (group(),), 128, states=[[group()]], state_parts=3).digest
    ),
    "other states": lambda: (
        Namespace.of(
            identity(), (group(),), 128, states=[[group(dtype="float32")]], state_parts=3
        ).digest
    ),
    "states in other records": lambda: (
        Namespace.of(identity(), (group(),), 128, states=[[group()]], state_parts=4).digest
    ),
    "another attention chunk": lambda: digest_of(groups=(group(chunk=128),)),
    "no config": lambda: digest_of(identity(config={})),
    "nested config": lambda: digest_of(
        identity(config={**CONFIG, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}})
    ),
    "int for float": lambda: digest_of(identity(config={**CONFIG, "rope_theta": 10000})),
    "bool for int": lambda: digest_of(identity(config={**CONFIG, "hidden_size": True})),
    "unknown field": lambda: digest_of(identity(config={**CONFIG, "invented_tomorrow": None})),
    "order of a list": lambda: digest_of(
        identity(config={**CONFIG, "layer_types": CONFIG["layer_types"][::-1]})
    ),
    **{
        f"without {name}": lambda name=name: digest_of(
            identity(config={key: CONFIG[key] for key in CONFIG if key != name})
        )
        for name in CONFIG
    },
}


def test_changing_any_one_thing_changes_the_digest():
    digests = [digest_of(), *(variant() for variant in VARIANTS.values())]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("block_size", [1, 32, 37])
def test_block_size_does_not_change_the_digest(block_size):
    assert digest_of(groups=(group(block_size=block_size),)) == digest_of()


def test_order_of_config_keys_and_kind_of_sequence_do_not_matter():
    shuffled = {name: CONFIG[name] for name in reversed(CONFIG)}
    shuffled["layer_types"] = tuple(CONFIG["layer_types"])
    assert digest_of(identity(config=shuffled)) == digest_of()


def test_the_description_is_json_and_determines_the_digest():
    namespace = Namespace.of(identity(), (group(window=7),), 128, "tenant")
    description = json.loads(json.dumps(namespace.description))
    assert reference.namespace_digest(description) == namespace.digest
    assert description["format_version"] == RECORD_FORMAT_VERSION


def test_changing_the_config_afterwards_does_not_reach_the_description():
    config = {"a": {"b": [1]}}
    namespace = Namespace.of(identity(config=config), (group(),), 128)
    config["a"]["b"].append(2)
    assert namespace.description["config"] == {"a": {"b": [1]}}


@given(value=JSON, other=JSON)
def test_canonical_encodings_are_equal_only_for_equal_values(value, other):
    assert canonical(value) == reference.encode(value)
    # repr tells 1, 1.0 and True apart, as the encoding must; it keeps the order of keys.
    if canonical(value) == canonical(other):
        assert repr(sort_keys(value)) == repr(sort_keys(other))
    else:
        assert repr(sort_keys(value)) != repr(sort_keys(other))


def sort_keys(value):
    if isinstance(value, dict):
        return {key: sort_keys(value[key]) for key in sorted(value)}
    return [sort_keys(item) for item in value] if isinstance(value, list) else value


def test_values_that_json_blurs_have_different_encodings():
    values = [1, 1.0, True, "1", [1], None, "", [], {}, 0, 0.0, -0.0, False, math.inf, -math.inf]
    values += [math.nan, 2**63, -1, 255, -256, 1e-323, [[], []], [[[]]], {"": None}, "\ud800"]
    assert len({canonical(value) for value in values}) == len(values)


@pytest.mark.parametrize("value", [1j, object(), {1: 2}, {"a": [b"raw"]}, {"a": {1, 2}}])
def test_a_value_without_canonical_encoding_is_named(value):
    with pytest.raises(ConfigError, match="at "):
        digest_of(identity(config={"field": value}))


def test_the_path_to_a_bad_value_is_in_the_message():
    with pytest.raises(ConfigError, match=r"'config\.a\[1\]\.b' is a complex"):
        digest_of(identity(config={"a": [0, {"b": 1j}]}))


def test_nesting_is_bounded():
    value = []
    for _ in range(MAX_DEPTH):
        value = [value]
    canonical(value)
    for _ in range(10_000):
        value = [value]
    with pytest.raises(ConfigError, match="nested deeper"):
        canonical(value)


def test_impossible_namespaces_are_refused():
    with pytest.raises(ConfigError, match="32 bytes, not 0"):
        identity(weights=b"")
    with pytest.raises(ConfigError, match="at least one KV group"):
        Namespace.of(identity(), (), 128)


def test_fields_that_do_not_decide_kv_bytes_are_dropped_at_every_config_level():
    noise = {"_name_or_path": "/a", "transformers_version": "5", "use_cache": True}
    kept = {"hidden_size": 8, "use_bias": True, "eos": 1}
    config = {**noise, **kept, "text_config": {**noise, **kept}, "rope_scaling": {"use_cache": 1}}
    assert relevant_config(config) == {
        **kept,
        "text_config": kept,
        "rope_scaling": {"use_cache": 1},
    }


def test_every_field_of_a_group_is_decided_upon():
    """A new field of KVGroup must be put into the namespace or, knowingly, left out."""
    names = {field.name for field in dataclasses.fields(KVGroup)}
    rare = {"chunk": 8, "row_tokens": 2, "tail": 4}
    described = set(
        Namespace.of(identity(), (dataclasses.replace(group(), **rare),), 1).description["groups"][
            0
        ]
    )
    assert rare.keys().isdisjoint(Namespace.of(identity(), (group(),), 1).description["groups"][0])
    assert names - described == {"block_size", "values"}


def test_the_name_of_the_model_is_for_people_and_no_part_of_identity():
    plain = Namespace.of(identity(), (group(),), 1)
    named = Namespace.of(dataclasses.replace(identity(), name="org/model"), (group(),), 1)
    assert (named, named.description) == (plain, plain.description)
    assert named.title == "org/model"
    assert plain.title == "llama"
    assert Namespace.of(identity(config={}), (group(),), 1).title == "a model without a name"


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=3), st.none() | st.text(max_size=5))
def test_a_reader_of_the_text_can_check_the_digest(config, name):
    made = Namespace.of(dataclasses.replace(identity(config=config), name=name), (group(),), 1)
    read = Namespace.from_text(made.digest, made.as_text())
    assert read is not None
    assert (read.digest, read.model) == (made.digest, name)
    assert Namespace.from_text(bytes(32), made.as_text()) is None


@pytest.mark.parametrize("description", [[], ["config"], "text", 7, None, True])
def test_what_is_no_description_is_none_though_its_digest_fits(description):
    digest = blake3(NAMESPACE_TAG + canonical(description)).digest()
    text = json.dumps({"model": "org/model", "description": description})
    assert Namespace.from_text(digest, text) is None


def test_a_title_is_never_long():
    made = identity(config={"model_type": "x" * 100_000})
    assert len(Namespace.of(made, (group(),), 16).title) <= 200
