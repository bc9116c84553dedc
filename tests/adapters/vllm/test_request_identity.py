"""A LoRA adapter is known by its content, or not at all."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from types import SimpleNamespace

import pytest

from kvferry.adapters.vllm import request_identity
from kvferry.adapters.vllm.request_identity import RECHECK_SECONDS, LoraIdentities
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores.hooks import wait_until
from kvferry.v1.host import ADAPTER_SECONDS, HostRequests, UnknownAdapterError

from .fakes import write_model


class Lora:
    def __init__(self, path, number=1, *, load_inplace=False):
        self.lora_int_id = number
        self.lora_path = str(path)
        self.load_inplace = load_inplace


def write_adapter(path, fill):
    write_model(path, fill=fill)
    (path / "adapter_config.json").write_text('{"r": 8}')
    return path


def settled(identities, request):
    """Ask until the files are hashed, as later requests would. Return the identity, or why there is
    none."""
    found = "is being hashed"

    def is_hashed() -> bool:
        nonlocal found
        try:
            found = identities(request)
        except UnknownAdapterError as error:
            found = str(error)
        return found != "is being hashed"

    wait_until(is_hashed, "an answer")
    return found


@pytest.fixture
def adapter(tmp_path):
    return write_adapter(tmp_path / "a", 1.0)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def identities(adapter, clock, tmp_path):
    """Made after the adapter, and before the times of later files."""
    made = LoraIdentities(clock)
    before, probe = time.time(), tmp_path / "probe"

    def is_later() -> bool:  # a kernel's stamps lag behind by some milliseconds
        probe.write_text(str(time.time()))
        return probe.stat().st_ctime > before

    wait_until(is_later, "the time stamps go on")
    yield made
    made.close()


def test_adapters_are_distinguished_by_content(tmp_path, adapter):
    other = write_adapter(tmp_path / "b", 2.0)
    copied = tmp_path / "copy"
    shutil.copytree(adapter, copied)
    identities = LoraIdentities()
    digests = [settled(identities, Lora(p, n)) for n, p in enumerate((adapter, other, copied), 1)]
    identities.close()
    assert all(len(digest) == 129 for digest in digests)
    assert digests[0] == digests[2] != digests[1]


def test_the_first_request_under_an_adapter_waits_for_nothing(adapter, identities):
    with pytest.raises(UnknownAdapterError, match="is being hashed"):
        identities(Lora(adapter))


@pytest.mark.parametrize("lora", [Lora("", 1), Lora("/a", 2, load_inplace=True)])
def test_an_adapter_without_a_content_of_its_own_has_no_identity(lora, identities):
    with pytest.raises(UnknownAdapterError, match="in place"):
        identities(lora)
    assert all(thread.name != "kvferry-lora" for thread in threading.enumerate())


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("content", ["other", "same"])
def test_an_adapter_that_changed_after_the_engine_started_has_no_identity(
    name, content, adapter, identities, caplog
):
    """It may have been loaded before the change, or after it."""
    path = adapter / name
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data if content == "same" else b" " + data)
    assert "changed on disk" in settled(identities, Lora(adapter))
    assert caplog.text.count("are not cached") == 1
    assert "changed on disk" in settled(identities, Lora(adapter))
    assert caplog.text.count("are not cached") == 1


@pytest.mark.parametrize(
    "way", ["link", "link above", "link to a link", "link to a file", "rename"]
)
def test_an_older_adapter_in_the_place_of_a_loaded_one_has_no_identity(
    way, tmp_path, clock, request
):
    """All its files are older than the engine, which may have loaded those of the other."""
    first, second = (write_adapter(tmp_path / name / "x", n) for n, name in enumerate("ab"))
    place, swapped, path = tmp_path / "now", tmp_path / "now", tmp_path / "now"
    targets = [first, second]
    if way == "link above":
        targets, path = [first.parent, second.parent], place / "x"
    elif way == "link to a link":
        path = tmp_path / "outer"
        path.symlink_to(place)
    elif way == "link to a file":
        path = write_adapter(tmp_path / "files", 0.0)
        place = swapped = path / "model.safetensors"
        place.unlink()
        targets = [each / place.name for each in targets]
    if way == "rename":
        first.rename(place)
    else:
        place.symlink_to(targets[0])
    identities = request.getfixturevalue("identities")
    if way == "rename":
        place.rename(tmp_path / "old")
        second.rename(place)
    else:
        (tmp_path / "next").symlink_to(targets[1])
        (tmp_path / "next").replace(swapped)
    assert "changed on disk" in settled(identities, Lora(path))


def test_an_adapter_behind_links_that_stay_has_its_identity(adapter, tmp_path, request):
    (tmp_path / "now").symlink_to(".")
    (tmp_path / "outer").symlink_to("now/a")
    found = settled(request.getfixturevalue("identities"), Lora(tmp_path / "outer"))
    assert len(found) == 129


@pytest.mark.parametrize("made", ["no directory", "no settings"])
def test_an_adapter_that_cannot_be_read_has_no_identity(made, adapter, identities):
    if made == "no directory":
        shutil.rmtree(adapter)
    else:
        (adapter / "adapter_config.json").unlink()
    assert "cannot be hashed" in settled(identities, Lora(adapter))


def test_an_adapter_that_changes_under_a_running_engine_is_not_cached_again(
    adapter, identities, clock
):
    assert len(settled(identities, Lora(adapter))) == 129
    clock.advance(RECHECK_SECONDS)
    write_adapter(adapter, 2.0)
    # Not even the first request behind the change: its files are looked at again first.
    with pytest.raises(UnknownAdapterError, match="is being hashed"):
        identities(Lora(adapter))
    assert "changed on disk" in settled(identities, Lora(adapter))


def test_an_adapter_of_equal_times_that_changed_is_known_by_its_content(
    adapter, identities, clock, monkeypatch
):
    """Times of mounts may come from elsewhere."""
    monkeypatch.setattr(request_identity, "newest_change", lambda *_: 0.0)
    monkeypatch.setattr(request_identity, "shows_its_changes", lambda *_: False)
    assert len(settled(identities, Lora(adapter))) == 129
    clock.advance(RECHECK_SECONDS)
    write_model(adapter, fill=2.0)
    assert "changed on disk" in settled(identities, Lora(adapter))


def test_an_adapter_that_is_refused_while_it_is_hashed_stays_refused(adapter, identities):
    with pytest.raises(UnknownAdapterError, match="is being hashed"):
        identities(Lora(adapter))
    for lora in (Lora(adapter, load_inplace=True), Lora(adapter)):
        with pytest.raises(UnknownAdapterError, match="in place"):
            identities(lora)
    identities.close()  # the job has ended
    with pytest.raises(UnknownAdapterError, match="in place"):
        identities(Lora(adapter))


@pytest.mark.parametrize("path", ["a", "b"])
def test_an_adapter_that_was_loaded_in_the_place_of_a_known_one_takes_its_identity(
    path, tmp_path, adapter, clock, caplog
):
    """From then on the host serves it under the id, whatever a later request says."""
    write_adapter(tmp_path / "b", 2.0)
    identities = LoraIdentities(clock)
    assert len(settled(identities, Lora(adapter))) == 129
    for lora in (Lora(tmp_path / path, load_inplace=True), Lora(adapter)):
        assert settled(identities, lora) == "was loaded in place of another"
    identities.close()
    assert caplog.text.count("are not cached") == 1


def test_two_adapters_of_one_id_have_no_identity(tmp_path, adapter, clock):
    """The host loads one of them, whichever it meets first."""
    other = write_adapter(tmp_path / "b", 2.0)
    identities = LoraIdentities(clock)
    assert len(settled(identities, Lora(adapter))) == 129
    assert "has the id" in settled(identities, Lora(other))
    clock.advance(RECHECK_SECONDS)
    assert "has the id" in settled(identities, Lora(adapter))
    identities.close()  # a look at the files, if there were one, has ended
    assert "has the id" in settled(identities, Lora(adapter))


def test_an_adapter_whose_files_stay_has_its_identity_again_after_a_look(
    adapter, identities, clock
):
    first = settled(identities, Lora(adapter))
    assert identities(Lora(adapter)) == first
    clock.advance(RECHECK_SECONDS)
    with pytest.raises(UnknownAdapterError, match="is being hashed"):
        identities(Lora(adapter))
    assert settled(identities, Lora(adapter)) == first


@pytest.mark.parametrize("shows", [True, False])
def test_a_look_at_files_whose_times_show_changes_reads_none(
    shows, adapter, identities, clock, monkeypatch
):
    reads = []
    digest = request_identity.adapter_digest
    monkeypatch.setattr(request_identity, "adapter_digest", lambda p: reads.append(p) or digest(p))
    monkeypatch.setattr(request_identity, "shows_its_changes", lambda *_: shows)
    for _ in range(3):
        settled(identities, Lora(adapter))
        clock.advance(RECHECK_SECONDS)
    assert len(reads) == (1 if shows else 3)


@pytest.mark.parametrize("replaced", ["of the adapter", "above it"])
def test_files_that_come_in_the_place_of_others_are_others(replaced, tmp_path, clock):
    """Also if they are as old: what replaces a directory above them leaves their times alone."""
    for number, group in enumerate(["now", "next"]):
        (tmp_path / group).mkdir()
        write_adapter(tmp_path / group / "x", float(number))
    identities = LoraIdentities(clock)
    lora = Lora(tmp_path / "now" / "x")
    assert len(settled(identities, lora)) == 129
    inner = "x" if replaced == "of the adapter" else "."
    (tmp_path / "now" / inner).rename(tmp_path / "old")
    (tmp_path / "next" / inner).rename(tmp_path / "now" / inner)
    clock.advance(RECHECK_SECONDS)
    assert "changed on disk" in settled(identities, lora)
    identities.close()


def test_files_that_cannot_be_read_now_may_be_later(adapter, identities, clock, caplog):
    (adapter / "model.safetensors").rename(adapter.parent / "kept")
    for _ in range(2):
        assert "cannot be hashed" in settled(identities, Lora(adapter))
        clock.advance(RECHECK_SECONDS)
    assert caplog.text.count("are not cached") == 1
    (adapter.parent / "kept").rename(adapter / "model.safetensors")  # which is a change, here
    assert "changed on disk" in settled(identities, Lora(adapter))


# --- bursts of requests ---------------------------------------------------------------------------


def request_under(lora, number):
    return SimpleNamespace(
        request_id=f"{lora.lora_path} {number}", lora_request=lora, num_prompt_tokens=400,
        all_token_ids=[7] * 400, prompt_token_ids=[7] * 400, mm_features=[], cache_salt=None,
        prompt_embeds=None, kv_transfer_params=None, sampling_params=None,
    )  # fmt: skip


@pytest.mark.parametrize("ends", ["soon", "late"])
@pytest.mark.parametrize("is_known", [True, False], ids=["again", "first"])
def test_a_burst_while_an_adapter_is_read_loses_no_cache(
    is_known, ends, tmp_path, adapter, clock, monkeypatch
):
    """Of 40 requests under two adapters, those of the one that is being read wait for a moment;
    then they are computed, and stored once it was read. The others wait for nothing."""
    other, slow, look = (
        Lora(write_adapter(tmp_path / "b", 2.0), 2),
        Lora(adapter),
        threading.Event(),
    )
    look_at = request_identity._look_at

    def looks(path, *rest):
        if path == adapter:
            look.wait(60.0)
        return look_at(path, *rest)

    monkeypatch.setattr(request_identity, "_look_at", looks)
    identities = LoraIdentities(clock)
    requests = HostRequests(identities, str)
    requests.clock = clock
    if is_known:
        look.set()
        settled(identities, slow)
    settled(identities, other)
    clock.advance(RECHECK_SECONDS)
    look.clear()
    burst = [request_under(lora, number) for number in range(20) for lora in (slow, other)]

    def look_up(under):
        views = [
            requests.view(each, is_lookup=True) for each in burst if each.lora_request is under
        ]
        return {(view.extra_keys.cacheable, requests.waits(view)) for view in views}

    assert look_up(slow) == {(False, True)}
    wait_until(lambda: look_up(other) == {(True, False)}, "the other adapter is looked at")
    if ends == "late":
        clock.advance(ADAPTER_SECONDS)
        assert look_up(slow) == {(False, False)}  # they are computed
    look.set()
    wait_until(lambda: look_up(slow) == {(True, False)}, "they are cached")
    assert {requests.view(each).extra_keys.lora for each in burst} == {
        settled(identities, slow), settled(identities, other),
    }  # fmt: skip
    identities.close()


def test_requests_that_come_one_by_one_are_all_cached(adapter, clock):
    """Each meets a look at the files of its adapter, and waits for that."""
    identities = LoraIdentities(clock)
    requests = HostRequests(identities, str)
    requests.clock = clock

    def is_cached(number):
        clock.advance(2 * RECHECK_SECONDS)
        request = request_under(Lora(adapter), number)
        view = requests.view(request)
        wait_until(lambda: not requests.waits(requests.view(request, is_lookup=True)), "an answer")
        return view.extra_keys.cacheable

    assert all(is_cached(number) for number in range(10))
    identities.close()


def test_a_look_up_waits_also_if_its_request_was_known_before_the_look(adapter, clock):
    identities = LoraIdentities(clock)
    requests = HostRequests(identities, str)
    requests.clock = clock
    settled(identities, Lora(adapter))
    request = request_under(Lora(adapter), 0)
    assert requests.view(request).extra_keys.cacheable  # as it came
    clock.advance(RECHECK_SECONDS)  # it queues
    assert requests.waits(requests.view(request, is_lookup=True))
    assert requests.view(request).extra_keys.cacheable
    wait_until(lambda: not requests.waits(requests.view(request, is_lookup=True)), "an answer")
    identities.close()


# --- adapters that came after the start -----------------------------------------------------------


def snapshot_of(adapter, cache, commit="c" * 40):
    """Lay files out as a hub's cache does."""
    blobs, place = cache / "blobs", cache / "snapshots" / commit
    blobs.mkdir(parents=True)
    place.mkdir(parents=True)
    for path in adapter.iterdir():
        data = path.read_bytes()
        is_large = path.suffix == ".safetensors"  # as Git LFS has them
        name = (hashlib.sha256 if is_large else hashlib.sha1)(data).hexdigest()
        (blobs / name).write_bytes(data)
        (place / path.name).symlink_to(f"../../blobs/{name}")
    return place


LATE = {
    "snapshot": True,
    "directory": False,
    "copy of a known one": False,
    "snapshot with a file of its own": False,
    "snapshot of which a blob was written again": False,
    "link to a snapshot": False,
    "snapshot of no commit": False,
}


@pytest.mark.parametrize(("made", "is_cached"), LATE.items(), ids=LATE)
def test_an_adapter_that_came_after_the_start_is_cached_if_its_path_names_its_content(
    made, is_cached, tmp_path, adapter, identities
):
    """Elsewhere, the engine may have loaded what lay there before: it loads at a command that
    connectors are not told of, and before the first request."""
    commit = "main" if "no commit" in made else "c" * 40
    path = snapshot_of(adapter, tmp_path / "hub", commit)
    if made == "directory":
        path = write_adapter(tmp_path / "late", 3.0)
    elif made == "copy of a known one":
        settled(identities, Lora(adapter, 7))
        path = tmp_path / "copy"
        shutil.copytree(adapter, path)
    elif "own" in made and "known" not in made:
        (path / "more.safetensors").write_bytes(b"more")
    elif "again" in made:
        (path / "model.safetensors").resolve().write_bytes(b"other")
    elif "link" in made:
        (tmp_path / "now").symlink_to(path)
        path = tmp_path / "now"
    found = settled(identities, Lora(path))
    assert (len(found) == 129) is is_cached
    assert is_cached or "changed on disk" in found
