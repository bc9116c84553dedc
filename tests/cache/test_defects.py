"""The thirty known defects of vLLM's original shared-storage connector. Those that have a test
elsewhere (`test_hits`, `test_faults`, `test_ranks`, `test_journal`, `store/file`) have none here.

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
import weakref

import numpy as np
import pytest
import torch

from kvferry.keys import ChunkKeys
from kvferry.store.memory import MemoryStore
from kvferry.types import ExtraKeys, MultimodalItem
from tests.cache.hosts import make_groups
from tests.simulated_host import prefix_seeds

PROMPT = list(range(41))


def stored(make_host, prompt=PROMPT, **kwargs):
    """A host that has stored a prompt."""
    host = make_host(**kwargs)
    host.run("writer", prompt)
    host.settle()
    return host


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


def test_16_a_request_with_a_hit_stores_its_longer_prefix(make_host):
    host = stored(make_host, prompt=PROMPT[:16])
    assert host.run("longer", PROMPT).num_external_tokens == 16
    host.settle()
    assert host.run("longer again", PROMPT).num_external_tokens == 40


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


def test_24_a_promised_load_happens_in_a_step_without_tokens(make_host):
    host = stored(make_host)
    request = host.add("r", PROMPT)
    assert host.admit(request) == 40
    host.step([], tokens=0)
    assert host.ranks[0].wrong_tokens(request, prefix_seeds(request), 40) == 0


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
