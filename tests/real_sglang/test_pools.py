"""What SGLang's own host pools hold decides who reads their pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

from examples.cpu import sglang_tiers
from examples.cpu.sglang_tiers import Engine
from kvferry.adapters.sglang.pages import pages_of
from kvferry.adapters.sglang.pool_facts import OF_THIS_START, pool_facts
from tests.adapters.sglang.test_pool_facts import changed
from tests.real_sglang.test_controller import LAYOUTS, serving

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_rank")]

SLOTS, LAYERS = 5, 2
STATE, CONV = (3, 4, 8), (6, 3)


def states(
    *,
    temporal: torch.dtype = torch.float32,
    conv: torch.dtype = torch.bfloat16,
    state_shape: tuple[int, ...] = STATE,
    conv_shape: tuple[int, ...] = CONV,
    layout: str = "page_first",
    slots: int = SLOTS,
) -> MambaPoolHost:
    """The host pool of a model's recurrent states."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, slots, *state_shape, dtype=temporal),
        conv=(torch.zeros(LAYERS, slots, *conv_shape, dtype=conv),),
    )
    return MambaPoolHost(info, 3.0, 0, device_capacity=slots, pin_memory=False, layout=layout)


POOLS: dict[str, Callable[[], Any]] = {
    "mamba": states,
    **{
        f"{layout} {latent=}": lambda layout=layout, latent=latent: (
            Engine(layout, latent=latent).host
        )
        for layout, latent in LAYOUTS
    },
}


def facts(pool: Any) -> object:
    return pool_facts(pool, pages_of(pool).num_bytes)


@pytest.mark.parametrize("name", POOLS)
def test_each_attribute_of_a_pool_is_of_its_namespace(name: str, models: dict[str, Path]) -> None:
    with serving(models["plain"]):
        pool = POOLS[name]()
        before = pool_facts(pool, 0)
        held = vars(pool).keys() - OF_THIS_START - {"device"}  # which is always the CPU
        for each in held:
            value = getattr(pool, each)
            if isinstance(value, list | tuple) and not value:
                continue
            setattr(pool, each, changed(value))
            assert pool_facts(pool, 0) != before, each
            setattr(pool, each, value)
        assert pool_facts(pool, 0) == before
        assert len(held) > 20


@pytest.mark.parametrize("name", POOLS)
def test_the_next_start_with_other_memory_finds_its_pages(
    name: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(models["plain"]):
        before = facts(POOLS[name]())
        if name == "mamba":
            assert facts(states(slots=7)) == before
            return
        monkeypatch.setattr(sglang_tiers, "NUM_TOKENS", 2 * sglang_tiers.NUM_TOKENS)
        assert facts(POOLS[name]()) == before


@pytest.mark.parametrize(
    ("other", "finds"),
    [
        ({}, True),
        ({"temporal": torch.float16, "state_shape": (3, 4, 16)}, False),  # as many bytes
        ({"temporal": torch.int32}, False),
        ({"conv": torch.float16}, False),
        ({"state_shape": (4, 3, 8)}, False),
        ({"conv_shape": (3, 6)}, False),
        ({"layout": "page_first_direct"}, False),
    ],
    ids=str,
)
def test_recurrent_states_of_another_dtype_or_shape_are_misses(
    other: dict[str, Any], finds: bool, tmp_path: Path, models: dict[str, Path]
) -> None:
    with serving(models["plain"]):
        for pool, is_first in ((states(), True), (states(**other), False)):
            engine = Engine("page_first", latent=False)
            backend = engine.attach(tmp_path.as_uri())
            backend.register_mem_host_pool_v2(pool, PoolName.MAMBA)
            transfer = PoolTransfer(PoolName.MAMBA, torch.tensor([2]), keys=["state"])
            if is_first:
                pool.temporal_buffer[2] = torch.randn(pool.temporal_buffer[2].shape)
                written = pool.get_data_page(2)
                assert backend.batch_set_v2([transfer]) == {PoolName.MAMBA: [True]}
            else:
                assert backend.batch_get_v2([transfer]) == {PoolName.MAMBA: [finds]}
                assert torch.equal(pool.get_data_page(2), written) == finds
            assert backend.counters["hook_failed"] == 0
            engine.detach()
