"""SGLang's own controller, host pools, factory and fault injector over the back end."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from sglang.srt.runtime_context import get_context

from examples.cpu import sglang_tiers
from examples.cpu.sglang_tiers import PAGE, Engine
from kvferry.errors import ConfigError
from tests.real_sglang.updates import Updates
from tests.servers.places import FAULTS, valkey_place

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_rank")]

LAYOUTS = [
    *(
        (layout, False)
        for layout in ("layer_first", "page_first", "page_first_direct", "page_head")
    ),
    *((layout, True) for layout in ("layer_first", "page_first", "page_first_direct")),
]
BACK_SECONDS = 120.0
TOKENS = list(range(100, 100 + 3 * PAGE))


@contextmanager
def serving(model: Path, **arguments: object) -> Iterator[None]:
    """A process of SGLang that runs a model."""
    with get_context().override_server_args(model_path=str(model), device="cpu", **arguments):
        yield


@contextmanager
def engine(store: Path | str, layout: str = "page_first", *, latent: bool = False, **extra: object):
    made = Engine(layout, latent=latent)
    made.attach(store.as_uri() if isinstance(store, Path) else store, **extra)
    try:
        yield made
    finally:
        made.detach()


@pytest.mark.parametrize(("layout", "latent"), LAYOUTS)
@pytest.mark.parametrize("interface", [1, 0])
def test_kv_comes_back_to_the_device_after_a_restart(
    tmp_path: Path, models: dict[str, Path], layout: str, latent: bool, interface: int
) -> None:
    with serving(models["plain"]):
        with engine(tmp_path, layout, latent=latent, interface_v1=interface) as first:
            indices = first.compute(TOKENS)
            computed = first.kv(indices)
            assert first.write(TOKENS, indices) == len(TOKENS)
        with engine(tmp_path, layout, latent=latent, interface_v1=interface) as second:
            restored = second.restore(TOKENS + [7] * PAGE)
            assert len(restored) == len(TOKENS)
            for was, now in zip(computed, second.kv(restored), strict=True):
                assert torch.equal(was, now)
            assert second.controller.storage_backend.counters["hook_failed"] == 0


def test_the_fault_injector_of_sglang_costs_hits_alone(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    hits = misses = 0
    with serving(models["plain"]), engine(tmp_path) as one:
        for number in range(40):
            tokens = [1000 * number + each for each in TOKENS]
            indices = one.compute(tokens)
            computed = one.kv(indices)
            one.write(tokens, indices)
            one.allocator.free(indices)
            restored = one.restore(tokens)
            hits, misses = hits + bool(len(restored)), misses + (not len(restored))
            for was, now in zip(computed, one.kv(restored), strict=True):
                assert torch.equal(was[: len(now)], now)
            one.allocator.clear()
            one.host.clear()
    assert hits
    assert misses


class Prompts:
    """Prompts of one engine, all checked. The slots of each are free after it.

    Attributes:
        missed: prompts that did not come back whole.
    """

    def __init__(self, one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.missed = 0
        self._one = one
        self._taken: list[torch.Tensor] = []
        self._pools = (one.host, one.allocator)
        self._free = [pool.available_size() for pool in self._pools]
        alloc = one.host.alloc

        def noted(size: int) -> torch.Tensor:
            self._taken.append(alloc(size))
            return self._taken[-1]

        monkeypatch.setattr(one.host, "alloc", noted)

    def ask(self, number: int) -> bool:
        """Restore a prompt, and write it if it does not come back whole."""
        one = self._one
        tokens = [1000 * number + each for each in TOKENS]
        indices = one.compute(tokens)
        computed = one.kv(indices)
        self._taken.clear()
        restored = one.restore(tokens)
        for slots in self._taken:
            one.host.free(slots)
        for was, now in zip(computed, one.kv(restored), strict=True):
            assert torch.equal(was[: len(now)], now)
        if len(restored) < len(tokens):
            self.missed += 1
            one.write(tokens, indices)
        for slots in (indices, restored):
            if len(slots):
                one.allocator.free(slots)
        assert [pool.available_size() for pool in self._pools] == self._free
        return len(restored) == len(tokens)

    def rounds(self, until: Callable[[bool], bool]) -> None:
        """Ask for the same prompts until this is so of whether all of them came back."""
        end = time.monotonic() + BACK_SECONDS
        while not until([self.ask(number) for number in range(3)] == [True] * 3):
            assert time.monotonic() < end, "what is waited for does not come"


@pytest.mark.parametrize("fault", ["stopped", "wrong"])
def test_a_server_that_fails_costs_hits_alone_and_no_slot(
    fault: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, end = FAULTS[fault]
    with (
        valkey_place() as place,
        serving(models["plain"]),
        engine(place.url, load_timeout_seconds=1.0) as one,
    ):
        prompts = Prompts(one, monkeypatch)
        prompts.rounds(until=bool)
        missed = prompts.missed
        begin(place)
        prompts.rounds(until=lambda _: prompts.missed > missed)
        end(place)
        prompts.rounds(until=bool)
        assert one.controller.storage_backend.counters["hook_failed"] == 0


def test_page_unified_is_refused_in_one_line(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_tiers, "DIM", 8)  # the layout takes pieces of 16 bytes alone
    with serving(models["plain"]), pytest.raises(ConfigError, match="page_unified") as raised:
        Engine("page_unified", latent=False).attach(tmp_path.as_uri())
    assert "set --hicache-mem-layout page_first" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_refused_back_end_leaves_the_controller_as_it_was(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    with serving(models["plain"]):
        one = Engine("page_first", latent=False)
        with pytest.raises(ConfigError, match="did you mean 'io_threads'"):
            one.attach(tmp_path.as_uri(), io_thread=4)
        assert not one.controller.enable_storage
        one.attach(tmp_path.as_uri())
        one.controller.clear_storage_backend()
        one.detach()


def prompts(num: int) -> list[list[int]]:
    return [[1000 * number + each for each in TOKENS] for number in range(num)]


@pytest.mark.parametrize("flush_cache", [True, False])
@pytest.mark.parametrize("backs_up", ["before", "after"])
def test_pages_of_the_weights_before_are_misses_after_a_flush(
    flush_cache: bool, backs_up: str, tmp_path: Path, models: dict[str, Path]
) -> None:
    with serving(models["plain"]), engine(tmp_path) as one:
        backend, updates = one.controller.storage_backend, Updates(one)
        held = [(tokens, one.compute(tokens)) for tokens in prompts(3)]
        if backs_up == "before":
            for tokens, indices in held:
                assert one.write(tokens, indices) == len(tokens)
        updates.update(flush_cache=flush_cache)
        if backs_up == "after" and not flush_cache:
            for tokens, indices in held:
                assert one.write(tokens, indices) == 0
            assert backend.counters["stores_dropped"] == 9
        updates.flush()
        for tokens, _ in held:
            assert len(one.restore(tokens)) == 0
        # Nothing stays closed: what is computed from now on is stored and found.
        updates.flush()
        indices = one.compute(TOKENS)
        assert one.write(TOKENS, indices) == len(TOKENS)
        assert len(one.restore(TOKENS)) == len(TOKENS)
        assert backend.counters["hook_failed"] == 0


def test_a_flush_alone_leaves_storage_as_it_is(tmp_path: Path, models: dict[str, Path]) -> None:
    with serving(models["plain"]), engine(tmp_path) as one:
        one.write(TOKENS, one.compute(TOKENS))
        Updates(one).flush()
        assert len(one.restore(TOKENS)) == len(TOKENS)


def test_a_back_end_that_is_attached_after_an_update_finds_nothing_of_before(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    with serving(models["plain"]), engine(tmp_path) as one:
        one.write(TOKENS, one.compute(TOKENS))
        one.detach()
        Updates(one).update(flush_cache=False)
        one.attach(tmp_path.as_uri())
        assert len(one.restore(TOKENS)) == 0
        assert one.write(TOKENS, one.compute(TOKENS)) == 0  # it may be of the weights before


def test_statistics_pass_sglangs_own_collector(tmp_path: Path, models: dict[str, Path]) -> None:
    from sglang.srt.observability.metrics_collector import StorageMetricsCollector

    with serving(models["plain"]):
        one = Engine("page_first", latent=False)
        one.controller.enable_storage_metrics = True
        backend = one.attach(tmp_path.as_uri())
        one.write(TOKENS, one.compute(TOKENS))
        one.restore(TOKENS)
        stats = backend.get_stats()
        assert (stats.prefetch_pgs, stats.backup_pgs) == ([3], [3])
        StorageMetricsCollector({"storage_backend": "dynamic"}).log_storage_metrics(stats)
        one.detach()


def test_the_example_says_that_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_tiers.refuse_short_memory()
    monkeypatch.setattr(sglang_tiers.pool_host, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 10**15)
    with pytest.raises(SystemExit, match=r"leaves 1000000.0 GB of memory free, and .* in use"):
        sglang_tiers.refuse_short_memory()


def test_the_example_reads_in_a_second_process(tmp_path: Path, models: dict[str, Path]) -> None:
    store = (tmp_path / "store").as_uri()
    command = [sys.executable, sglang_tiers.__file__, str(models["plain"]), store]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280).stdout
    assert re.findall(r"(\d+) read from the store", out) == ["0", "6"]
    assert out.count("equal byte for byte") == 1
