"""kvferry as a tier of vLLM's own offloading: under its manager, and in an engine."""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.adapters.rows import RowsOptions
from kvferry.adapters.vllm.host import load_host
from kvferry.adapters.vllm.tier_identity import rows_namespace
from kvferry.adapters.vllm.tier_rows import TierRows
from kvferry.errors import ConfigError
from tests.real_vllm.host import serves_tiers
from tests.real_vllm.scripted_tier import (
    ROW,
    TIER,
    EngineArgs,
    LookupResult,
    OffloadingCacheConfig,
    OffloadingModelConfig,
    TieringOffloadingSpec,
    content,
    key,
    offloading_config,
    scripted,
)

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


def test_damaged_records_are_misses_and_told_as_removed(tmp_path: Path, vllm_config: Any) -> None:
    with scripted(vllm_config, tmp_path.as_uri()) as one:
        one.store(1, 2, 3, 4)
        one.store(5, 6, 7, 8)
        list(one.manager.take_events())
        for path in (tmp_path / "records").glob("*/*.safetensors"):
            held = bytearray(path.read_bytes())
            held[-1] ^= 1
            path.write_bytes(held)
        assert one.lookup(1) == (LookupResult.MISS, None)
        events = [event for event in one.manager.take_events() if event.removed]
        assert key(1) in [each for event in events for each in event.keys]


def test_a_reset_begins_an_epoch(tmp_path: Path, vllm_config: Any) -> None:
    with scripted(vllm_config, tmp_path.as_uri()) as one:
        one.store(1)
        one.reset()
        assert one.lookup(1) == (LookupResult.MISS, None)
        one.store(2, 3, 4, 5)
        one.store(6, 7, 8, 9)
        assert one.lookup(2) == (LookupResult.HIT, content(2, ROW))
    with scripted(vllm_config, tmp_path.as_uri()) as one:
        assert one.lookup(1) == (LookupResult.HIT, content(1, ROW))
        assert one.lookup(2) == (LookupResult.MISS, None)


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


def test_rows_of_another_release_are_never_found(vllm_config: Any) -> None:
    def namespace(release: str) -> bytes:
        config, options = offloading_config({}), RowsOptions(store="memory://x")
        return rows_namespace(
            vllm_config, config, load_host(), release, options, row_bytes=ROW
        ).digest

    assert namespace("0.32.0") == namespace("0.32.1")
    assert namespace("0.32.0") != namespace("0.33.0")


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
    with scripted(vllm_config, tmp_path.as_uri(), **layout, **halves) as one:
        assert one.row_bytes == ROW
        assert one.lookup(1)[0] is (LookupResult.HIT if canonical else LookupResult.MISS)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"io_thread": 4}, "did you mean 'io_threads'"),
        ({"store": "file:///x?max_bytes=1KiB"}, "max_bytes=1KiB is smaller"),
        ({"load_timeout_seconds": 0}, "must be more than 0"),
    ],
)
def test_a_wrong_option_is_one_line_at_start(
    tmp_path: Path, vllm_config: Any, options: dict[str, Any], says: str
) -> None:
    with (
        pytest.raises(ConfigError, match=says) as raised,
        scripted(vllm_config, tmp_path.as_uri(), options),
    ):
        pass
    assert "\n" not in str(raised.value)


def test_without_a_configuration_of_the_engine_a_tier_does_not_start(tmp_path: Path) -> None:
    tiers = [{**TIER, "store": tmp_path.as_uri()}]
    spec = TieringOffloadingSpec(offloading_config({"secondary_tiers": tiers}))
    with pytest.raises(ConfigError, match="cannot identify the model"):
        spec.get_manager()


def test_weights_that_are_not_found_are_refused_or_a_name_by_option(
    tmp_path: Path, vllm_config: Any
) -> None:
    away = copy.deepcopy(vllm_config)
    away.model_config.model = "nobody/nothing"
    with (
        pytest.raises(ConfigError, match='set "identity": "name" to trust the name'),
        scripted(away, tmp_path.as_uri()),
    ):
        pass
    named = {"identity": "name"}
    with scripted(away, tmp_path.as_uri(), named) as one:
        one.store(1)
    (text,) = [path.read_text() for path in (tmp_path / "namespaces").glob("*.json")]
    assert json.loads(text)["description"]["weights_by_name"] is True
    with scripted(away, tmp_path.as_uri(), named) as one:
        assert one.lookup(1)[0] is LookupResult.HIT
    # A model whose weights are there is never known by its name alone.
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
        assert one.tier.lookup(key(9), one.request()) is LookupResult.MISS
        one.store(5, 6)
        assert one.tier.counters["hook_failed"] >= 2
