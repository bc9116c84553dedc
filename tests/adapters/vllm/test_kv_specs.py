"""The table of vLLM's specs knows every class and field of every release that is served."""

from __future__ import annotations

import pytest

from kvferry.adapters.vllm.kv_specs import KV_SPECS, describe_groups

from .fakes import FullAttentionSpec, Group, KVCacheConfig, UniformTypeKVCacheSpecs, names
from .released import Release, number, versions

SERVED = [version for version in versions() if number(version) >= (0, 11, 1)]

PROPERTIES = {
    "block_table_token_alignment",
    "has_layer_views",
    "num_retained_tokens",
    "num_states",
    "prefix_cacheable",
    "prefix_replay_tokens",
    "real_page_size_bytes",
    "state_content_size_bytes",
    "storage_block_size",
    "unpadded_page_size_bytes",
    "uses_slot_mapping",
}
"""What the snapshots list beside fields: made of the fields, here and in each subclass."""

ABSTRACT = {"KVCacheSpec", "AttentionSpec"}


def fields_of(release: Release, name: str) -> set[str]:
    facts = release.facts["types"][name]
    own = {each.rstrip("=") for each in facts["fields"]}
    return own.union(*(fields_of(release, base) for base in facts.get("bases", ())))


@pytest.mark.parametrize("version", SERVED)
def test_every_spec_of_a_release_is_known_with_all_its_fields(version):
    release = Release(version)
    specs = [
        name
        for name, facts in release.facts["types"].items()
        if name.endswith("Spec") and name != "KVCacheGroupSpec" and name not in ABSTRACT
    ]
    assert "MambaSpec" in specs
    for name in specs:
        # Of attention, `num_heads` is a property, made of `num_head_slots`.
        made = PROPERTIES | ({"num_heads"} if name != "MambaSpec" else set())
        if name.startswith("HiSparse"):
            made |= {"tokens_per_state"}
        assert fields_of(release, name) - made <= KV_SPECS[name].keys(), name


def test_groups_are_described_layer_by_layer_also_within_one_group():
    layers = dict(
        zip(names(0, 1), [FullAttentionSpec(), FullAttentionSpec(head_size=8)], strict=True)
    )
    config = KVCacheConfig(
        [Group(names(0, 1), UniformTypeKVCacheSpecs(layers)), Group(names(2), FullAttentionSpec())]
    )
    mixed, plain = describe_groups(config)
    assert [spec["head_size"] for spec in mixed["spec"]["kv_cache_specs"].values()] == [4, 8]
    assert plain["layers"] == names(2)


def test_a_stage_of_a_pipeline_may_have_no_layer_of_a_group():
    groups = [Group([], FullAttentionSpec()), Group(names(0), FullAttentionSpec(head_size=8))]
    none, one = describe_groups(KVCacheConfig(groups))
    assert (none["layers"], none["spec"]["head_size"]) == ([], 4)
    assert (one["layers"], one["spec"]["head_size"]) == (names(0), 8)
