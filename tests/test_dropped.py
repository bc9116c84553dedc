"""What is dropped and not closed, as by a cell of a notebook that runs again, leaves no thread."""

from __future__ import annotations

import ast
import gc
import threading
import time
import warnings
import weakref
from pathlib import Path

import pytest

import kvferry
from kvferry.adapters.transformers import StoredKV
from kvferry.cache import memory
from kvferry.cache.deciding.weights_file import WeightsFile
from kvferry.engine.generation import SamplingParams
from kvferry.engine.llm import LLM
from kvferry.engine.model import quiet_transformers
from kvferry.journal import Journal, JournalAnswer
from kvferry.observe import Counters
from kvferry.record.schema import RecordSchema
from kvferry.store.file import FileStore
from kvferry.store.io_pool import IOPool, end_when_dropped
from kvferry.store.record_client import RecordClient
from kvferry.store.url import open_store
from kvferry.testing.models import make_tiny_model
from kvferry.testing.stores.hooks import wait_until
from kvferry.types import ChunkKey
from tests.adapters.sglang import host
from tests.cache.hosts import make_shared_storage_host

with host.installed():
    from kvferry.adapters.sglang import KVFerryStorage

PROMPT = list(range(5, 305))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama", 0, pad_token_id=None)


@pytest.fixture(scope="module")
def model(model_dir):
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(model_dir).eval()


def ours() -> set[str]:
    return {each.name for each in threading.enumerate() if each.name.startswith("kvferry")}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    wait_until(lambda: not ours(), "the threads of other tests end")
    yield
    wait_until(lambda: not ours(), "the threads end")


def used_pool(_path, _model):
    pool = IOPool(2, "kvferry-test")
    assert pool.submit(lambda _job: None).wait(60.0)
    return pool


def used_directory(path, _model):
    store = FileStore(path / "store", max_bytes=1 << 20)
    store.put(ChunkKey(bytes(32)), [b"value"])
    return store


def used_tiers(path, _model):
    store = open_store([f"file://{path}/near?max_bytes=1MiB", f"file://{path}/far?max_bytes=1MiB"])
    store.put(ChunkKey(bytes(32)), [b"value"])
    return store


def used_server(_path, _model):
    return open_store("valkey://127.0.0.1:9/kv", start_seconds=0.0)  # nobody answers: tried again


def used_records(path, _model):
    schema = RecordSchema.for_rows(namespace=bytes(32), row_bytes=64, chunk_tokens=16)
    client = RecordClient(used_directory(path, None), schema, Counters(), 2)
    batch = client.get([ChunkKey(bytes(32))], [0], lambda _place, _image: False, time.monotonic())
    assert batch.wait(60.0)
    return client


def used_journal(path, _model):
    journal = Journal(path / "journal.jsonl", 16)
    journal.add(0.0, "r", 1, (), JournalAnswer(0, {}, {}, ""))
    return journal


def used_weights_file(path, _model):
    (path / "version").write_text("one")
    found = WeightsFile(str(path / "version"), time.monotonic)
    found.ask(is_sound=True)
    found.is_unchanged()
    return found


def used_stored_kv(path, model):
    kv = StoredKV(model, f"file://{path}/store?max_bytes=1GiB", observer=OBSERVER)
    kv.prefill(PROMPT)
    return kv


def used_llm(path, model, **options):
    llm = LLM(
        model.name_or_path, store=f"file://{path}/store?max_bytes=1GiB", observer=OBSERVER,
        num_blocks=64, connector_options={"memory_bytes": 1 << 24, **options},
    )  # fmt: skip
    llm.generate([PROMPT], SamplingParams(max_tokens=1))
    return llm


def used_llm_that_serves(path, model):
    return used_llm(path, model, serve="127.0.0.1:0")


def used_sglang(path, model):
    host.RUNNING.arguments = {
        "model_path": str(model.name_or_path), "load_format": "auto", "overrides": {},
        "device": "cuda",
    }  # fmt: skip
    given = {"store": f"file://{path}/store?max_bytes=1MiB"}
    backend = KVFerryStorage(host.storage_config(given), {})
    backend.register_mem_pool_host(host.HostPool())
    backend.batch_exists(["key"])
    return backend


OBSERVER = Counters()  # of the user's own, which lives on

USED = [
    used_pool, used_directory, used_tiers, used_server, used_records, used_journal,
    used_weights_file, used_stored_kv, used_llm, used_llm_that_serves, used_sglang,
]  # fmt: skip
WITHOUT_STORE = {used_pool, used_journal, used_weights_file}


@pytest.mark.parametrize("use", USED)
def test_what_is_dropped_ends_its_threads_and_warns_once(use, tmp_path, model):
    num_expected = (use not in WITHOUT_STORE) + (use is used_llm_that_serves)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)

        def said() -> list[str]:
            gc.collect()
            return [str(each.message) for each in told if each.category is ResourceWarning]

        used = use(tmp_path, model)
        known = weakref.ref(used)
        del used
        # A thread that ends a job refers to its objects for a moment more.
        wait_until(lambda: len(said()) == num_expected and known() is None, "it is collected")
        wait_until(lambda: not ours(), "the threads end")
        assert len([text for text in said() if text.startswith("store ")]) == min(num_expected, 1)
        assert len(said()) == num_expected
        assert all(text.endswith("was dropped and not closed") for text in said())


@pytest.mark.parametrize("use", USED)
def test_what_was_closed_warns_of_nothing(use, tmp_path, model):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        used = use(tmp_path, model)
        store = getattr(used, "_store", None)  # of the client of records, which its owner closes
        used.close(*[5.0] * (use is used_records))
        if use is used_records:
            store.close()
        del used, store
        gc.collect()
    assert told == []


def test_what_is_dropped_in_a_forked_process_is_left_to_its_own(tmp_path, monkeypatch):
    """There, the threads do not run, and locks may be held for ever."""

    class Owner:
        pass

    ended = []
    owner = Owner()
    end_when_dropped(owner, "it", lambda: ended.append(1))
    monkeypatch.setattr("os.getpid", lambda: -1)
    del owner
    assert ended == []


def threads_of_objects():
    """Yield each thread in our code that runs a method of `self`, and so keeps that object alive:
    the name of the class."""
    root = Path(kvferry.__file__).parent
    for path in root.rglob("*.py"):
        for kind in ast.walk(ast.parse(path.read_text())):
            if isinstance(kind, ast.ClassDef) and "testing" not in path.parts:
                for call in ast.walk(kind):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "threading.Thread":
                        target = next(each.value for each in call.keywords if each.arg == "target")
                        if ast.unparse(target).startswith("self."):
                            yield kind.name


def test_each_thread_that_keeps_its_object_alive_is_ended_by_an_owner():
    """By what the table above drops: the directory's store, the tiers, and the engine that serves
    peers. A new one needs an owner with `end_when_dropped`, and a row."""
    known = ["Erasures", "PeerServer", "PeerServer", "TierThread", "Upkeep"]
    assert sorted(threads_of_objects()) == known


def test_memory_of_an_engine_that_was_closed_is_freed_when_its_last_user_goes(tmp_path):
    """Not at the next collection, which may be minutes later: it is gigabytes."""
    url = f"file://{tmp_path}/store?max_bytes=1MiB"
    options = {"store": url, "chunk_tokens": 8, "memory_bytes": 1 << 20}
    before = set(memory._MADE_HERE)
    gc.disable()
    try:
        engine = make_shared_storage_host(options, world_size=2)
        for request in ("cold", "warm"):
            engine.run(request, range(64))
            engine.settle()
        caches = [cache for rank in engine.ranks for cache in rank.caches.values()]
        used: list[object] = [cache.untyped_storage() for cache in caches]
        used += [memory._MADE_HERE[name]._region for name in set(memory._MADE_HERE) - before]
        assert len(used) == 2 * (2 + 1)  # layers, slots
        known = [weakref.ref(each) for each in used]
        engine.stop()
        del engine, caches, used
        wait_until(lambda: all(each() is None for each in known), "no thread uses it any more")
    finally:
        gc.enable()
