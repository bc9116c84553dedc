"""kvferry as a tier of vLLM's own offloading: under its manager, and in an engine."""

from __future__ import annotations

import ast
import copy
import enum
import importlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.config
import vllm.v1.kv_cache_interface
from packaging.version import Version

from kvferry.adapters.rows import RowsOptions
from kvferry.adapters.vllm import tier_identity
from kvferry.adapters.vllm.host import device_name, load_host
from kvferry.adapters.vllm.kv_specs import KV_SPECS
from kvferry.adapters.vllm.tier_identity import rows_namespace
from kvferry.adapters.vllm.tier_rows import TierRows
from kvferry.errors import ConfigError
from kvferry.identity.resolved import Use
from kvferry.testing.stores.hooks import wait_until
from tests.late import GatedWeights
from tests.real_vllm.host import RELEASE, serves_tiers
from tests.real_vllm.scripted_tier import (
    HAS_BACKPRESSURE,
    ROW,
    SECONDS,
    TIER,
    EngineArgs,
    FullAttentionSpec,
    KVCacheConfig,
    Locality,
    LookupResult,
    MambaSpec,
    OffloadingCacheConfig,
    OffloadingModelConfig,
    Scripted,
    TieringOffloadingSpec,
    attention,
    content,
    key_of,
    kv_caches,
    offloading_config,
    scripted,
)
from tests.servers.places import Place, valkey_place

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

Models = dict[str, Path]


def test_what_was_evicted_comes_back_byte_for_byte_also_after_a_restart(
    tmp_path: Path, vllm_config: Any
) -> None:
    with scripted(vllm_config, tmp_path.as_uri()) as one:
        one.store(1, 2, 3, 4)
        one.store(5, 6, 7, 8)  # the primary tier has four rows
        for number in (1, 5, 4):
            assert one.lookup(number) == (LookupResult.HIT, content(number, ROW))
        assert one.lookup(9) == (LookupResult.MISS, None)
        removed = [event for event in one.manager.take_events() if event.medium.value == "STORAGE"]
        assert [(len(event.keys), event.removed) for event in removed] == [(8, False)]
        stats = one.manager.get_stats()
        assert "put_stored" in str(stats.data)
    with scripted(vllm_config, tmp_path.as_uri()) as one:
        assert one.lookup(7) == (LookupResult.HIT, content(7, ROW))


@pytest.mark.parametrize("is_reset", [False, True])
def test_rows_are_kept_once_the_weights_are_hashed(
    tmp_path: Path, vllm_config: Any, monkeypatch: pytest.MonkeyPatch, is_reset: bool
) -> None:
    weights = GatedWeights(threading.Event())
    monkeypatch.setattr("kvferry.adapters.vllm.tier.LateWeights", lambda: weights)
    with scripted(vllm_config, tmp_path.as_uri()) as one:
        one.store(1, 2, 3, 4)
        one.store(5, 6, 7, 8)
        assert one.lookup(1) == (LookupResult.MISS, None)
        assert not list(tmp_path.glob("records/*/*"))
        if is_reset:
            one.reset()
        weights.become_known()
        assert one.lookup(9) == (LookupResult.MISS, None)  # a request makes the tier look
        one.until(lambda: all(each.state == "up" for each in one.tier._rows._store.tiers()))
        one.store(11, 12, 13, 14)
        one.store(15, 16, 17, 18)
        assert one.lookup(11) == (LookupResult.HIT, content(11, ROW))
        assert one.lookup(1) == (LookupResult.MISS, None)
        one.assert_nothing_is_held()
    monkeypatch.undo()
    with scripted(vllm_config, tmp_path.as_uri()) as one:
        found = LookupResult.MISS if is_reset else LookupResult.HIT
        assert one.lookup(12)[0] is found


def _changed(vllm_config: Any, part: str, **fields: Any) -> Any:
    """The configuration with fields of one part changed, or with another part."""
    config = copy.copy(vllm_config)
    found = copy.copy(getattr(config, part, None)) or SimpleNamespace()
    for name, value in fields.items():
        object.__setattr__(found, name, value)
    object.__setattr__(config, part, found)
    return config


def test_an_engine_that_needs_every_token_neither_stores_nor_reads_rows(
    tmp_path: Path, vllm_config: Any
) -> None:
    with scripted(vllm_config, tmp_path.as_uri()) as one:
        one.store(1, 2, 3, 4)
        one.store(5, 6, 7, 8)
    part = "aux_output_config" if RELEASE >= (0, 32) else "model_config"
    needs = _changed(vllm_config, part, enable_return_routed_experts=True)
    request = SimpleNamespace(lora_request=None, mm_features=[])  # found among the callers
    with scripted(needs, tmp_path.as_uri()) as one:
        assert one.lookup(1) == (LookupResult.MISS, None)
        one.store(11, 12, 13, 14)
        one.store(15, 16, 17, 18)
    with scripted(vllm_config, tmp_path.as_uri()) as one:
        assert one.lookup(1) == (LookupResult.HIT, content(1, ROW))
        assert one.lookup(11) == (LookupResult.MISS, None)
    assert request.mm_features == []


def test_rows_that_are_a_part_of_each_token_are_not_kept(tmp_path: Path, vllm_config: Any) -> None:
    parts = kv_caches(attention())
    parts.hisparse_host_num_blocks = 8
    request = SimpleNamespace(lora_request=None, mm_features=[])  # found among the callers
    for kv in (parts, None):
        with scripted(vllm_config, tmp_path.as_uri(), kv_cache_config=kv) as one:
            one.store(1, 2, 3, 4)
            one.store(5, 6, 7, 8)
        with scripted(vllm_config, tmp_path.as_uri(), kv_cache_config=kv) as one:
            assert one.lookup(1)[0] is (LookupResult.MISS if kv else LookupResult.HIT)
    assert request.mm_features == []


@pytest.mark.parametrize("features", [[], [SimpleNamespace(modality="video")]])
@pytest.mark.parametrize("why", ["videos are pruned", "images attend both ways"])
def test_rows_of_requests_with_items_are_not_kept_where_a_hit_in_one_may_be_wrong(
    tmp_path: Path, vllm_config: Any, features: list[Any], why: str
) -> None:
    arch = replace(vllm_config.model_config.model_arch_config, is_mm_prefix_lm=True)
    field = (
        {"multimodal_config": SimpleNamespace(video_pruning_rate=0.5)}
        if why == "videos are pruned"
        else {"model_arch_config": arch}
    )
    config = _changed(vllm_config, "model_config", **field)
    vars(config.model_config).pop("is_mm_prefix_lm", None)  # as vLLM said it before, and kept it
    request = SimpleNamespace(lora_request=None, mm_features=features)  # found among the callers
    with scripted(config, tmp_path.as_uri()) as one:
        one.store(1, 2, 3, 4)
        one.store(5, 6, 7, 8)
    with scripted(config, tmp_path.as_uri()) as one:
        found, _ = one.lookup(1)
    assert found is (LookupResult.MISS if request.mm_features else LookupResult.HIT)


@serves_tiers()
def test_rows_of_another_meaning_are_never_found(
    tmp_path: Path, vllm_config: Any, models: Models
) -> None:
    other = EngineArgs(
        model=str(models["other"]), skip_tokenizer_init=True, served_model_name="m"
    ).create_engine_config()
    rope = EngineArgs(
        model=str(models["plain"]),
        skip_tokenizer_init=True,
        hf_overrides={"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ).create_engine_config()
    with scripted(vllm_config, tmp_path.as_uri()) as one:
        one.store(1)
    wide = OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=2)
    for config, changes in (
        (other, {}),
        (rope, {}),
        (vllm_config, {"cache": wide, "worker_kv_bytes_per_block": ROW // 2}),
        (vllm_config, {"kv_cache_layout": "LBNHC"}),
        (vllm_config, {"model": OffloadingModelConfig(name="m", dtype="bfloat16")}),
    ):
        with scripted(config, tmp_path.as_uri(), **changes) as one:
            assert one.lookup(1) == (LookupResult.MISS, None)
    with scripted(vllm_config, tmp_path.as_uri(), {"tenant": "t"}) as one:
        assert one.lookup(1) == (LookupResult.MISS, None)
    with scripted(vllm_config, tmp_path.as_uri()) as one:
        assert one.lookup(1)[0] is LookupResult.HIT


def _digest(
    vllm_config: Any, release: str = "0.32.0", kv: KVCacheConfig | None = None, **changes: Any
) -> bytes:
    config, options = offloading_config({}, **changes), RowsOptions(store="memory://x")
    found = rows_namespace(
        vllm_config, kv or kv_caches(), config, load_host(), release, options, row_bytes=ROW
    )
    return found.digest


MAMBA = MambaSpec(
    block_size=16,
    shapes=((3, 64), (4, 8, 16)),
    dtypes=(torch.bfloat16, torch.float16),
    page_size_padded=1 << 14,  # as attention's, whatever the states
    mamba_cache_mode="align",
)
STATES: dict[str, Any] = {
    # `mamba_ssm_cache_dtype`, from float16 and from float32; `mamba_cache_dtype`.
    "temporal dtype": {"dtypes": (torch.bfloat16, torch.bfloat16)},
    "wide temporal dtype": {"dtypes": (torch.bfloat16, torch.float32)},
    "conv dtype": {"dtypes": (torch.float16, torch.float16)},
    # VLLM_SSM_CONV_STATE_LAYOUT; `num_speculative_tokens` adds columns.
    "conv layout": {"shapes": ((64, 3), (4, 8, 16))},
    "conv columns": {"shapes": ((5, 64), (4, 8, 16))},
    "padding": {"page_size_padded": 1 << 15},
    "mode": {"mamba_cache_mode": "all"},
    "block": {"block_size": 32},
    "drafts' blocks": {"num_speculative_blocks": 2},
}


OPTIONS = [
    ("attention_config", "backend", "another"),
    ("attention_config", "indexer_kv_dtype", "bf16"),
    ("mamba_config", "enable_stochastic_rounding", True),
    ("speculative_config", "num_speculative_tokens", 5),
    # What vLLM's block hash depends on.
    *(
        ("cache_config", "prefix_caching_hash_algo", algorithm)
        for algorithm in ("sha256_cbor", "xxhash", "xxhash_cbor")
    ),
    *(("cache_config", "num_hash_lookahead_tokens", number) for number in (1, 2)),
]
"""Of which nothing is seen in a spec."""


def _groups(**changes: Any) -> dict[str, Any]:
    (group,) = offloading_config({}).groups
    return {"groups": (replace(group, **changes),)}


CHUNKS: list[dict[str, Any]] = [
    _groups(layer_names=("b",)),
    _groups(layer_names=("a", "b")),
    _groups(tokens_per_block=32),
    {"groups": offloading_config({}).groups * 2},
    {"cache": OffloadingCacheConfig(tokens_per_hash=8, blocks_per_chunk=1)},
    {"cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=2)},
]


def test_all_that_decides_what_a_row_holds_is_of_the_namespace(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    config, kv = copy.deepcopy(vllm_config), kv_caches(attention(), MAMBA)
    drafts = SimpleNamespace(method="ngram", model=None, num_speculative_tokens=2)
    object.__setattr__(config, "speculative_config", drafts)
    found = {"as it is": _digest(config, kv=kv), "of 0.33": _digest(config, "0.33.0", kv)}
    for name, changes in STATES.items():
        other = kv_caches(attention(), replace(MAMBA, **changes))
        found[name] = _digest(config, kv=other)
    for part, field, value in OPTIONS:
        changed = copy.deepcopy(config)
        object.__setattr__(getattr(changed, part), field, value)
        found[f"{field}={value}"] = _digest(changed, kv=kv)
    found |= {str(changes): _digest(config, kv=kv, **changes) for changes in CHUNKS}
    by_digest = {digest: name for name, digest in found.items()}
    assert found.keys() == set(by_digest.values())
    assert found["as it is"] == _digest(config, "0.32.1", kv)


@pytest.mark.parametrize("spec", [attention(), MAMBA], ids=["attention", "mamba"])
def test_each_field_of_a_spec_that_decides_bytes_is_of_the_namespace(
    spec: Any, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _digest(vllm_config, kv=kv_caches(spec))
    decide = {
        each
        for each, use in KV_SPECS[type(spec).__name__].items()
        if use is not Use.NOTHING and hasattr(spec, each)
    }
    of_class = {field.name for field in fields(spec)}
    for each in decide & of_class:
        other = replace(spec, **{each: _another(getattr(spec, each))})
        assert _digest(vllm_config, kv=kv_caches(other)) != first, each
    for each in decide - of_class:
        with monkeypatch.context() as patched:
            patched.setattr(type(spec), each, property(lambda _spec: 12345))
            assert _digest(vllm_config, kv=kv_caches(spec)) != first, each
    assert len(decide & of_class) > 6


def _another(value: Any) -> Any:
    match value:
        case enum.Enum():
            return next(each for each in type(value) if each is not value)
        case bool():
            return not value
        case int():
            return 2 * value + 2
        case str():
            return "all"
        case None:
            return 1 << 15
        case torch.dtype():
            return torch.float64
        case tuple():
            return (_another(value[0]), *value[1:])


def test_a_spec_that_is_not_known_is_refused_by_name(vllm_config: Any) -> None:
    @dataclass(frozen=True, kw_only=True)
    class NewSpec(FullAttentionSpec):
        rotated_by: int = 3

    spec = NewSpec(**vars(attention()))
    with pytest.raises(ConfigError, match="keeps its KV as a NewSpec, which kvferry does not know"):
        _digest(vllm_config, kv=kv_caches(spec))


@pytest.mark.skipif(RELEASE < (0, 32), reason="the layouts are those of 0.32")
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_kernels_count_where_a_blocks_bytes_depend_on_them(
    layout: str, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = copy.deepcopy(vllm_config)
    object.__setattr__(on_gpu.device_config, "device_type", "cuda")
    found = set()
    for name in ("one GPU", "another GPU"):
        monkeypatch.setattr(tier_identity, "device_name", lambda name=name: name)
        found.add(_digest(on_gpu, kv_cache_layout=layout))
        assert _digest(on_gpu, kv_cache_layout=layout, canonical_layout=True) not in found
    assert len(found) == (1 if layout == "LBNHC" else 2)
    monkeypatch.undo()
    assert device_name() == device_name()


def test_the_conv_layout_that_vllm_resolved_is_of_the_namespace(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.mamba.mamba_utils")
    found = set()
    for layout in ("SD", "DS"):
        monkeypatch.setattr(utils, "get_conv_state_layout", lambda layout=layout: layout)
        found.add(_digest(vllm_config))
    assert len(found) == 2


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_the_seed_of_block_hashes_is_of_the_namespace(
    algorithm: str, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copy.deepcopy(vllm_config)
    object.__setattr__(config.cache_config, "prefix_caching_hash_algo", algorithm)

    def digest(seed: str | None) -> bytes:
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        return _digest(config)

    assert len({digest(seed) for seed in ("0", "1", None)}) == 3
    assert digest("0") == digest("0")
    # Without a seed, a hash by xxhash has a random one in each process.
    assert (digest(None) == digest(None)) == (algorithm == "sha256")


def test_tiers_of_other_chunks_and_other_rows_share_a_directory(
    tmp_path: Path, vllm_config: Any
) -> None:
    wide = OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=2)
    with ExitStack() as stack:
        tiers = [
            stack.enter_context(scripted(vllm_config, tmp_path.as_uri(), **changes))
            for changes in (
                {},
                {"cache": wide, "worker_kv_bytes_per_block": ROW // 2},
                {"worker_kv_bytes_per_block": 2 * ROW},
            )
        ]
        assert [one.row_bytes for one in tiers] == [ROW, ROW, 2 * ROW]
        for one in tiers:
            assert one.lookup(1) == (LookupResult.MISS, None)
            one.store(1)
            one.store(*range(100, 100 + len(one.view)))  # and so memory has it no more
        for one in tiers:
            assert one.lookup(1) == (LookupResult.HIT, content(1, one.row_bytes))


@pytest.mark.parametrize("canonical", [False, True])
def test_rows_of_other_ranks_are_found_in_the_canonical_layout_alone(
    *, canonical: bool, tmp_path: Path, vllm_config: Any
) -> None:
    layout = {"canonical_layout": canonical}
    with scripted(vllm_config, tmp_path.as_uri(), **layout) as one:
        one.store(1)
    two = replace(offloading_config({}).parallel, world_size=2, tp_size=2)
    halves = {"parallel": two, "worker_kv_bytes_per_block": ROW // 2}
    half = kv_caches(attention(num_kv_heads=1))
    with scripted(vllm_config, tmp_path.as_uri(), None, half, **layout, **halves) as one:
        assert one.row_bytes == ROW
        assert one.lookup(1)[0] is (LookupResult.HIT if canonical else LookupResult.MISS)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"io_thread": 4}, "did you mean 'io_threads'"),
        ({"store": "file:///x?max_bytes=1KiB"}, "max_bytes=1KiB is .* or lower block_size"),
        ({"store": "file:///dev/null/store"}, "/dev/null/store"),
        ({"load_timeout_seconds": 0}, "must be more than 0"),
        ({"locality": "local"}, "Locality"),
        ({"locality": ""}, "Locality"),
    ],
)
def test_a_wrong_option_is_one_line_at_start(
    tmp_path: Path, vllm_config: Any, options: dict[str, Any], says: str
) -> None:
    error = ValueError if "locality" in options else ConfigError  # the former is vLLM's own
    with (
        pytest.raises(error, match=says) as raised,
        scripted(vllm_config, tmp_path.as_uri(), options),
    ):
        pass
    assert "\n" not in str(raised.value)


def test_without_a_configuration_of_the_engine_a_tier_does_not_start(tmp_path: Path) -> None:
    tiers = [{**TIER, "store": tmp_path.as_uri()}]
    spec = TieringOffloadingSpec(offloading_config({"secondary_tiers": tiers}))
    with pytest.raises(ConfigError, match="cannot identify the model"):
        spec.get_manager()


def test_weights_that_are_not_found_are_refused_without_a_name_for_them(
    tmp_path: Path, vllm_config: Any
) -> None:
    away = copy.deepcopy(vllm_config)
    away.model_config.model = "nobody/nothing"
    with (
        pytest.raises(ConfigError, match='set "weights_version" to a name'),
        scripted(away, tmp_path.as_uri()),
    ):
        pass
    named = {"weights_version": "v1"}
    with scripted(away, tmp_path.as_uri(), named) as one:
        one.store(1)
    with scripted(away, tmp_path.as_uri(), named) as one:
        assert one.lookup(1)[0] is LookupResult.HIT
    with scripted(vllm_config, tmp_path.as_uri(), named) as one:
        assert one.lookup(1)[0] is LookupResult.MISS


def test_a_fault_of_a_hook_stays_here(
    tmp_path: Path, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("whatever fault")

    with scripted(vllm_config, tmp_path.as_uri()) as one:
        one.store(1, 2, 3, 4)
        for hook in ("lookup", "store"):
            monkeypatch.setattr(TierRows, hook, fail)
        assert one.tier.lookup(key_of(9), one.request()) is LookupResult.MISS
        one.store(5, 6)
        assert one.tier.counters["hook_failed"] >= 2


def test_a_locality_is_the_tiers_and_without_kv_events_none_are_told(
    tmp_path: Path, vllm_config: Any
) -> None:
    with scripted(vllm_config, tmp_path.as_uri(), {"locality": "LOCAL"}) as one:
        assert one.tier.locality is Locality.LOCAL
        one.store(1)
        (event,) = [each for each in one.manager.take_events() if each.medium.value == "STORAGE"]
        assert event.locality is Locality.LOCAL
    with scripted(vllm_config, tmp_path.as_uri(), enable_kv_cache_events=False) as one:
        one.store(2)
        assert list(one.tier.take_events()) == []


def test_metrics_are_defined_and_come_once(tmp_path: Path, vllm_config: Any) -> None:
    config = {"secondary_tiers": [{**TIER, "store": "file:///unused"}]}
    defined = TieringOffloadingSpec.build_metric_definitions(config)
    name = "vllm:kvferry_tier_events"
    assert defined[name].labelnames == ("event",)
    with scripted(vllm_config, tmp_path.as_uri()) as one:
        one.store(1)
        told = one.manager.get_stats().data["data"][name]
        assert told[("put_stored",)] == 1
        again = one.manager.get_stats()
        assert again is None or ("put_stored",) not in again.data["data"].get(name, {})


def wait_loaded(one: Scripted, number: int) -> None:
    """Look up until it hits: a server that a busy machine makes slow is a miss."""
    right = (LookupResult.HIT, content(number, one.row_bytes))
    wait_until(lambda: one.lookup(number) == right, f"chunk {number}", SECONDS)


@pytest.fixture
def valkey() -> Iterator[Place]:
    with valkey_place() as place:
        yield place


PRESSURE = {
    "backpressure_cls": "EMABackpressureDetector",
    # Seconds for a MiB, of the last store alone: far above those of a row on a server that is
    # not paced, far below those on one that is. Half is forgotten in a second.
    "high_water_s": 30.0,
    "low_water_s": 15.0,
    "alpha": 1.0,
    "warmup_completions": 0,
    "decay_half_life_s": 1.0,
    "cooldown_s": 0.0,
}


class Offers:
    """Offers one new chunk after another.

    Attributes:
        given: those that vLLM gave to the tier; it drops the others.
    """

    def __init__(self, one: Scripted) -> None:
        self.one = one
        self.given: list[int] = []
        self._number = 0

    def next(self) -> bool:
        """Offer a chunk. Return whether it was given to the tier, and stored."""
        self._number += 1
        context = self.one.request()
        assert self.one.offer([self._number], context)
        is_given = bool(self.one.jobs)
        self.one.finish(context)
        self.one.until(lambda: not self.one.jobs)
        if is_given:
            self.given.append(self._number)
        return is_given

    def wait(self, *, given: bool) -> None:
        """Until some are given in a row, or until one is dropped."""
        wanted = [True] * 3 if given else [False]
        found: list[bool] = []

        def are_found() -> bool:
            found.append(self.next())
            return found[-len(wanted) :] == wanted

        wait_until(are_found, f"chunks are {'given' if given else 'dropped'}", SECONDS)


@pytest.mark.skipif(not HAS_BACKPRESSURE, reason="vLLM 0.29 has no backpressure")
def test_under_backpressure_stores_are_dropped_then_resume(valkey: Place, vllm_config: Any) -> None:
    with scripted(vllm_config, valkey.url, {"backpressure": PRESSURE}) as one:
        offers = Offers(one)
        offers.wait(given=True)
        valkey.proxy.limit(10)  # an answer of a few bytes takes half a second
        offers.wait(given=False)
        assert one.tier.bp_detector.is_under_pressure()
        valkey.proxy.pass_all()
        offers.wait(given=True)
        counted = one.tier.counters.pop_all()
        assert counted["put_stored"] == len(offers.given)
        assert counted.get("stores_late", 0) == counted.get("stores_dropped", 0) == 0
        one.store(*range(1001, 1005))  # memory has the others no more
        wait_loaded(one, offers.given[-1])
        one.assert_nothing_is_held()


OF_OTHER_RELEASES = {"num_hash_lookahead_tokens", "shared_by"}
"""Fields that vLLM 0.32 lacks, and that others have."""


def test_what_is_read_with_a_default_is_what_this_vllm_calls_so() -> None:
    """A field that vLLM renames would read as its default: rows of two layouts under one name."""
    if Version(vllm.__version__).release[:2] < (0, 32):
        return  # what these have was looked up once, and does not change any more
    offloading = importlib.import_module("vllm.v1.kv_offload.config")
    places = (vllm.config, vllm.v1.kv_cache_interface, offloading)
    declared = {
        each.name
        for place in places
        for of in vars(place).values()
        if isinstance(of, type) and is_dataclass(of)
        for each in fields(of)
    }
    read: set[str] = set(tier_identity._PLACEMENT)
    for node in ast.walk(ast.parse(Path(tier_identity.__file__).read_text("utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            read |= {str(each.value) for each in node.args[1:2] if isinstance(each, ast.Constant)}
    assert len(read) > 12
    assert read - declared == OF_OTHER_RELEASES
