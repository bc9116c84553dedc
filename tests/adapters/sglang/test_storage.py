"""The storage back end as SGLang's controller calls it: what it gives back is right, or a miss."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.adapters.sglang import identity
from kvferry.adapters.sglang.identity import watch_weights
from kvferry.adapters.sglang.pages import PageRecords
from kvferry.errors import ConfigError
from tests.adapters.sglang import host
from tests.adapters.sglang.conftest import SECONDS, Attach
from tests.adapters.sglang.host import HostPool, PoolHitPolicy, PoolName, PoolTransfer, chain
from tests.servers.places import AllServers, name_of, valkey_place

KEYS = chain(3)
PAGES = [4, 0, 2]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that a machine which stalls makes late is waited for."""
    monkeypatch.setattr("kvferry.adapters.sglang.pages.ASK_SECONDS", SECONDS)


def fill(controller: host.Controller, keys: list[str] = KEYS) -> list[torch.Tensor]:
    """Pages in the host pool and behind it."""
    written = [controller.pool.fill(page, seed) for seed, page in enumerate(PAGES)]
    assert controller.backup(keys, PAGES)
    return written


def assert_comes_back(controller: host.Controller, written: list[torch.Tensor]) -> None:
    """Into other places than it lay in, and nowhere else."""
    places = [1, 3, 5]
    others = {page: controller.pool.page(page) for page in (0, 2, 4)}
    assert controller.prefetch([*KEYS, "absent"], [*places, 0]) == 3
    for place, page in zip(places, written, strict=True):
        assert torch.equal(controller.pool.page(place), page)
    for page, before in others.items():
        assert torch.equal(controller.pool.page(page), before)


@pytest.mark.parametrize(
    ("layout", "latent"),
    [*((layout, False) for layout in host.SHAPES), ("layer_first", True), ("page_first", True)],
)
def test_pages_come_back_byte_for_byte_after_a_restart(
    attach: Attach, layout: str, latent: bool
) -> None:
    config = {"is_mla_model": latent}
    first = attach(HostPool(layout, latent=latent), config=config)
    assert first.prefetch(KEYS, [0, 1, 2]) == 0
    written = fill(first)
    first.backend.close()
    second = attach(HostPool(layout, latent=latent), config=config)
    assert_comes_back(second, written)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("layout", host.SHAPES)
def test_a_page_that_is_not_finite_is_not_stored(attach: Attach, layout: str, value: float) -> None:
    one = attach(HostPool(layout))
    for seed, page in enumerate(PAGES):
        one.pool.fill(page, seed)
    bad = one.pool._page(PAGES[1] * host.PAGE)
    bad[(-1,) * bad.dim()] = value
    assert one.backup(KEYS, PAGES) is False
    assert one.backend.counters["save_not_finite"] == 1
    assert one.prefetch(KEYS, [1, 3, 5]) == 1  # up to the page that is missing


@pytest.mark.parametrize("kind", ["valkey", "cluster", "s3", "mooncake", "tiers"])
def test_every_store_gives_back_what_left_the_hosts_memory(
    kind: str, attach: Attach, valkey_server, valkey_cluster, seaweed, mooncake,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    servers = AllServers(valkey_server, valkey_cluster, seaweed, mooncake, tmp_path)
    store = servers.urls(name_of(request.node.name))[kind]
    first = attach(store=store)
    written = fill(first)
    first.pool.kv_buffer.zero_()
    assert_comes_back(first, written)
    first.backend.close()
    second = attach(store=store)
    assert_comes_back(second, written)
    assert second.backend.counters["hook_failed"] == 0


def test_pages_of_which_a_pool_shows_pieces_alone(attach: Attach) -> None:
    written = fill(attach(host.UnequalPool()))
    restarted = attach(host.UnequalPool())
    assert_comes_back(restarted, written)
    page = torch.zeros(written[0].numel(), dtype=torch.bfloat16)
    assert restarted.backend.get(KEYS[0], page) is None  # pieces have an order of their own


def test_the_older_calls_move_the_same_pages(attach: Attach) -> None:
    first = attach(HostPool("layer_first"), interface_v1=0)
    pages = [first.pool.fill(page, page).flatten() for page in range(3)]
    assert first.backend.batch_set(KEYS[:2], pages[:2])
    assert first.backend.set(KEYS[2], pages[2])
    assert first.backend.exists(KEYS[2])
    assert not first.backend.exists("absent")
    second = attach(HostPool("layer_first"))
    assert second.prefetch(KEYS, [3, 4, 5]) == 3
    assert torch.equal(second.pool.page(4).flatten(), pages[1])
    given = [second.pool.get_dummy_flat_data_page() for _ in range(3)]
    found = second.backend.batch_get([KEYS[0], "absent", KEYS[1]], given)
    assert [each is None for each in found] == [False, True, False]
    assert torch.equal(found[2], pages[1])
    assert second.backend.get(KEYS[0]).nbytes == pages[0].nbytes
    assert second.backend.get(KEYS[0], torch.zeros(1)) is None
    assert not second.backend.set("short", torch.zeros(1))


def test_pages_of_another_meaning_are_never_found(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = fill(attach())
    narrow = HostPool(page_size=host.PAGE // 2)
    other_dtype = HostPool()
    other_dtype.dtype = torch.float16
    for options in (
        {"model": "other"},
        {"arguments": {"overrides": {"rope_parameters": {"rope_theta": 5e5}}}},
        {"arguments": {"kv_cache_dtype": "fp8_e5m2"}},
        {"arguments": {"quantization": "fp8"}},
        {"arguments": {"rl_quant_profile": "a"}},
        {"arguments": {"speculative_draft_model_path": "a"}},
        {"config": {"tp_rank": 1, "tp_size": 2}},
        {"config": {"pp_rank": 1, "pp_size": 2}},
        {"tenant": "t"},
        {"weights_version": "v2"},
        {"pool": other_dtype},
        {"pool": HostPool("page_first_direct")},
        {"pool": host.UnequalPool()},  # another number of bytes
    ):
        assert attach(**options).backend.batch_exists(KEYS, None) == 0, options
    assert attach(narrow).backend.batch_exists(KEYS, None) == 0
    for variable in ("SGLANG_FP8_OF_SOME_KIND", "SGLANG_DSV4_KV_LAYOUT", "FLASHINFER_NVFP4_4OVER6"):
        with monkeypatch.context() as patched:
            patched.setenv(variable, "1")
            assert attach().backend.batch_exists(KEYS, None) == 0
    with monkeypatch.context() as patched:
        patched.setattr(identity, "__version__", "0.5.24")
        assert attach().backend.batch_exists(KEYS, None) == 0
    assert_comes_back(attach(config={"model_name": "another name"}), written)


def test_back_ends_of_other_pages_share_a_directory(attach: Attach) -> None:
    both = [attach(pool) for pool in (HostPool(), host.UnequalPool())]
    written = []
    for controller in both:
        assert controller.backend.batch_exists(KEYS, None) == 0
        written.append(fill(controller))
    for controller, pages in zip(both, written, strict=True):
        assert_comes_back(controller, pages)


def test_ranks_that_hold_the_same_latents_share_them(attach: Attach) -> None:
    def of_rank(rank: int) -> host.Controller:
        config = {"is_mla_model": True, "tp_rank": rank, "tp_size": 2}
        return attach(HostPool(latent=True), config=config)

    written = fill(of_rank(0))
    assert_comes_back(of_rank(1), written)


def test_adapters_are_not_shared_unless_the_weights_have_a_name(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = {"enable_lora": True}
    fill(attach(arguments=adapters))
    assert attach(arguments=adapters).backend.batch_exists(KEYS, None) == 0
    assert "name LoRA adapters without their content" in caplog.text
    fill(attach(arguments=adapters, weights_version="v"))
    assert attach(arguments=adapters, weights_version="v").backend.batch_exists(KEYS, None) == 3


def test_a_damaged_page_is_a_miss_and_is_replaced(attach: Attach, tmp_path: Path) -> None:
    written = fill(attach())
    second = attach()
    for path in (tmp_path / "store" / "records").glob("*/*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    before = second.pool.page(1)
    assert second.prefetch(KEYS, [1, 3, 5]) == 0
    assert torch.equal(second.pool.page(1), before)
    assert second.backend.counters["records_corrupt"] == 3
    fill(second)
    assert_comes_back(second, written)


def test_a_server_that_is_away_costs_misses_alone(attach: Attach) -> None:
    with valkey_place() as place:
        controller = attach(store=place.url, load_timeout_seconds=1)
        fill(controller)
        place.kill()
        assert controller.prefetch(KEYS, [1, 3, 5]) == 0
        asked = chain(2, prompt=1), host.indices([0, 1])
        assert controller.backend.batch_set_v1(*asked) == [False] * 2
        assert controller.backend.counters["hook_failed"] == 0


def test_a_quota_is_kept(attach: Attach, tmp_path: Path) -> None:
    controller = attach(store=f"{(tmp_path / 'store').as_uri()}?max_bytes=24KiB")
    for prompt in range(4):
        fill(controller, chain(3, prompt))
    stored = (tmp_path / "store" / "records").glob("*/*.safetensors")
    assert 0 < sum(path.stat().st_size for path in stored) <= 24 << 10
    assert controller.backend.batch_exists(chain(3, 0), None) == 0
    assert controller.backend.batch_exists(chain(3, 3), None) == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"io_thread": 4}, "did you mean 'io_threads'"),
        ({"store": "file:///x?max_bytes=1KiB"}, "max_bytes=1KiB is .* or lower --page-size"),
        ({"load_timeout_seconds": 0}, "must be more than 0"),
        ({"model": "nobody/nothing"}, 'set "weights_version" to a name'),
    ],
)
def test_bad_input_is_one_line_at_start(attach: Attach, options: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        attach(**options)
    assert "\n" not in str(raised.value)


def test_without_arguments_of_sglang_there_is_no_identity(attach: Attach) -> None:
    backend = type(attach().backend)
    host.RUNNING.arguments = None
    with pytest.raises(ConfigError, match="cannot be identified"):
        backend(host.storage_config({"store": "memory://x"}))


def test_a_version_stands_for_weights_that_are_not_found(attach: Attach) -> None:
    away = {"model": "nobody/nothing", "weights_version": "v1"}
    written = fill(attach(**away))
    assert_comes_back(attach(**away), written)
    assert attach(weights_version="v1").backend.batch_exists(KEYS, None) == 0


WRITES = [name for name in vars(host.WeightUpdater) if "weight" in name]


@pytest.mark.parametrize("name", WRITES)
def test_nothing_of_the_weights_before_is_read_after_they_change_in_place(
    name: str, attach: Attach
) -> None:
    first = attach()
    written = fill(first)
    assert getattr(host.WeightUpdater(), name)("of", "SGLang") == (True, "said")
    assert first.prefetch(KEYS, [1, 3, 5]) == 0
    # SGLang's cache still holds KV of the weights before, and hands it over.
    assert not first.backup(KEYS, PAGES)
    assert not first.backend.set(KEYS[0], first.pool.page(0).flatten())
    assert first.backend.counters["stores_dropped"] == 4
    host.HiCacheController().reset()
    assert first.prefetch(KEYS, [1, 3, 5]) == 0
    fill(first)
    assert first.prefetch(KEYS, [1, 3, 5]) == 3
    host.HiCacheController().reset()  # without a change
    assert first.prefetch(KEYS, [1, 3, 5]) == 3
    assert attach().prefetch(KEYS, [1, 3, 5]) == 0  # attached again, to the changed weights
    host.HiCacheController().reset()
    identity.WEIGHTS.have_changed = identity.WEIGHTS.left_old_kv = False  # another process
    assert_comes_back(attach(), written)


def test_a_store_under_way_as_weights_change_is_not_read_after_the_flush(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, begun, goes_on = attach(), threading.Event(), threading.Event()
    store = PageRecords.store

    def held(*arguments: Any) -> list[bool]:
        begun.set()
        assert goes_on.wait(SECONDS)
        return store(*arguments)

    monkeypatch.setattr(PageRecords, "store", held)
    thread = threading.Thread(target=controller.backup, args=(KEYS, PAGES))
    thread.start()
    assert begun.wait(SECONDS)
    host.WeightUpdater().update_weights_from_tensor()
    goes_on.set()
    thread.join(SECONDS)
    assert controller.prefetch(KEYS, [1, 3, 5]) == 3  # as from SGLang's own cache
    host.HiCacheController().reset()
    assert controller.prefetch(KEYS, [1, 3, 5]) == 0


def test_a_flush_that_fails_ends_nothing(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_self: object) -> None:
        raise RuntimeError("a thread does not end")

    monkeypatch.setattr(host.HiCacheController, "reset", fails)
    controller = attach()
    host.WeightUpdater().begin_weight_update()
    with pytest.raises(RuntimeError, match="does not end"):
        host.HiCacheController().reset()
    assert not controller.backup(KEYS, PAGES)


def test_weights_are_watched_without_keeping_anything_alive() -> None:
    class Watcher:
        seen = 0

        def begin_epoch(self) -> None:
            Watcher.seen += 1

    watcher = Watcher()
    watch_weights(watcher.begin_epoch)
    host.WeightUpdater().begin_weight_update()
    assert Watcher.seen == 1
    del watcher
    host.HiCacheController().reset()
    assert Watcher.seen == 1


class TestOtherPools:
    """What hybrid models keep beside KV."""

    @staticmethod
    def attached(attach: Attach) -> tuple[host.Controller, HostPool]:
        controller, states = attach(), HostPool("layer_first")
        controller.backend.register_mem_host_pool_v2(states, PoolName.MAMBA)
        return controller, states

    def test_each_pool_has_its_own_pages(self, attach: Attach) -> None:
        controller, states = self.attached(attach)
        fill(controller)
        kept = states.fill(1, seed=9)
        transfer = PoolTransfer(PoolName.MAMBA, host.indices([1]), [KEYS[1]])
        assert controller.backend.batch_set_v2([transfer]) == {PoolName.MAMBA: [True]}
        restarted, states = self.attached(attach)
        transfer = PoolTransfer(PoolName.MAMBA, host.indices([3, 4]), [KEYS[1], KEYS[2]])
        kv = PoolTransfer(PoolName.KV, host.indices([0]), [KEYS[0]])
        found = restarted.backend.batch_get_v2([transfer, kv])
        assert found == {PoolName.MAMBA: [True, False], PoolName.KV: [True]}
        assert torch.equal(states.page(3), kept)

    def test_a_prefix_ends_where_every_pool_has_what_it_needs(self, attach: Attach) -> None:
        controller, _ = self.attached(attach)
        fill(controller)
        for key in (KEYS[0], KEYS[2]):
            transfer = PoolTransfer(PoolName.MAMBA, host.indices([1]), [key])
            controller.backend.batch_set_v2([transfer])

        def asked(*transfers: PoolTransfer) -> tuple:
            found = controller.backend.batch_exists_v2([*KEYS, "absent"], list(transfers))
            return found.kv_hit_pages, found.restorable_prefix_pages

        trailing = PoolHitPolicy.TRAILING_PAGES
        assert asked() == (3, [1, 2, 3])
        assert asked(PoolTransfer(PoolName.MAMBA)) == (1, [1])
        assert asked(PoolTransfer(PoolName.MAMBA, None, ["x"], trailing)) == (3, [1, 3])
        assert asked(PoolTransfer(PoolName.MAMBA, None, ["x"] * 2, trailing)) == (1, [1])
        assert asked(PoolTransfer(PoolName.INDEXER)) == (0, [])
        assert asked(PoolTransfer(PoolName.MAMBA, None, ["x"], "a later policy")) == (1, [1])
        groups = PoolTransfer(PoolName.INDEXER, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
        assert asked(groups) == (3, [1, 2, 3])


def test_clearing_deletes_what_this_rank_stored_and_no_more(attach: Attach) -> None:
    other = attach(tenant="other")
    written = fill(other)
    controller = attach()
    fill(controller)
    controller.backend.clear()
    assert controller.backend.batch_exists(KEYS, None) == 0
    assert_comes_back(other, written)


def test_statistics_are_as_sglang_asks_for_them(attach: Attach) -> None:
    assert attach(tenant="quiet").backend.get_stats() is None
    controller = attach(config={"enable_storage_metrics": True})
    fill(controller)
    assert controller.prefetch(KEYS, [1, 3, 5]) == 3
    stats = controller.backend.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([3], [3])
    assert stats.prefetch_bandwidth[0] > 0
    assert stats.backup_bandwidth[0] > 0
    assert controller.backend.get_stats().prefetch_pgs == []


def test_loads_and_stores_of_several_threads_do_not_meet(attach: Attach) -> None:
    controller = attach(HostPool("layer_first"))
    wrong = []

    def run(number: int) -> None:
        for turn in range(10):
            [key] = chain(1, prompt=100 * number + turn)
            page = controller.pool.fill(number, seed=100 * number + turn)
            if not controller.backup([key], [number]):
                wrong.append("not stored")
            controller.pool.fill(number, seed=-1)
            if controller.prefetch([key], [number]) != 1:
                wrong.append("not found")
            elif not torch.equal(controller.pool.page(number), page):
                wrong.append("other bytes")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_fault_stays_here(attach: Attach) -> None:
    controller = attach()
    fill(controller)
    assert controller.backend.batch_get_v1(KEYS, host.indices([0])) == [False] * 3
    assert controller.backend.batch_set_v1(KEYS, None) == [False] * 3
    assert controller.backend.counters["hook_failed"] == 2
    controller.backend.close()
    controller.backend.close()
    assert controller.prefetch(KEYS, [0, 1, 2]) == 0


def test_administration_does_not_raise_either(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = attach(config={"enable_storage_metrics": True})
    states = HostPool("layer_first")
    controller.backend.register_mem_host_pool_v2(states, PoolName.MAMBA)
    called = []

    def fails(call: str) -> None:
        called.append(call)
        raise OSError("no")

    backend = controller.backend
    monkeypatch.setattr(backend._counts, "publish", lambda: fails("counts"))
    assert backend.get_stats() is None
    for name, (_, records) in backend._pools.items():
        monkeypatch.setattr(records, "clear", lambda name=name: fails(f"clear {name}"))
    backend.clear()
    closes = {name: records.close for name, (_, records) in backend._pools.items()}
    for name, (_, records) in backend._pools.items():
        monkeypatch.setattr(records, "close", lambda _, name=name: fails(f"close {name}"))
    backend.close()
    assert called == ["counts", "clear kv", "clear mamba", "close kv", "close mamba"]
    for close in closes.values():
        close(30.0)


SAID = [
    *(("an argument", name) for name in (*identity._NUMERIC, "quantization", "device")),
    *(("a rank", name) for name in ("tp_rank", "pp_size", "attn_cp_rank", "dcp_size")),
]


@pytest.mark.parametrize(("what", "name"), SAID)
def test_what_sglang_does_not_say_is_refused_by_name(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, what: str, name: str
) -> None:
    """It is not taken for its default: other KV would have the same namespace."""
    if what == "an argument":
        monkeypatch.delitem(host.ARGUMENTS, name)
    else:
        made = host.storage_config

        def without(*arguments: Any, **changes: Any) -> Any:
            config = made(*arguments, **changes)
            delattr(config, name)
            return config

        monkeypatch.setattr(host, "storage_config", without)
    with pytest.raises(ConfigError, match=f"'{name}'") as refusal:
        attach()
    assert "\n" not in str(refusal.value)
