"""Whatever happens to records and stores: the right answer, a counter, and in time."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.adapters.transformers import StoredKV
from kvferry.observe import Counters
from kvferry.store.base import PutResult
from kvferry.store.url import open_store
from kvferry.testing.faults import (
    FailingStore,
    Gate,
    StallingStore,
    flip_bit,
)
from tests.adapters.transformers.generating import (
    CHUNK,
    RecordWriter,
    assert_same_as_cold,
    generate,
    loaded,
    prompt,
    reuse,
)


def records(store_url: str) -> list[Path]:
    """In the order of their chunks."""
    paths = (Path(store_url.removeprefix("file://")) / "records").glob("*/*.safetensors")
    return sorted(paths, key=_first_token)


def _first_token(path: Path) -> int:
    head = path.read_bytes()[:4096]
    return int(head.partition(b'"first_token":"')[2].partition(b'"')[0])


def _flip(at: int):
    return lambda path: path.write_bytes(flip_bit(8 * at)(path.read_bytes()))


def _swap(path: Path) -> None:
    other = next(each for each in sorted(path.parent.parent.glob("*/*")) if each != path)
    path.write_bytes(other.read_bytes())


def _replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "counter"),
    [
        (_flip(40), "records_corrupt"),
        (_flip(-1), "miss_bad_checksum"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "miss_wrong_size"),
        (_swap, "miss_other_record"),
        (lambda path: path.unlink(), "miss_absent"),
        (_replace_by_directory, "requests_missed"),
    ],
    ids=["header", "payload", "truncated", "swapped", "deleted", "directory"],
)
@pytest.mark.parametrize("chunk", [0, 2])
def test_a_broken_record_ends_the_prefix(load_model, store_url, damage, counter, chunk):
    model = load_model()
    reuse(model, store_url, prompt(65))
    damage(records(store_url)[chunk])
    broken = reuse(model, store_url, prompt(65))
    assert broken.num_loaded == chunk * CHUNK
    assert_same_as_cold(model, prompt(65), broken)
    if counter != "requests_missed" or chunk == 0:
        assert broken.counts[counter] == 1
    # What was broken is out of the way: the run after it stored the chunk again.
    again = reuse(model, store_url, prompt(65))
    assert again.num_loaded == 64
    assert_same_as_cold(model, prompt(65), again)


def test_a_prompt_whose_records_are_all_wrong_heals_at_once(load_model, store_url):
    model = load_model()
    input_ids = prompt(20 * CHUNK + 5)
    reuse(model, store_url, input_ids)
    for path in records(store_url):
        path.write_bytes(b"x" * path.stat().st_size)
    broken = reuse(model, store_url, input_ids)
    assert (broken.num_loaded, broken.num_saved) == (0, 20 * CHUNK)
    assert_same_as_cold(model, input_ids, broken)
    again = reuse(model, store_url, input_ids)
    assert (again.num_loaded, again.num_saved) == (20 * CHUNK, 0)


def test_a_store_that_cannot_be_read_is_a_miss(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(65))
    counts = Counters()
    store = FailingStore(open_store(store_url), operations={"read"})
    with StoredKV(model, store, chunk_tokens=CHUNK, observer=counts) as kv:
        assert loaded(kv, prompt(65)) == 0
    assert 1 <= counts["miss_io_error"] <= 4
    assert reuse(model, store_url, prompt(65)).num_loaded == 64


def test_a_store_that_cannot_be_written_stores_nothing(load_model):
    model = load_model()
    counts = Counters()
    store = FailingStore(open_store("memory://x"), operations={"put"})
    with StoredKV(model, store, chunk_tokens=CHUNK, observer=counts) as kv:
        generate(kv, prompt(65))
    assert counts["put_stored"] == 0
    assert counts[f"put_{PutResult.FAILED}"] == 4


def test_a_full_store_keeps_the_start_or_the_end_but_nothing_wrong(load_model, store_url):
    model = load_model()
    with RecordWriter(model, "memory://sizes") as writer:
        size = writer.rows.schema.record_bytes
    url = f"{store_url}?max_bytes={3 * size}"
    for seed in range(4):
        run = reuse(model, url, prompt(65, seed=seed))
        assert_same_as_cold(model, prompt(65, seed=seed), run)
    assert sum(path.stat().st_size for path in records(store_url)) <= 3 * size


def test_a_load_ends_with_its_deadline_and_uses_what_came_before(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(65))
    gate = Gate()
    counts = Counters()
    # The first chunk takes one look and two reads.
    store = _StallsLater(open_store(store_url), gate=gate, num_free=2)
    options = {"chunk_tokens": CHUNK, "load_timeout_seconds": 10.0, "io_threads": 1}
    with StoredKV(model, store, observer=counts, **options) as kv:
        started = time.monotonic()
        sequences, logits = generate(kv, prompt(65))
        assert time.monotonic() - started < 60
        assert kv.num_loaded == 2 * CHUNK
        assert counts["miss_deadline"] == 1
        gate.release()
    cold, cold_logits = generate(model, prompt(65))
    assert sequences.tolist() == cold.tolist()
    assert (logits - cold_logits).abs().max() <= 1e-4


class _StallsLater(StallingStore):
    """Reads `num_free` records at once and has the next ones wait."""

    def __init__(self, inner, *, gate, num_free):
        super().__init__(inner, gate=gate, operations={"read"})
        self._num_free = num_free

    def fault(self, operation):
        self._num_free -= 1
        return self._num_free >= 0 or super().fault(operation)


def test_a_stalled_store_is_not_asked_again_at_once(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(65))
    gate = Gate()
    counts = Counters()
    store = StallingStore(open_store(store_url), gate=gate, operations={"read"})
    with StoredKV(
        model, store, chunk_tokens=CHUNK, observer=counts, load_timeout_seconds=1.0
    ) as kv:
        assert loaded(kv, prompt(65)) == 0
        started = time.monotonic()
        for _ in range(20):
            assert loaded(kv, prompt(65)) == 0
        assert time.monotonic() - started < 1.0 * 20
        assert (counts["miss_deadline"], counts["loads_skipped"]) == (1, 20)
        gate.release()


def test_a_save_ends_with_its_deadline_and_keeps_little_in_memory(load_model, store_url):
    model = load_model()
    gate = Gate()
    counts = Counters()
    store = StallingStore(open_store(store_url), gate=gate, operations={"put"})
    options = {"chunk_tokens": 4, "save_timeout_seconds": 0.2, "io_threads": 1}
    with StoredKV(model, store, observer=counts, **options) as kv:
        for _ in range(3):
            started = time.monotonic()
            assert loaded(kv, prompt(65)) == 0
            assert time.monotonic() - started < 30
        assert (counts["save_deadline"], counts["put_stored"]) == (3, 0)
        gate.release()
        # No more than two chunks were in memory, and are stored now.
        kv._config = replace(kv._config, save_timeout_seconds=20.0)
        loaded(kv, prompt(65))
        assert counts["put_stored"] == 16
        assert loaded(kv, prompt(65)) == 64


def test_closing_does_not_wait_for_a_stalled_store(load_model, store_url, monkeypatch):
    model = load_model()
    reuse(model, store_url, prompt(65))
    monkeypatch.setattr("kvferry.adapters.transformers.stored_kv.CLOSE_SECONDS", 0.2)
    gate = Gate()
    store = StallingStore(open_store(store_url), gate=gate, operations={"read"})
    kv = StoredKV(model, store, chunk_tokens=CHUNK, load_timeout_seconds=0.2)
    loaded(kv, prompt(65))
    started = time.monotonic()
    kv.close()
    assert time.monotonic() - started < 30
    gate.release()
