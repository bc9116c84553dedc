"""vLLM's own tests of how requests of prefill/decode live in its scheduler, as released, with our
connector for NIXL's; and, of each that asserts what we do not promise, a sister: the same course in
vLLM's scheduler, with our promise.

There is no model here: a step computes nothing, and tokens are made up.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvferry.testing.models import make_tiny_model
from kvferry.testing.stores.hooks import wait_until
from tests.real_vllm.host import RELEASE
from tests.tokenizers import save_tiny_tokenizer

pytestmark = [
    pytest.mark.skipif(RELEASE != (0, 32), reason="vLLM's tests are those of 0.32"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
]

FILES = Path(__file__).parents[2] / ".vllm-connectors" / "0.32.0"
SECONDS = 300
BLOCK = 16
SWAP = '''
from vllm.plugins import load_general_plugins
from . import utils

load_general_plugins()
made_config = utils.create_vllm_config

def create_vllm_config(*args, block_size=16, **kwargs):
    """Chunks of a block: some of these blocks can only be stored whole."""
    options = {{"store": {store!r}, "chunk_tokens": block_size}}
    options |= {{"memory_bytes": 1 << 20, "audit": "off"}}
    return made_config(
        *args, block_size=block_size, model={model!r}, kv_connector="KVFerryConnector",
        kv_connector_extra_config=options, **kwargs,
    )

utils.create_vllm_config = create_vllm_config
made = utils.create_request

def create_request(*args, **kwargs):
    """As a prefill of ours answers: it names no blocks."""
    request = made(*args, **kwargs)
    if kwargs.get("do_remote_prefill"):
        request.kv_transfer_params["remote_block_ids"] = [[]]
    return request

utils.create_request = create_request
'''
"""In the place of a `conftest.py` of vLLM's tests."""

PASS = {
    "test_no_spurious_prefix_caching",
    "test_async_load_reserves_blocks_for_inflight",
    "test_async_loads_both_admitted_when_pool_fits",
    "test_async_load_reserves_blocks_for_promotion_margin[single-group]",
    "test_async_load_reserves_blocks_for_promotion_margin[multiple-groups]",
    "test_async_load_reserves_blocks_for_promotion_margin[different-block-sizes]",
    "test_deferred_lookup_does_not_block_parked_load",
}
REFUSED = {
    "test_async_load_does_not_double_reserve_mamba_spec_blocks[none-128-18]",
    "test_async_load_does_not_double_reserve_mamba_spec_blocks[align-16-18]",
    "test_p_side_chunked_prefill_mamba",
}
"""Hybrids of a host that keeps no states at the ends of blocks, or kinds of states that are not
served: there is no engine."""

SISTERS = {
    "test_a_decode_holds_no_block_until_all_is_there": {
        "test_basic_lifecycle",
        "test_full_block_prompt",
    },
    "test_others_run_while_a_decode_waits": {"test_interleaved_lifecycle"},
    "test_a_decode_that_lost_its_blocks_resumes_with_its_hit": {"test_cannot_schedule_after_recv"},
    "test_a_decode_that_finds_no_blocks_gets_its_hit_later": {"test_cannot_recv"},
    "test_a_decode_that_is_aborted_while_it_waits_leaves_nothing": {
        "test_kv_fetch_stages_cleared_on_abort"
    },
    "test_a_prefill_answers_and_holds_no_block": {
        "decode: test_basic_lifecycle",
        "decode: test_short_prompt_lifecycle",
    },
    "test_a_prefill_of_what_is_in_the_prefix_cache_hands_all_of_it_over": {
        "decode: test_prefix_cache_lifecycle"
    },
    "test_a_prefill_that_is_aborted_after_its_answer_frees_nothing_twice": {
        "decode: test_abort_during_kv_transfer"
    },
}
"""Tests below that run the course of vLLM's cases, which assert what we do not promise."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64}
    path = tmp_path_factory.mktemp("lifecycles") / "model"
    model = make_tiny_model(path, max_position_embeddings=16_384, **shape)
    save_tiny_tokenizer(model)
    return model


def test_of_vllms_own_tests_those_of_the_host_pass(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "lifecycle"
    folder.mkdir()
    for name in ("test_remote_prefill_lifecycle", "test_remote_decode_lifecycle", "utils"):
        shutil.copy(FILES / f"{name}.py", folder)
    store = f"file://{tmp_path}/store?max_bytes=64MiB"
    (folder / "__init__.py").touch()
    (folder / "conftest.py").write_text(SWAP.format(store=store, model=str(model)))
    report = tmp_path / "report.xml"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "lifecycle", "-q", f"--junitxml={report}"],
        cwd=tmp_path, timeout=SECONDS, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 1, run.stdout[-3000:]
    failed, passed = {}, set()
    for case in ET.parse(report).iter("testcase"):
        failure = case.find("failure")
        name = str(case.get("name"))
        if failure is None:
            assert len(case) == 0, (name, [part.tag for part in case])
            passed.add(name)
        else:
            where = "decode: " if "decode" in str(case.get("classname")) else ""
            failed[where + name] = str(failure.get("message"))
    assert passed == PASS
    assert failed.keys() == REFUSED.union(*SISTERS.values())
    assert SISTERS.keys() <= globals().keys()
    for name, message in failed.items():
        wanted = "configerror: layer mamba" if name in REFUSED else "assert"
        assert wanted in message.lower(), (name, message)


# --- sisters -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def utils() -> ModuleType:
    """What vLLM's tests are made of."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if "vllm_lifecycle_utils" in sys.modules:  # it can be loaded once: it registers a connector
        return sys.modules["vllm_lifecycle_utils"]
    spec = importlib.util.spec_from_file_location("vllm_lifecycle_utils", FILES / "utils.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Engine:
    """vLLM's scheduler, our connector's two halves, and KV memory without a model."""

    def __init__(self, utils: ModuleType, role: str, num_blocks: int, **config: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        self.utils = utils
        vllm = utils.create_vllm_config(kv_connector="KVFerryConnector", kv_role=role, **config)
        self.scheduler = utils.create_scheduler(vllm, num_blocks=num_blocks)
        groups = self.scheduler.kv_cache_config
        self.worker = type(self.scheduler.connector)(vllm, KVConnectorRole.WORKER, groups)
        self.loaded = 0
        """Tokens whose KV was copied into blocks."""
        self.worker.register_kv_caches({"layer": torch.zeros(num_blocks, 1, BLOCK, 2)})

    def add(self, number: int, num_tokens: int, params: Any = None, max_tokens: int = 16) -> Any:
        request = self.utils.create_request(number, num_tokens=num_tokens, max_tokens=max_tokens)
        request.kv_transfer_params = params
        self.scheduler.add_request(request)
        return request

    def step(self, *ending: Any) -> Any:
        """One step, in which those requests sample their end. Returns their outputs."""
        output = self.scheduler.schedule()
        requests = [self.scheduler.requests[name] for name in output.num_scheduled_tokens]
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        self.worker.get_transfer_results(output.finished_req_ids)
        made = self.utils.create_model_runner_output(
            requests,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        stats = self.worker.get_kv_connector_stats()
        self.loaded += 0 if stats is None else stats.data.get("loaded_tokens", 0)
        self.worker.clear_connector_metadata()
        for request in ending:
            index = made.req_id_to_index[request.request_id]
            made.sampled_token_ids[index] = [self.utils.EOS_TOKEN_ID]
        return self.scheduler.update_from_output(output, made)

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        def step_until() -> bool:
            if not is_so():
                self.step()
            return is_so()

        wait_until(step_until, what)

    def blocks(self, request: Any) -> int:
        """That a request holds."""
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return len(managers[0].req_to_blocks.get(request.request_id, ()))

    @property
    def held(self) -> float:
        """Chunks in our memory, also those that are being fetched."""
        return float(self.scheduler.connector._observer.gauges()["pool_slots/held"])

    def end(self, *ending: Any) -> None:
        """The rest of the requests' life, and nothing is left of them."""
        self.step(*ending)
        self.until(lambda: not self.scheduler.has_requests(), "nothing is left to do")
        self.scheduler.schedule()
        self.utils.assert_scheduler_empty(self.scheduler)


Make = Callable[..., Engine]
MakeKind = Callable[..., Any]


@pytest.fixture
def make_kind(utils: ModuleType, model: Path, tmp_path: Path) -> Iterator[MakeKind]:
    """Engines of some kind over one store."""
    made: list[Engine] = []
    options = {
        "store": f"file://{tmp_path}/store?max_bytes=64MiB",
        "chunk_tokens": BLOCK, "memory_bytes": 1 << 20, "audit": "off",
    }  # fmt: skip

    def make(kind: type[Engine], *arguments: Any) -> Engine:
        config = {"model": str(model), "kv_connector_extra_config": dict(options)}
        made.append(kind(utils, *arguments, **config))
        return made[-1]

    yield make
    for engine in made:
        engine.worker.shutdown()
        engine.scheduler.connector.shutdown()


@pytest.fixture
def make(make_kind: MakeKind) -> Make:
    def make(role: str = "kv_consumer", num_blocks: int = 100) -> Engine:
        engine: Engine = make_kind(Engine, role, num_blocks)
        return engine

    return make


ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


def prefilled(engine: Engine, num_tokens: int, number: int = 1) -> dict[str, Any]:
    """The parameters of a prefill's answer; its blocks are free when it is given."""
    request = engine.add(number, num_tokens, ASKED, max_tokens=1)
    [output] = engine.step()[0].outputs
    assert request.is_finished()
    assert engine.blocks(request) == 0
    assert request.request_id not in engine.scheduler.requests
    assert output.kv_transfer_params is not None
    return dict(output.kv_transfer_params)


@pytest.mark.parametrize(
    ("num_tokens", "chunks"),
    [pytest.param(40, 2, id="basic"), pytest.param(8, 0, id="short prompt")],
)
def test_a_prefill_answers_and_holds_no_block(make: Make, num_tokens: int, chunks: int) -> None:
    engine = make("kv_producer")
    params = prefilled(engine, num_tokens)
    assert params["remote_block_ids"] == [[]]
    assert params["kvferry"]["chunks"] == chunks
    engine.end()


def test_a_prefill_of_what_is_in_the_prefix_cache_hands_all_of_it_over(make: Make) -> None:
    prefiller = make("kv_producer")
    before = prefiller.add(1, 56)
    prefiller.step()
    prefiller.end(before)
    params = prefilled(prefiller, 40)
    assert params["kvferry"]["chunks"] == 2
    decoder = make()
    request = decoder.add(1, 40, params)
    prefiller.until(lambda: not prefiller.scheduler.has_requests(), "stored")
    decoder.until(lambda: bool(decoder.scheduler.running), "the prompt is there")
    assert decoder.loaded == 32
    decoder.end(request)


def test_a_prefill_that_is_aborted_after_its_answer_frees_nothing_twice(make: Make) -> None:
    from vllm.v1.request import RequestStatus

    engine = make("kv_producer")
    prefilled(engine, 40)
    engine.scheduler.finish_requests(["id-1"], RequestStatus.FINISHED_ABORTED)
    engine.end()


@pytest.mark.parametrize(("num_tokens", "hit"), [(40, 32), (32, 16)], ids=["basic", "full block"])
def test_a_decode_holds_no_block_until_all_is_there(make: Make, num_tokens: int, hit: int) -> None:
    decoder, prefiller = make(), make("kv_producer")
    # As of a proxy that sends both at once.
    request = decoder.add(1, num_tokens, {"do_remote_prefill": True, "remote_host": "10.1.2.3"})
    for _ in range(5):
        decoder.step()
        assert decoder.blocks(request) == 0
        assert not decoder.scheduler.running
    prefilled(prefiller, num_tokens)
    prefiller.until(lambda: not prefiller.scheduler.has_requests(), "stored")
    decoder.until(lambda: bool(decoder.scheduler.running), "the prompt is there")
    assert decoder.loaded == hit
    assert request.num_computed_tokens == num_tokens
    decoder.end(request)


def test_others_run_while_a_decode_waits(make: Make) -> None:
    decoder, prefiller = make(num_blocks=2_000), make("kv_producer")
    first = decoder.add(2, 40, max_tokens=10_000)  # it runs longer than a load takes
    decoder.step()
    second = decoder.add(3, 40, max_tokens=10_000)
    waiting = decoder.add(1, 40, {"do_remote_prefill": True})
    for _ in range(3):
        decoder.step()
        assert decoder.scheduler.running == [first, second]
    prefilled(prefiller, 40)
    prefiller.until(lambda: not prefiller.scheduler.has_requests(), "stored")
    decoder.until(lambda: waiting in decoder.scheduler.running, "the prompt is there")
    decoder.end(first, second, waiting)


def test_a_decode_that_lost_its_blocks_resumes_with_its_hit(make: Make) -> None:
    """There are 5 blocks, and both requests need a third one at once."""
    prefiller, decoder = make("kv_producer"), make(num_blocks=6)
    params = prefilled(prefiller, 32, number=2)
    prefiller.until(lambda: not prefiller.scheduler.has_requests(), "stored")
    # Read once, its hit is in memory: it comes before the other has sampled its last token.
    reader = decoder.add(2, 32, params)
    decoder.until(lambda: reader in decoder.scheduler.running, "it is read")
    decoder.end(reader)
    assert decoder.scheduler.reset_prefix_cache()
    local = decoder.add(1, 32)
    decoder.step()
    remote = decoder.add(2, 32, params)
    decoder.until(lambda: remote.num_preemptions == 1, "it lost its blocks")
    assert decoder.scheduler.running == [local]
    decoder.step(local)
    decoder.until(lambda: remote in decoder.scheduler.running, "it resumes")
    assert local not in decoder.scheduler.running
    decoder.end(remote)


def test_a_decode_that_finds_no_blocks_gets_its_hit_later(make: Make) -> None:
    prefiller, decoder = make("kv_producer"), make(num_blocks=6)
    params = prefilled(prefiller, 40, number=2)
    prefiller.until(lambda: not prefiller.scheduler.has_requests(), "stored")
    local = decoder.add(1, 32)
    decoder.step()
    remote = decoder.add(2, 40, params)
    for _ in range(5):
        decoder.step()
        assert decoder.blocks(remote) == 0
    decoder.step(local)
    decoder.until(lambda: remote in decoder.scheduler.running, "it has blocks")
    assert decoder.loaded == 32
    decoder.end(remote)


def test_a_decode_that_is_aborted_while_it_waits_leaves_nothing(make: Make) -> None:
    from vllm.v1.request import RequestStatus

    decoder = make()
    request = decoder.add(1, 40, {"do_remote_prefill": True})
    decoder.step()
    assert not decoder.scheduler.running
    decoder.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert not any(decoder.scheduler._kv_fetch_counts.values())
    decoder.end()


@pytest.mark.parametrize("num_tokens", [1, 40], ids=["stub", "whole prompt"])
def test_a_decode_that_is_refused_at_once_fetches_nothing(make: Make, num_tokens: int) -> None:
    """In the place of a request that it refuses, vLLM's server sends a stub of one token with the
    same parameters through the scheduler."""
    from vllm.v1.request import RequestStatus

    prefiller, decoder = make("kv_producer"), make()
    params = prefilled(prefiller, 40)
    prefiller.until(lambda: not prefiller.scheduler.has_requests(), "stored")
    refused = decoder.add(1, num_tokens, params)
    decoder.scheduler.finish_requests(refused.request_id, RequestStatus.FINISHED_ABORTED)
    decoder.end()
    assert decoder.held == 0
    request = decoder.add(1, 40, params)
    decoder.until(lambda: bool(decoder.scheduler.running), "the prompt is there")
    assert decoder.held == 2
    assert decoder.loaded == 32
    decoder.end(request)
