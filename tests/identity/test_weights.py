import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save_file

from kvferry import filesystem
from kvferry.errors import ConfigError
from kvferry.identity import weights, weights_digest, weights_state
from kvferry.identity.weights import RACY_NS, _DigestCache, _entry_of
from kvferry.testing.stores.hooks import PATIENCE_SECONDS


def later():
    """A clock by which every file of a test is long unchanged."""
    return time.time_ns() + 10 * RACY_NS


def wait_for_a_tick(file):
    """Until the clock of the file system, which no fake can move, is past the file's change."""
    probe = file.with_name("probe")
    probe.touch()
    while probe.stat().st_ctime_ns <= file.stat().st_ctime_ns:
        probe.touch()
    probe.unlink()


def make_model(path, *, shards=1, seed=0, suffix=".safetensors"):
    """A directory with `shards` weight files of equal names, sizes and headers for every seed."""
    path.mkdir()
    for shard in range(shards):
        generator = torch.Generator().manual_seed(1000 * seed + shard)
        save_file(
            {"w": torch.randn(13, 17, generator=generator)},
            path / f"model-{shard + 1:05d}-of-{shards:05d}{suffix}",
        )
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture(autouse=True)
def _any_file_system_will_do(monkeypatch):
    monkeypatch.setattr(weights, "shows_changes", lambda directory: True)


@pytest.fixture
def digest(tmp_path, monkeypatch):
    def run(model, *, home=tmp_path, clock_ns=later):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        return weights_digest(model, clock_ns=clock_ns)

    return run


def cache_in(home):
    return home / "kvferry" / "weights"


def entry_of(model_file):
    with model_file.open("rb") as file:
        return _entry_of(file.fileno(), os.fstat(file.fileno()), model_file.resolve())


def is_cached(tmp_path, model_file):
    return _DigestCache(cache_in(tmp_path)).get(entry_of(model_file)) is not None


def test_two_models_of_equal_names_sizes_and_headers_differ(tmp_path, digest):
    a, b = make_model(tmp_path / "a", seed=1), make_model(tmp_path / "b", seed=2)
    (file_a,), (file_b,) = a.glob("*.safetensors"), b.glob("*.safetensors")
    head = 8 + int.from_bytes(file_a.read_bytes()[:8], "little")
    assert file_a.stat().st_size == file_b.stat().st_size
    assert file_a.read_bytes()[:head] == file_b.read_bytes()[:head]
    assert digest(a) != digest(b)


def test_a_copy_a_rename_and_new_times_keep_the_digest(tmp_path, digest):
    model = make_model(tmp_path / "a", shards=3)
    first = digest(model)
    assert len(first) == 32
    shutil.copytree(model, tmp_path / "copy")
    assert digest(tmp_path / "copy") == first
    model.rename(tmp_path / "renamed")
    assert digest(tmp_path / "renamed") == first
    for path in (tmp_path / "renamed").iterdir():
        os.utime(path, ns=(1, 1))
    assert digest(tmp_path / "renamed") == first


def test_links_are_followed_to_the_content(tmp_path, digest):
    model = make_model(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in model.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert digest(snapshot) == digest(model)


def hub_of(model, cache):
    """A hub's cache that holds a model: blobs by name, and a snapshot of links to them."""
    repository = cache / "models--some--model"
    snapshot, blobs = repository / "snapshots" / f"{1:040x}", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in model.iterdir():
        content = path.read_bytes()
        is_large = path.suffix == ".safetensors"
        blob = blobs / (sha256(content).hexdigest() if is_large else f"{len(content):040x}")
        blob.write_bytes(content)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.fixture
def hashed(monkeypatch):
    """The names of the files that were read and hashed."""
    found = []
    whole = weights._hash

    def noted(file, before, path, stopped):
        found.append(path.name)
        return whole(file, before, path, stopped)

    monkeypatch.setattr(weights, "_hash", noted)
    return found


def in_place(snapshot, name):
    """Write to a file of a snapshot as `save_pretrained` does, later than the link."""
    blob = (snapshot / name).resolve()
    wait_for_a_tick(blob)
    blob.write_bytes(blob.read_bytes()[:-1] + b"\x7f")


def link_to_other(snapshot, name):
    """As a program that shares files of its own by content, under names that say something else."""
    blob = (snapshot / name).resolve()
    other = snapshot.parent.parent / "files" / blob.name
    other.parent.mkdir()
    other.write_bytes(b"other content")
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(other)


def copied(snapshot, name):
    content = (snapshot / name).read_bytes()
    (snapshot / name).unlink()
    (snapshot / name).write_bytes(content)


def renamed(snapshot, name):
    blob = (snapshot / name).resolve()
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(blob.rename(blob.with_name("A" * 64)))


@pytest.mark.parametrize("change", [None, in_place, link_to_other, copied, renamed])
def test_a_file_in_a_hubs_cache_is_known_by_its_name_if_a_hub_put_it_there(
    tmp_path, digest, hashed, change
):
    model = make_model(tmp_path / "a", shards=2)
    write_index(model, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    snapshot = hub_of(model, tmp_path / "hub")
    changed = "model-00002-of-00002.safetensors"
    if change is not None:
        change(snapshot, changed)
    found = digest(snapshot, home=tmp_path / "other")
    small = ["model.safetensors.index.json"]
    assert sorted(hashed) == (small if change is None else sorted([changed, *small]))
    # Whoever reads all of it finds the same.
    plain = tmp_path / "plain"
    shutil.copytree(snapshot, plain, symlinks=False)
    assert digest(plain) == found


def test_a_file_that_cannot_be_read_ends_the_work_on_the_others(tmp_path, digest, monkeypatch):
    model = make_model(tmp_path / "a", shards=3)
    last = model / "model-00003-of-00003.safetensors"
    is_begun, went_on = threading.Event(), []

    def pieces(readinto):
        if readinto.__self__.name != str(last):
            assert is_begun.wait(PATIENCE_SECONDS)
            raise OSError(5, "broken disk")
        is_begun.set()
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            yield memoryview(b"")
        went_on.append(last)

    monkeypatch.setattr(weights, "_pieces", pieces)
    with pytest.raises(ConfigError, match="broken disk"):
        digest(model)
    assert went_on == []


def test_a_start_that_the_host_ends_goes_on_where_it_was(tmp_path, digest, hashed, monkeypatch):
    """Of weights that take longer to hash than the host gives an engine to start."""
    model = make_model(tmp_path / "a", shards=4)
    monkeypatch.setattr(weights, "_NUM_THREADS", 1)
    noted, deadline = weights._hash, [3]

    def hash_until_deadline(file, before, path, stopped):
        if len(hashed) == deadline[0]:
            raise SystemExit
        return noted(file, before, path, stopped)

    monkeypatch.setattr(weights, "_hash", hash_until_deadline)
    with pytest.raises(SystemExit):
        digest(model)
    deadline[0] = 1000
    assert digest(model) == digest(model, home=tmp_path / "other")
    names = sorted(file.name for file in model.glob("*.safetensors"))
    assert hashed == [*names[:3], names[3], *names]


def test_the_digest_is_the_documented_one(tmp_path, digest):
    model = make_model(tmp_path / "a", shards=2)
    (model / "pytorch_model.bin").write_bytes(b"tensors")
    hasher = blake3(b"kvferry.weight.2")
    for path in sorted(model.iterdir()):
        if path.name != "config.json":
            name, content = path.name.encode(), sha256(path.read_bytes()).hexdigest().encode()
            hasher.update(b"L" + (2).to_bytes(8, "little"))
            hasher.update(b"S" + len(name).to_bytes(8, "little") + name)
            hasher.update(b"S" + (64).to_bytes(8, "little") + content)
    assert digest(model) == hasher.digest()


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("extra.safetensors", True),
        ("extra.bin", True),
        ("extra.gguf", True),
        ("extra.pth", True),
        ("model.safetensors.index.json", True),
        ("training_args.bin", False),
        ("tokenizer.json", False),
        ("config.json", False),
    ],
)
def test_which_files_count_as_weights(tmp_path, digest, name, counts):
    model = make_model(tmp_path / "a")
    before = digest(model)
    (model / name).write_bytes(b"something else")
    assert (digest(model) != before) == counts


def test_an_unchanged_file_is_not_read_again(tmp_path, digest):
    model = make_model(tmp_path / "a")
    (file,) = model.glob("*.safetensors")
    real = digest(model)
    # Only whoever believes the entry for this very state of the file gives another answer.
    _DigestCache(cache_in(tmp_path)).put(entry_of(file), b"d" * 32)
    believed = digest(model)
    assert believed != real
    assert digest(model, home=tmp_path / "other") == real


def test_touching_a_file_hashes_it_again(tmp_path, digest):
    model = make_model(tmp_path / "a")
    (file,) = model.glob("*.safetensors")
    digest(model)
    assert is_cached(tmp_path, file)
    os.utime(file, ns=(1, 1))
    assert not is_cached(tmp_path, file)


def test_changed_content_under_a_restored_mtime_is_seen(tmp_path, digest):
    model = make_model(tmp_path / "a")
    (file,) = model.glob("*.safetensors")
    before, info = digest(model), file.stat()
    wait_for_a_tick(file)
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (info.st_size, info.st_mtime_ns)
    assert digest(model) != before


@pytest.mark.parametrize(("age_ns", "kept"), [(0, False), (RACY_NS - 1, False), (RACY_NS, True)])
def test_a_file_changed_just_before_hashing_is_not_kept(tmp_path, digest, age_ns, kept):
    model = make_model(tmp_path / "a")
    (file,) = model.glob("*.safetensors")
    digest(model, clock_ns=lambda: file.stat().st_ctime_ns + age_ns)
    assert is_cached(tmp_path, file) == kept


def test_a_damaged_cache_entry_is_ignored(tmp_path, digest):
    model = make_model(tmp_path / "a")
    expected = digest(model)
    (entry,) = cache_in(tmp_path).iterdir()
    good = entry.read_bytes()
    damaged = [b"", good[:-1], good + b" ", good[:-64] + b"0" * 64, good[:-64] + b"zz" * 32]
    damaged += [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in range(len(good))]
    (file,) = model.glob("*.safetensors")
    for content in damaged:
        entry.write_bytes(content)
        assert not is_cached(tmp_path, file)
    assert digest(model) == expected
    assert entry.read_bytes() == good


def test_a_cache_that_others_can_write_is_not_used(tmp_path, digest):
    model = make_model(tmp_path / "a")
    cache = cache_in(tmp_path)
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert digest(model) == digest(model)
    assert list(cache.iterdir()) == []


def test_a_cache_directory_is_made_private(tmp_path, digest):
    digest(make_model(tmp_path / "a"))
    assert cache_in(tmp_path).stat().st_mode & 0o777 == 0o700


def test_a_cache_that_is_a_file_costs_nothing_but_time(tmp_path, digest):
    (tmp_path / "file").write_text("not a directory")
    model = make_model(tmp_path / "a")
    assert digest(model, home=tmp_path / "file") == digest(model)


def test_memory_is_bounded_whatever_the_size(tmp_path, digest):
    model = tmp_path / "a"
    model.mkdir()
    with (model / "big.safetensors").open("wb") as file:
        file.truncate(128 * 1024 * 1024)
    tracemalloc.start()
    try:
        digest(model)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * 1024 * 1024


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, digest):
    model = make_model(tmp_path / "a")
    (file,) = model.glob("*.safetensors")

    def grow():
        with file.open("ab") as appended:
            appended.write(b"more")

    def overwrite():
        wait_for_a_tick(file)
        file.write_bytes(bytes(file.stat().st_size))

    def cut_off():
        os.truncate(file, 10)

    for change in (grow, overwrite, cut_off):

        def change_as_the_read_starts(change=change):
            change()
            return later()

        with pytest.raises(ConfigError, match="changes while it is read"):
            digest(model, clock_ns=change_as_the_read_starts)


def test_what_is_no_model_directory_is_named(tmp_path, digest):
    with pytest.raises(ConfigError, match="is not a model directory"):
        digest(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    for name in ("file", "model.safetensors.index.json"):
        with pytest.raises(ConfigError, match="is not a model directory"):
            digest(tmp_path / name)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="holds no weights"):
        digest(empty)
    (empty / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no weights"):
        digest(empty)
    (empty / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a file"):
        digest(empty)


def write_index(model, *names):
    model_map = {f"w{number}": name for number, name in enumerate(names)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": model_map}))


@pytest.mark.parametrize("name", ["shards/model-00001.safetensors", "shards/part", "./shards/part"])
def test_a_file_that_an_index_names_counts_wherever_it_stands(tmp_path, digest, name):
    model = make_model(tmp_path / "a")
    (model / "shards").mkdir()
    (model / name).write_bytes(b"some tensors")
    before = digest(model)
    write_index(model, name)
    named = digest(model)
    (model / name).write_bytes(b"other tensor")
    assert len({before, named, digest(model)}) == 3
    (model / name).unlink()
    with pytest.raises(ConfigError, match="is not a file"):
        digest(model)


@pytest.mark.parametrize("name", ["../b/model.safetensors", "/etc/passwd", "shards/../../b/x"])
def test_an_index_that_names_a_file_outside_is_refused(tmp_path, digest, name):
    model = make_model(tmp_path / "a")
    make_model(tmp_path / "b")
    write_index(model, name)
    with pytest.raises(ConfigError, match="outside of the model directory"):
        digest(model)


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"weight_map": [1]}', "[" * 100_000])
def test_an_index_that_is_none_is_a_file_like_others(tmp_path, digest, text):
    model = make_model(tmp_path / "a")
    before = digest(model)
    (model / "model.safetensors.index.json").write_text(text)
    assert digest(model) != before


def changes_of(file):
    """Ways in which a file becomes another one of the same size."""
    content = file.read_bytes()
    middle = len(content) // 2
    return {
        "first byte": lambda: file.write_bytes(b"X" + content[1:]),
        "last byte": lambda: file.write_bytes(content[:-1] + b"\x7f"),
        "another fine-tune": lambda: file.write_bytes(content[:middle] + content[middle:][::-1]),
        "replaced by a rename": lambda: os.replace(
            make_model(file.parent.parent / "b", seed=1) / file.name, file
        ),
    }


@pytest.mark.parametrize("change", changes_of(Path(__file__)))
def test_where_times_do_not_show_changes_a_sample_of_the_content_does(
    tmp_path, digest, monkeypatch, change
):
    model = make_model(tmp_path / "a")
    (file,) = model.glob("*.safetensors")
    monkeypatch.setattr(weights, "shows_changes", lambda directory: False)
    before, info = digest(model), file.stat()
    assert is_cached(tmp_path, file)
    changes_of(file)[change]()
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (info.st_size, info.st_mtime_ns)
    assert not is_cached(tmp_path, file)
    assert digest(model) != before


def test_a_sample_spreads_over_the_whole_of_a_large_file(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "shows_changes", lambda directory: False)
    file = tmp_path / "large"
    with file.open("wb") as large:
        large.truncate(64 << 20)
    times = (0, file.stat().st_mtime_ns)
    before = entry_of(file)
    for at in range(0, 64 << 20, 2 << 20):  # a change of two MiB anywhere
        with file.open("r+b") as large:
            large.seek(at)
            large.write(b"\1" * (2 << 20))
        os.utime(file, ns=times)
        assert entry_of(file) != before
        with file.open("r+b") as large:
            large.seek(at)
            large.write(bytes(2 << 20))
        os.utime(file, ns=times)
    assert entry_of(file) == before


HASHES = """
import pathlib, sys, time
from kvferry.identity import weights
whole = weights._hash
weights._hash = lambda *args: [whole(*args), sys.stdout.write("hashed\\n")][0]
weights.shows_changes = lambda directory: True
print("ready", flush=True)
sys.stdin.readline()
later = time.time_ns() + 10 * weights.RACY_NS
print(weights.weights_digest(pathlib.Path(sys.argv[1]), clock_ns=lambda: later).hex())
"""


def test_processes_that_start_together_hash_each_file_once(tmp_path):
    model = tmp_path / "a"
    model.mkdir()
    for name in ("1", "2", "3"):
        with (model / f"{name}.safetensors").open("wb") as file:
            file.truncate(256 << 20)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", HASHES, str(model)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    assert all(rank.stdout.readline() == "ready\n" for rank in ranks)
    for rank in ranks:
        rank.stdin.write("go\n")
        rank.stdin.flush()
    answers = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert len({answer.split()[-1] for answer in answers}) == 1
    assert sum(answer.count("hashed") for answer in answers) == 3


def test_a_process_that_hangs_with_the_lock_holds_no_other(tmp_path, digest, monkeypatch):
    monkeypatch.setattr(weights, "_LOCKED_BYTES", 0)
    monkeypatch.setattr(weights, "_LOCK_SECONDS", 0.2)
    model = make_model(tmp_path / "a")
    (file,) = model.glob("*.safetensors")
    expected = digest(model, home=tmp_path / "other")
    cache_in(tmp_path).mkdir(parents=True)
    with _DigestCache(cache_in(tmp_path)).hashing(entry_of(file), 1, threading.Event()):
        assert digest(model) == expected


def test_files_that_cannot_be_locked_are_hashed_all_the_same(tmp_path, digest, monkeypatch):
    def refuse(_fd, _operation):
        raise OSError(errno.ENOLCK, "no locks available")

    model = make_model(tmp_path / "a")
    expected = digest(model)
    monkeypatch.setattr(weights, "_LOCKED_BYTES", 0)
    monkeypatch.setattr(weights, "flock", refuse)
    assert digest(model, home=tmp_path / "other") == expected


@pytest.mark.parametrize(
    ("kind", "flags", "shown"),
    [
        ("ext4", 0, True),
        ("xfs", os.ST_NOSUID, True),
        ("ext4", os.ST_RDONLY, False),
        ("squashfs", os.ST_RDONLY, False),
        ("erofs", 0, False),
        ("overlay", 0, False),
        ("nfs4", 0, False),
        ("fuse.sshfs", 0, False),
    ],
)
def test_which_file_systems_show_every_change(tmp_path, monkeypatch, kind, flags, shown):
    monkeypatch.setattr(filesystem, "file_system", lambda directory: kind)
    monkeypatch.setattr(os, "statvfs", lambda directory: SimpleNamespace(f_flag=flags))
    assert filesystem.shows_changes(tmp_path) is shown


def test_a_change_addition_or_removal_shows_in_the_state(tmp_path):
    model = make_model(tmp_path / "a", shards=2)
    files = sorted(model.glob("*.safetensors"))
    states = [weights_state(model)]
    assert weights_state(model) == states[0]
    wait_for_a_tick(files[0])
    files[0].write_bytes(files[0].read_bytes())
    states.append(weights_state(model))
    (model / "extra.bin").write_bytes(b"more")
    states.append(weights_state(model))
    files[1].unlink()
    states.append(weights_state(model))
    assert all(one != other for one, other in itertools.pairwise(states))
