"""Weights that take longer to hash than a start of SGLang waits: it serves without the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.adapters.sglang import identity, storage
from kvferry.adapters.sglang.pages import PageRecords
from kvferry.errors import ConfigError
from kvferry.testing.stores.hooks import PATIENCE_SECONDS, wait_until
from tests.adapters.sglang import host
from tests.adapters.sglang.conftest import Attach
from tests.adapters.sglang.host import Controller, HostPool, PoolName, PoolTransfer, chain
from tests.late import GatedWeights, is_hashing

SHARED, EARLY, LATE, STATE = (chain(3, prompt) for prompt in range(4))
PAGES = [4, 0, 2]

Late = Callable[..., tuple[Controller, GatedWeights]]


@pytest.fixture
def late(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    """A factory of back ends whose weights are being hashed. `found` stands for what is found."""
    gate = threading.Event()

    def make(found: Callable[[], bytes] | None = None) -> tuple[Controller, GatedWeights]:
        weights = GatedWeights(gate, found)
        with monkeypatch.context() as patched:
            patched.setattr(storage, "LateWeights", lambda: weights)
            return attach(), weights

    yield make
    gate.set()


def become_known(weights: GatedWeights) -> None:
    weights.become_known()
    wait_until(lambda: not is_hashing(), "the thread that hashes has told all")


def wait_open(controller: Controller) -> None:
    for _, records in controller.backend._pools.values():
        tiers = records._store.tiers
        wait_until(lambda tiers=tiers: all(each.state == "up" for each in tiers()), "it is open")
        assert records._store.wait_indexed(PATIENCE_SECONDS)


def files(tmp_path: Path) -> set[Path]:
    return set((tmp_path / "store").rglob("*.safetensors"))


def serves_nothing(controller: Controller) -> bool:
    """Whether nothing is found, read or stored by any call."""
    back_end, page = controller.backend, controller.pool.page(0).flatten()
    places = host.indices(PAGES)
    return not any(
        (
            back_end.batch_exists(SHARED),
            back_end.batch_exists_v2(SHARED).kv_hit_pages,
            any(back_end.batch_get_v1(SHARED, places)),
            back_end.get(SHARED[0]) is not None,
            any(back_end.batch_set_v1(EARLY, places)),
            back_end.set(EARLY[0], page),
            back_end.counters["hook_failed"],
        )
    )


def change() -> None:
    host.WeightUpdater().update_weights_from_tensor()


def flush() -> None:
    host.HiCacheController().reset()


MEANWHILE = {
    "nothing": (),
    "a flush alone": (flush,),
    "a change": (change,),
    "a change and its flush": (change, flush),
    "a change as it is taken up": (),
}


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_pages_are_kept_once_the_weights_are_hashed(
    meanwhile: str, late: Late, attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attach().backup(SHARED, PAGES)
    stored = files(tmp_path)
    controller, weights = late()
    states = HostPool("layer_first")
    controller.backend.register_mem_host_pool_v2(states, PoolName.MAMBA)
    assert serves_nothing(controller)
    for happens in MEANWHILE[meanwhile]:
        happens()
    if meanwhile == "a change as it is taken up":
        change_at_take_up(monkeypatch)
    assert serves_nothing(controller)
    assert files(tmp_path) == stored
    become_known(weights)
    wait_open(controller)
    is_changed = "change" in meanwhile
    # No epoch is taken back.
    assert controller.prefetch(SHARED, [1, 3, 5]) == (0 if is_changed else 3)
    assert controller.backend.batch_exists(EARLY) == 0
    if identity.WEIGHTS.left_old_kv:
        assert not controller.backup(LATE, PAGES)
        flush()
        assert controller.prefetch(SHARED, [1, 3, 5]) == 0
    assert controller.backup(LATE, PAGES)
    assert controller.prefetch(LATE, [1, 3, 5]) == 3
    state = PoolTransfer(PoolName.MAMBA, host.indices([1]), [STATE[0]])
    assert controller.backend.batch_set_v2([state]) == {PoolName.MAMBA: [True]}
    identity.WEIGHTS.have_changed = identity.WEIGHTS.left_old_kv = False  # another process
    other = attach()
    other.backend.register_mem_host_pool_v2(HostPool("layer_first"), PoolName.MAMBA)
    assert other.backend.batch_exists(LATE) == (0 if is_changed else 3)
    assert other.backend.batch_get_v2([state]) == {PoolName.MAMBA: [not is_changed]}
    assert other.backend.batch_exists(EARLY) == 0


def change_at_take_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the weights change just before records switch to the namespace of those hashed."""
    begin = PageRecords.begin_epoch

    def begin_epoch(records: PageRecords, *namespace: Any) -> None:
        if namespace:
            change()
        begin(records, *namespace)

    monkeypatch.setattr(PageRecords, "begin_epoch", begin_epoch)


def test_a_pool_that_is_registered_later_has_the_same_namespace(late: Late, attach: Attach) -> None:
    controller, weights = late()
    become_known(weights)
    controller.backend.register_mem_pool_host(controller.pool)  # again
    wait_open(controller)
    assert controller.backup(LATE, PAGES)
    assert attach().backend.batch_exists(LATE) == 3


FAULTS = [ConfigError("model.safetensors changes while it is read"), OSError(5, "broken mount")]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_weights_that_cannot_be_hashed_leave_sglang_without_the_store(
    late: Late, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    def found() -> bytes:
        raise fault

    controller, weights = late(found)
    controller.backend.register_mem_host_pool_v2(HostPool("layer_first"), PoolName.MAMBA)
    become_known(weights)
    assert serves_nothing(controller)
    controller.backend.close()
    assert not files(tmp_path)
    [line] = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert str(fault) in line
    assert "\n" not in line
    assert "cannot be opened" not in caplog.text


def test_a_back_end_that_is_closed_as_it_hashes_leaves_nothing(
    late: Late, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())

    def left() -> list[str]:
        return [each.name for each in set(threading.enumerate()) - before]

    controller, weights = late()
    controller.backend.close()
    wait_until(lambda: left() == ["kvferry-weights"], "no thread waits for the one that hashes")
    become_known(weights)
    assert left() == []
    assert not (tmp_path / "store").exists()
    assert [line for line in caplog.messages if "background" in line]
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []
    assert "cannot be opened" not in caplog.text
