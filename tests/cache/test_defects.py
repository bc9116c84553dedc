"""The thirty known defects of vLLM's original shared-storage connector: one test each.

What the original does, by the number of the test:

 1. hits only a prompt equal to the stored one
 2. saves and looks up under different lengths when one token more than a block
 3. answers with a negative count when the engine has more than the store
 4. every short prompt shares the key of no tokens
 5. fails on, or mixes up, prompt embeddings
 6. a folder that exists is a hit, even half written
 7. loading a missing key creates its folder
 8. writes in place, without checksum
 9. ranks overwrite each other
10. no model identity in the key
11. LoRA and cache salt ignored
12. images ignored
13. md5 over integers of platform size
14. chunked prefill stores a part under the key of the whole
15. only the prompt, only at first admission
16. a request that hits never stores more
17. a resumed request loads under another key than it looked up
18. relies on the order of requests in a step
19. writes again what the engine has
20. file I/O on the scheduler's and the model's thread
21. moves tensors to `.cuda()`
22. walks every layer of the model
23. guesses the layout
24. skips a promised load when there is no attention metadata
25. an I/O error kills the step
26. needs layer hooks that full CUDA graphs skip
27. no quota, eviction, reset, statistics
28. keeps requests alive, trips over one allocated and not scheduled
29. logs every hit, writes to a world-readable directory
30. one small file per layer and prompt

The simulated host checks every byte of KV of every request, so running a request is itself an
assertion.
"""

from __future__ import annotations

import gc
import logging
import stat
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from kvferry.keys import ChunkKeys
from kvferry.layout.ops import PagedKV
from kvferry.layout.spec import LAYOUTS
from kvferry.store.file.store import FileStore
from kvferry.store.memory import MemoryStore
from kvferry.store.wrappers import WrapperStore
from kvferry.testing.faults import FailingStore
from kvferry.types import ExtraKeys, GroupShard, MultimodalItem
from tests.cache.hosts import make_groups
from tests.simulated_host import prefix_seeds

PROMPT = list(range(41))


def stored(make_host, prompt=PROMPT, **kwargs):
    """A host that has stored a prompt."""
    host = make_host(**kwargs)
    host.run("writer", prompt)
    host.settle()
    return host


def test_01_a_prompt_that_extends_or_shares_a_prefix_hits(make_host):
    host = stored(make_host)
    assert host.run("extends", [*PROMPT, 5, 6]).num_external_tokens == 40
    assert host.run("shares", [*PROMPT[:25], 5, 6]).num_external_tokens == 24


@pytest.mark.parametrize("length", [1, 9, 17, 25, 33])
def test_02_lengths_one_above_a_block_hit_what_they_saved(make_host, length: int):
    host = stored(make_host, prompt=PROMPT[:length])
    assert host.run("again", PROMPT[:length]).num_external_tokens == (length - 1) // 8 * 8


def test_03_a_hit_shorter_than_the_local_one_is_zero_not_negative(make_host):
    host = stored(make_host, prompt=PROMPT[:17])
    request = host.add("local 32", PROMPT[:33])
    assert host.scheduler.lookup(request, 32)[:2] == (0, False)


def test_04_short_prompts_share_no_empty_key(make_host):
    host = stored(make_host, prompt=[1, 2, 3])
    assert host.observer["put_stored"] == 0
    for prompt in ([1], [9, 9, 9], [1, 2, 3], list(range(8))):
        assert host.run(f"short {prompt}", prompt).num_external_tokens == 0


def test_05_prompt_embeddings_are_cached_by_digest_or_not_at_all(make_host):
    host = make_host()
    placeholder = [0] * 20
    nobody_hashed = ExtraKeys(cacheable=False)
    host.run("unknown", placeholder, extra_keys=nobody_hashed)
    host.settle()
    assert host.observer["put_stored"] == 0
    first, second = (ExtraKeys(embeds_digest=bytes([i]) * 32) for i in (1, 2))
    host.run("first", placeholder, extra_keys=first)
    host.settle()
    assert host.run("second", placeholder, extra_keys=second).num_external_tokens == 0
    assert host.run("first again", placeholder, extra_keys=first).num_external_tokens == 16


def test_06_a_record_is_visible_only_when_it_is_whole(make_host, tmp_path):
    url = f"file://{tmp_path}/store"
    groups = make_groups(num_kv_heads=2)
    sound, failing = FileStore(tmp_path / "store"), FileStore(tmp_path / "store")
    stores = (FailingStore(sound, operations={"put"}), failing)
    writer = make_host(store=url, groups=groups, world_size=2, rank_stores=stores)
    request = writer.add("half", PROMPT)
    writer.admit(request)
    for token in range(12):
        request.all_token_ids.append(token)
        writer.prefill(request)
        writer.settle(timeout=0.3)
    assert writer.observer["put_stored"] == 0
    assert not list((tmp_path / "store" / "records").rglob("*.safetensors"))
    deadline = time.monotonic() + 10
    while list((tmp_path / "store").rglob("tmp/*")) and time.monotonic() < deadline:
        writer.settle(timeout=0.3)
    assert list((tmp_path / "store").rglob("tmp/*")) == []


def test_07_looking_and_missing_create_nothing(make_host, tmp_path):
    host = stored(make_host, store=f"file://{tmp_path}/store")
    host.run("known", PROMPT)
    before = sorted(path for path in tmp_path.rglob("*") if "tmp" not in path.parts[-2:])
    request = host.add("unknown", [7] * 30)
    assert host.scheduler.lookup(request, 0).num_tokens == 0
    host.finish(request)
    host.step([])
    after = sorted(path for path in tmp_path.rglob("*") if "tmp" not in path.parts[-2:])
    assert before == after


def test_08_a_torn_record_is_a_miss(make_host, tmp_path):
    host = stored(make_host, store=f"file://{tmp_path}/store")
    for record in (tmp_path / "store" / "records").rglob("*.safetensors"):
        content = record.read_bytes()
        record.write_bytes(content[: len(content) // 2])
    reader = make_host(store=f"file://{tmp_path}/store")
    assert reader.parts[0].store.wait_indexed(10)
    assert reader.run("reader", PROMPT).num_external_tokens == 0
    assert reader.observer["miss_truncated"] >= 1
    assert host.observer["put_stored"] == 5


def test_09_ranks_do_not_overwrite_each_other(make_host, tmp_path):
    url = f"file://{tmp_path}/store"
    groups = make_groups(num_kv_heads=4)
    writer = make_host(store=url, groups=groups, world_size=2)
    request = writer.add("w", PROMPT)
    writer.admit(request)
    for token in range(12):
        request.all_token_ids.append(token)
        writer.prefill(request)
        writer.settle(timeout=0.3)
    assert writer.observer["put_stored"] == 5
    reader = make_host(store=url, groups=groups, world_size=2)
    for part in reader.parts:
        assert part.store.wait_indexed(60)
    assert reader.run("r", PROMPT).num_external_tokens == 40


@pytest.mark.parametrize(
    "other",
    [
        {"weights": b"o" * 32},
        {"tenant": "somebody else"},
        {"weights_version": "2"},
        {"chunk_tokens": 4},
        {"groups": make_groups(head_dim=8)},
        {"groups": make_groups(num_layers=3)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_10_another_model_shares_nothing(make_host, other):
    store = MemoryStore("shared by two models")
    stored(make_host, store=store)
    assert make_host(store=store, **other).run("other", PROMPT).num_external_tokens == 0
    assert make_host(store=store).run("same", PROMPT).num_external_tokens == 40


@pytest.mark.parametrize("extra", [ExtraKeys(cache_salt="a"), ExtraKeys(lora="adapter digest")])
def test_11_lora_and_salt_are_part_of_the_key(make_host, extra: ExtraKeys):
    host = stored(make_host)
    assert host.run("extra", PROMPT, extra_keys=extra).num_external_tokens == 0
    host.settle()
    assert host.run("extra again", PROMPT, extra_keys=extra).num_external_tokens == 40
    other = ExtraKeys(cache_salt="b", lora=extra.lora)
    assert host.run("other salt", PROMPT, extra_keys=other).num_external_tokens == 0


def test_12_an_image_is_part_of_the_key_with_its_place(make_host):
    def image(digest: str, offset: int) -> ExtraKeys:
        return ExtraKeys(items=(MultimodalItem(digest=digest, offset=offset, length=6),))

    host = make_host()
    host.run("cat at 9", PROMPT, extra_keys=image("cat", 9))
    host.settle()
    for name, extra in (("dog", image("dog", 9)), ("later", image("cat", 10))):
        request = host.add(name, PROMPT, extra_keys=extra)
        keys = ChunkKeys(bytes(32), 8, extra)
        keys.extend(PROMPT)
        cat = ChunkKeys(bytes(32), 8, image("cat", 9))
        cat.extend(PROMPT)
        assert keys.keys[0] == cat.keys[0]
        assert not set(keys.keys[1:]) & set(cat.keys[1:])
        # The first chunk holds no placeholder: text before an image is shared.
        assert host.admit(request) == 8
        host.finish(request)
    again = host.add("cat again", PROMPT, extra_keys=image("cat", 9))
    assert host.admit(again) == 40


def test_13_keys_are_cryptographic_and_do_not_depend_on_integer_types():
    results = set()
    for ids in (PROMPT, np.array(PROMPT), np.array(PROMPT, np.uint16), torch.tensor(PROMPT)):
        keys = ChunkKeys(bytes(32), 8)
        keys.extend(ids)
        results.add(tuple(keys.keys))
    assert len(results) == 1
    assert all(len(key) == 32 for key in results.pop())


@pytest.mark.parametrize("budget", [3, 8, 13, 40])
def test_14_chunked_prefill_stores_whole_chunks(make_host, budget: int):
    host = make_host()
    host.run("in pieces", PROMPT, budget=budget)
    host.settle()
    assert host.run("again", PROMPT).num_external_tokens == 40


def test_15_later_chunks_generated_tokens_and_resumed_requests_are_saved(make_host):
    host = make_host(save_generated=True)
    request = host.add("r", PROMPT[:12])
    host.admit(request)
    host.prefill(request, budget=5)
    for token in range(200, 206):
        request.all_token_ids.append(token)
        host.prefill(request)
    host.preempt(request)
    host.settle()
    assert host.admit(request) == 16
    for token in range(206, 216):
        request.all_token_ids.append(token)
        host.prefill(request)
    tokens = list(request.all_token_ids)
    host.finish(request)
    host.settle()
    assert host.run("follow-up", [*tokens, 1]).num_external_tokens == 24


def test_16_a_request_with_a_hit_stores_its_longer_prefix(make_host):
    host = stored(make_host, prompt=PROMPT[:16])
    assert host.run("longer", PROMPT).num_external_tokens == 16
    host.settle()
    assert host.run("longer again", PROMPT).num_external_tokens == 40


def test_17_a_resumed_request_loads_what_its_lookup_found(make_host):
    host = make_host()
    request = host.add("r", PROMPT)
    host.admit(request)
    host.prefill(request)
    request.all_token_ids.extend([300, 301, 302])
    host.prefill(request)
    host.settle()
    host.preempt(request)
    assert host.admit(request) == 40
    host.prefill(request)


def test_18_new_running_and_resumed_requests_may_stand_in_any_order(make_host):
    host = stored(make_host)
    running = host.add("running", [9] * 20)
    host.admit(running)
    resumed = host.add("resumed", PROMPT)
    host.admit(resumed)
    host.preempt(resumed)
    host.admit(resumed)
    new = host.add("new", [*PROMPT[:24], 1, 2])
    host.admit(new)
    host.step([running, resumed, new], tokens=1)
    for request in (new, running, resumed):
        host.prefill(request)


def test_19_blocks_the_engine_has_are_not_written_again(make_host):
    host = stored(make_host)
    request = host.add("local 24", PROMPT)
    host.admit(request, num_local_tokens=24)
    marks = {}
    for name, cache in host.ranks[0].caches.items():
        for block in request.block_ids[0][:6]:
            cache[block] += 0.5
            marks[name, block] = cache[block].clone()
    host.step([request], tokens=1)
    for (name, block), before in marks.items():
        assert torch.equal(host.ranks[0].caches[name][block], before)


class ThreadRecorder(WrapperStore):
    """Notes which threads do I/O."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.threads: set[threading.Thread] = set()

    def read(self, key, *args):
        self.threads.add(threading.current_thread())
        return super().read(key, *args)

    def put(self, key, buffers, *deadline):
        self.threads.add(threading.current_thread())
        return super().put(key, buffers, *deadline)


def test_20_no_io_happens_on_the_scheduler_or_the_runner_thread(make_host):
    store = ThreadRecorder(MemoryStore("x"))
    host = stored(make_host, store=store)
    writers, store.threads = store.threads, set()
    host.forget_memory()
    host.run("reader", PROMPT)
    assert store.threads
    assert writers
    assert threading.current_thread() not in writers
    assert threading.current_thread() not in store.threads


def test_21_tensors_stay_on_their_device(make_host):
    host = stored(make_host)
    caches = host.ranks[0].caches.values()
    before = [cache.data_ptr() for cache in caches]
    host.run("reader", PROMPT)
    assert [cache.data_ptr() for cache in caches] == before
    assert {cache.device.type for cache in caches} == {"cpu"}


def test_22_layers_without_kv_of_ours_are_left_alone(make_host):
    host = make_host()
    rank = host.ranks[0]
    rank.worker.register_kv_caches({**rank.caches, "mamba.0": torch.zeros(1), "norm": None})
    host.run("writer", PROMPT)
    host.settle()
    assert host.run("reader", PROMPT).num_external_tokens == 40


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "BND"])
def test_23_the_layout_is_declared_and_records_do_not_depend_on_it(layout: str):
    group = make_groups(num_layers=2, num_kv_heads=3, head_dim=2, block_size=4)[0]
    shard = GroupShard(layers=(0, 2), heads=(0, 3))
    shape = {"BHNC": (5, 3, 4, 4), "2BNHD": (2, 5, 4, 3, 2), "B2NHD": (5, 2, 4, 3, 2)}[layout]
    tensors = [torch.zeros(shape) for _ in range(2)]
    rows = np.arange(2 * 3 * 9 * 4, dtype=np.int32).reshape(2, 3, 9, 4)
    paged = PagedKV(tensors, group, shard, layout)
    runs = list(paged.runs([3, 1, 2], 0, 9))
    paged.scatter(rows, 0, runs, 0)
    # Token 5 of head 2 in layer 1 is slot 1 of block 1, K in front of V.
    key, value = {
        "BHNC": lambda t: (t[1, 2, 1, :2], t[1, 2, 1, 2:]),
        "2BNHD": lambda t: (t[0, 1, 1, 2], t[1, 1, 1, 2]),
        "B2NHD": lambda t: (t[1, 0, 1, 2], t[1, 1, 1, 2]),
    }[layout](tensors[1].view(torch.int32))
    assert [*key.tolist(), *value.tolist()] == rows[1, 2, 5].tolist()
    back = np.zeros_like(rows)
    paged.gather(back, 0, runs, 0)
    assert np.array_equal(back, rows)


def test_24_a_promised_load_happens_in_a_step_without_tokens(make_host):
    host = stored(make_host)
    request = host.add("r", PROMPT)
    assert host.admit(request) == 40
    host.step([], tokens=0)
    assert host.ranks[0].wrong_tokens(request, prefix_seeds(request), 40) == 0


def test_25_an_io_error_is_reported_not_raised(make_host):
    store = MemoryStore("x")
    stored(make_host, store=store)
    host = make_host(store=FailingStore(store, operations={"read"}))
    assert host.run("reader", PROMPT).num_external_tokens == 0
    assert host.observer["miss_io_error"] == 5
    assert host.observer["miss_tokens/away"] == 40


def test_26_nothing_depends_on_layer_hooks(make_host):
    host = stored(make_host)  # this host calls none
    request = host.add("r", PROMPT)
    assert host.admit(request) == 40
    host.step([request], tokens=1)
    assert host.ranks[0].wrong_tokens(request, prefix_seeds(request), 40) == 0


def test_27_quota_eviction_reset_and_counts_exist(make_host, tmp_path):
    host = make_host(store=f"file://{tmp_path}/store?max_bytes=60000")
    for start in range(0, 400, 40):
        host.run(f"prompt {start}", list(range(start, start + 41)))
        host.settle()
    store = host.parts[0].store
    status = store.stat()
    assert 0 < status.used_bytes <= 60000
    assert host.observer["put_stored"] > status.num_records
    assert host.scheduler.reset() is True
    assert host.run("after reset", list(range(360, 401))).num_external_tokens == 0


def test_28_requests_are_not_kept_alive(make_host):
    host = stored(make_host)
    for outcome in ("finished", "allocated but never scheduled", "never allocated"):
        request = host.add(outcome, PROMPT)
        if outcome != "never allocated":
            host.admit(request)
        if outcome == "finished":
            host.prefill(request)
        host.finish(request)
        gone = weakref.ref(request)
        del request
        host.step([])
        gc.collect()
        assert gone() is None
    host.step([])


def test_29_hits_are_not_logged_one_by_one_and_the_directory_is_private(
    make_host, tmp_path, caplog
):
    host = stored(make_host, store=f"file://{tmp_path}/store")
    with caplog.at_level(logging.INFO):
        for number in range(3):
            assert host.run(f"hit {number}", PROMPT).num_external_tokens == 40
    assert not caplog.records
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_30_a_chunk_is_one_file_whatever_the_number_of_layers(make_host, tmp_path):
    groups = make_groups(num_layers=24, num_kv_heads=2)
    stored(make_host, store=f"file://{tmp_path}/store", groups=groups)
    assert len(list((tmp_path / "store" / "records").rglob("*.*"))) == 5
