"""Which files of a directory count as its weights: what is loaded, where that is certain."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from kvferry import filesystem
from kvferry.filesystem import file_system
from kvferry.identity import Loads, newest_change, weight_files, weights, weights_digest
from kvferry.testing.stores.hooks import wait_until

SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
INDEX = "model.safetensors.index.json"
ONE, INDEXED, BIN = ["model.safetensors"], [*SHARDS, INDEX], ["pytorch_model.bin"]
UNNAMED = ["a.safetensors", "b.safetensors"]

YESTERDAY = {
    "one file": (ONE, "0c6058ac30a84264aecf96e4929217c370c3d3dc6db74be00cce7f28689f5e84"),
    "shards": (INDEXED, "b7b0ae585fc881f187c981f47c56727bfe91bd8f40bab4da305482c89c6a822d"),
    "of torch": (
        [*BIN, "training_args.bin"],
        "5602abf685eecaa727655ab7f27cb14c034b6b8d11980bb0c2346aa8f25428fd",
    ),
    "gguf": (["model.Q4.gguf"], "0c7964b180ed7f79428193e222273fe3f8889a7d59a5ca1c822a5f61550363e3"),
    "no index": (UNNAMED, "6c6f925b48a092dc114a66dbbd270bf4185d7a904c57391c4b0dbe07d60932a5"),
}
"""Ordinary directories, and their digests before hosts' choices counted: stores have them."""


def write_files(path, names):
    path.mkdir()
    for number, name in enumerate(names):
        content = bytes([ord("a") + number])
        if name.endswith(".index.json"):
            shards = dict(zip("xyz", SHARDS if name == INDEX else names[:1], strict=False))
            content = json.dumps({"weight_map": shards}).encode()
        file = path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("loads", Loads)
@pytest.mark.parametrize(("names", "golden"), YESTERDAY.values(), ids=YESTERDAY)
def test_ordinary_directories_have_the_digest_that_they_always_had(names, golden, loads, tmp_path):
    assert weights_digest(write_files(tmp_path / "m", names), loads=loads).hex() == golden


ALWAYS = {Loads.ALL, Loads.BY_PATTERN, Loads.BY_NAME}
UNLESS_BY_NAME, ONLY_ALL, NONE = {Loads.ALL, Loads.BY_PATTERN}, {Loads.ALL}, set()

# What lies beside the weights, and for which hosts it counts.
BESIDE = [
    (ONE, ["pytorch_model.bin"], ONLY_ALL),
    (INDEXED, ["pytorch_model.bin"], ONLY_ALL),
    (ONE, ["pytorch_model-00001-of-00002.bin"], ONLY_ALL),
    (ONE, ["rng_state.pth"], ONLY_ALL),
    (ONE, ["rng_state_3.pth"], ONLY_ALL),
    (ONE, ["mmproj.gguf"], ONLY_ALL),
    (INDEXED, ["model-Q4_K_M.gguf"], ONLY_ALL),
    (ONE, ["adapter_model.bin"], ONLY_ALL),
    (INDEXED, ["adapter_model.safetensors"], ONLY_ALL),
    (ONE, ["training_args.bin"], NONE),
    (ONE, ["original/consolidated.00.pth"], NONE),
    # vLLM reads all files in safetensors where there is no index, and a class of it may read more.
    (ONE, ["adapter_model.safetensors"], UNLESS_BY_NAME),
    (ONE, ["more.safetensors"], UNLESS_BY_NAME),
    (INDEXED, ["more.safetensors"], UNLESS_BY_NAME),
    (ONE, ["speech.pt"], UNLESS_BY_NAME),
    (ONE, ["head.bin"], UNLESS_BY_NAME),
    (ONE, ["consolidated.safetensors"], UNLESS_BY_NAME),
    (INDEXED, ["consolidated.00.safetensors"], UNLESS_BY_NAME),
    # Neither the one file nor an index: no host is certain.
    (BIN, ["rng_state.pth"], ALWAYS),
    (BIN, ["mmproj.gguf"], ALWAYS),
    (UNNAMED, ["pytorch_model.bin"], ALWAYS),
    (["model.Q4.gguf"], ["mmproj.gguf"], ALWAYS),
    (["model.fp16.safetensors"], ["pytorch_model.bin"], ALWAYS),
]


@pytest.mark.parametrize("loads", Loads)
@pytest.mark.parametrize(("names", "beside", "counts_for"), BESIDE)
def test_a_file_counts_unless_it_is_certain_that_the_host_does_not_read_it(
    names, beside, counts_for, loads, tmp_path
):
    plain = write_files(tmp_path / "plain", names)
    other = write_files(tmp_path / "other", [*names, *beside])
    is_equal = weights_digest(plain, loads=loads) == weights_digest(other, loads=loads)
    assert is_equal is (loads not in counts_for)
    found = weight_files(other, loads)
    assert not set(beside) <= set(found.counted) or not is_equal
    listed = beside[0].rpartition("/")[0] == "" and beside[0] not in weights.NOT_WEIGHTS
    assert found.left_out == (tuple(beside) if is_equal and listed else ())


def test_twins_with_their_own_shards_and_a_file_in_mixed_company(tmp_path):
    """Hosts agree about what they all read, so they share it."""
    names = [*INDEXED, "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"]
    plain, both = write_files(tmp_path / "plain", INDEXED), write_files(tmp_path / "both", names)
    assert weights_digest(both, loads=Loads.BY_NAME) == weights_digest(plain)
    assert weights_digest(both, loads=Loads.BY_PATTERN) == weights_digest(plain)
    (both / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "gone.bin"}}')
    assert weights_digest(both, loads=Loads.BY_NAME) == weights_digest(plain)  # nobody follows it


def test_an_index_that_no_host_can_read_makes_nothing_certain(tmp_path):
    model = write_files(tmp_path / "m", [*INDEXED, *BIN])
    (model / INDEX).write_text("no JSON")
    for loads in Loads:
        assert weight_files(model, loads).left_out == ()


def test_an_index_of_files_elsewhere_hides_no_file_that_vllm_looks_for(tmp_path):
    """It looks for files in safetensors in the directory itself; if there are none, for others."""
    for number, named in enumerate(["sub/model.safetensors", "pytorch_model-00001-of-00002.bin"]):
        model = write_files(tmp_path / str(number), [named, "pytorch_model-00002-of-00002.bin"])
        (model / INDEX).write_text(json.dumps({"weight_map": {"x": named}}))
        assert weight_files(model, Loads.BY_PATTERN).left_out == ()
        (model / "some.safetensors").write_bytes(b"x")
        assert weight_files(model, Loads.BY_PATTERN).left_out == (
            "pytorch_model-00002-of-00002.bin",
        )


OF_FILES = {
    "an adapter": ("adapter_config.json", "{}", False),
    "a name": ("config.json", '{"transformers_weights": "other.safetensors"}', False),
    "a name in a part": ("config.json", '{"text_config": {"transformers_weights": "o"}}', False),
    "no JSON": ("config.json", "{", False),
    "no name": ("config.json", '{"model_type": "llama"}', True),
}


@pytest.mark.parametrize(("name", "text", "is_certain"), OF_FILES.values(), ids=OF_FILES)
def test_transformers_reads_the_files_that_a_configuration_names(name, text, is_certain, tmp_path):
    beside = ["adapter_model.safetensors", "other.safetensors"]
    model = write_files(tmp_path / "m", [*ONE, *beside])
    (model / name).write_text(text)
    assert weight_files(model, Loads.BY_NAME).left_out == (tuple(beside) if is_certain else ())


@pytest.mark.parametrize("loads", Loads)
def test_what_is_loaded_counts_whatever_lies_beside_it(loads, tmp_path):
    model = write_files(tmp_path / "m", [*ONE, *BIN])
    before = weights_digest(model, loads=loads)
    (model / ONE[0]).write_bytes(b"other")
    assert weights_digest(model, loads=loads) != before


# --- links of procfs ------------------------------------------------------------------------------


@pytest.fixture
def other_process():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()


def until_the_clock_of_links_goes_on(path):
    before = time.time()

    def is_later() -> bool:
        (path / "probe").unlink(missing_ok=True)
        (path / "probe").symlink_to("x")
        return (path / "probe").lstat().st_ctime > before + 0.05

    wait_until(is_later, "a later time stamp")
    return time.time()


@pytest.mark.skipif(file_system("/proc") != "proc", reason="there is no procfs")
def test_a_link_of_procfs_is_as_old_as_its_process(tmp_path, other_process):
    """It is stamped as somebody looks, which says nothing of the files."""
    model = write_files(tmp_path / "m", ONE)
    (tmp_path / "link").symlink_to(f"/proc/{other_process.pid}/root{model}")
    looked_at = until_the_clock_of_links_goes_on(tmp_path)
    assert newest_change(tmp_path / "link") < looked_at


@pytest.mark.skipif(file_system("/proc") != "proc", reason="there is no procfs")
def test_another_process_of_the_same_number_is_a_change(tmp_path, other_process, monkeypatch):
    """Its files may be others, however old they are."""
    model = write_files(tmp_path / "m", ONE)
    (tmp_path / "link").symlink_to(f"/proc/{other_process.pid}/root{model}")
    before = newest_change(tmp_path / "link")
    monkeypatch.setattr(weights, "process_start", lambda _process: before + 7.0)
    assert newest_change(tmp_path / "link") == before + 7.0


@pytest.mark.skipif(file_system("/proc") != "proc", reason="there is no procfs")
def test_a_link_of_this_process_has_no_time_of_its_own(tmp_path):
    model = write_files(tmp_path / "m", ONE)
    (tmp_path / "link").symlink_to(f"/proc/self/root{model}")
    assert newest_change(tmp_path / "link") == (tmp_path / "link").lstat().st_ctime


def test_a_link_that_is_replaced_is_a_change_also_on_the_way_to_procfs(tmp_path, other_process):
    model = write_files(tmp_path / "m", ONE)
    link = tmp_path / "link"
    link.symlink_to(f"/proc/{other_process.pid}/root{model}")
    before = newest_change(link)
    until_the_clock_of_links_goes_on(tmp_path)
    link.unlink()
    link.symlink_to(f"/proc/{other_process.pid}/root{model}")
    assert newest_change(link) > before


def test_a_process_that_is_unknown_began_in_the_future(tmp_path):
    assert filesystem.process_start(tmp_path) > time.time()


# --- what is said ---------------------------------------------------------------------------------


def test_what_the_digest_of_a_file_rests_on_is_said(tmp_path, monkeypatch):
    model = write_files(tmp_path / "m", ONE)
    monkeypatch.setattr(weights, "shows_changes", lambda _directory: True)
    assert weights.basis_of(model / ONE[0]) == "its content, and its times since"
    monkeypatch.setattr(weights, "shows_changes", lambda _directory: False)
    assert "a sample" in weights.basis_of(model / ONE[0])
